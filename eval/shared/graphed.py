"""StaticCache as people use it on a GPU: a decode step in one CUDA graph, as `torch.compile` makes it."""

from torch import Tensor
from transformers import PreTrainedModel, StaticCache

from qada_cache.decode_graph.capturing import CudaGraph
from qada_cache.versions import pass_cache

EAGER_STEPS = 2  # before the graph is captured


class GraphedStaticCache(StaticCache):
    """A StaticCache with a graph of the model's step, without fusion of operators."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]  # as StaticCache takes them
        self._steps = 0
        self._graph: CudaGraph
        self._ids: Tensor
        self._logits: Tensor

    def decode(self, model: PreTrainedModel, ids: Tensor) -> Tensor:
        """Logits `[batch, 1, vocabulary]` of tokens `[batch, 1]`; they are overwritten by the next step's."""
        self._steps += 1
        if self._steps <= EAGER_STEPS:
            return model(input_ids=ids, **pass_cache(self)).logits
        if self._steps == EAGER_STEPS + 1:
            self._ids, self._graph = ids.clone(), CudaGraph(ids.device)
            with self._graph.capture():
                self._logits = model(input_ids=self._ids, **pass_cache(self)).logits
        self._ids.copy_(ids)
        self._graph.replay()
        return self._logits
