"""StaticCache as people use it on a GPU: a decode step in one CUDA graph, as `torch.compile` makes it."""

import torch
from torch import Tensor
from transformers import PreTrainedModel, StaticCache

from qada_cache.versions import pass_cache

EAGER_STEPS = 2  # before the graph is captured


class GraphedStaticCache(StaticCache):
    """A StaticCache with a graph of the model's step, without fusion of operators."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]  # as StaticCache takes them
        self._steps, self._graph = 0, torch.cuda.CUDAGraph()
        self._ids: Tensor
        self._logits: Tensor

    def decode(self, model: PreTrainedModel, ids: Tensor) -> Tensor:
        """Logits `[batch, 1, vocabulary]` of tokens `[batch, 1]`; they are overwritten by the next step's."""
        self._steps += 1
        if self._steps <= EAGER_STEPS:
            return model(input_ids=ids, **pass_cache(self)).logits
        if self._steps == EAGER_STEPS + 1:
            self._ids, stream = ids.clone(), torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._graph.capture_begin(capture_error_mode="thread_local")
                try:
                    self._logits = model(input_ids=self._ids, **pass_cache(self)).logits
                finally:
                    self._graph.capture_end()
            torch.cuda.current_stream().wait_stream(stream)
        self._ids.copy_(ids)
        self._graph.replay()
        return self._logits
