"""Decode steps as replays of one CUDA graph.

A short step costs the host more than the device: operator after operator is launched from Python. A graph holds all
launches of one step of the decoder and starts them at once. What differs between steps it reads from tensors that stay
where they are (`Places`), and writes for the next step, so that the host gives it the token alone. What the host keeps
of a step is counted beside it (`Step.advance`).

A graph fits as long as the tensors of all layers stay where they are, so until the bulk grows. The first step after
that computes as ever, the second rehearses what is then captured, so that nothing is built or allocated meanwhile.
A cache's first replays are compared: of a model that goes by numbers of the host's, they would go by old ones.
Steps that move tokens into the bulk, prompts, turns and whatever else a graph cannot hold compute as ever, too.
"""

import logging
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..models import attends_twice, decoder_forward
from ..models.latent import has_indexers
from ..models.sharding import UNSHARDED
from ..said_once import warn_once
from ..state import BULK_BITS, ManagedModel, Options
from ..state.layer import QAdALayer
from ..storage.transfers import find_reader
from ..versions import CACHE, CACHE_NAMES
from .capturing import GRAPHS, HostState
from .lasting import Held, Lasting, can_last
from .model_state import ModelState
from .step import Places, Step, find_inputs

logger = logging.getLogger(__name__)
ROUNDING = 4  # eps of the dtype: what a replayed hidden state may be off the computed one, of its norm
MOST_EXACT = 1e-5  # where eps is less
COMPARED = 2  # replays: of the step that is captured, at positions of the graph's, and of another one
Compute = Callable[..., Any]
_TORCHS = "torch computes decode steps of this model, which no CUDA graph holds: cuda_graph=True has none"


def make_graph(options: Options, managed: ManagedModel, layers: list[Any]) -> "DecodeGraph | None":
    """That of a cache with these options and layers, asked for by the decoder's forward function from now on; None
    without.
    ValueError or NotImplementedError, if one is asked for that cannot be."""
    asked, model = options.cuda_graph, managed.get()
    if asked and model is None:
        raise ValueError("cuda_graph=True needs the model: QAdACache(model, cuda_graph=True)")
    if asked is False or model is None or not (asked or model.device.type in GRAPHS):
        return None
    why = ""
    if decoder_forward.is_taken(model):
        why = (
            "cannot go before the forward function that another library gave this model (accelerate's device_map "
            "does): load it on one device without, or build the cache without cuda_graph"
        )
    elif managed.latents is not None and options.criterion == "dense" and has_indexers(managed.config):
        why = "holds no steps of latents that an indexer picks: build the cache without cuda_graph"
    elif managed.latents is not None and options.criterion == "dense" and (not asked or options.bulk_bits < BULK_BITS):
        why = "holds no steps that read whole latents of few bits: give bulk_bits=16, or build it without cuda_graph"
    elif attends_twice(managed.model_type):
        why = "holds no steps of layers that attend twice: build the cache without cuda_graph"
    elif managed.layers and not can_last(layers, managed.config):
        why = "holds no steps of layers whose keys grow, or that attend by chunks: build the cache without cuda_graph"
    elif managed.shard is not UNSHARDED:
        why = "holds no steps of a model that processes share: build the cache without cuda_graph"
    if why and asked:
        raise NotImplementedError(f"cuda_graph=True {why}")
    if why:
        return None
    decoder_forward.put_before(model)
    return DecodeGraph(asked=bool(asked))


class DecodeGraph:
    """The graph of one cache's decode steps, if they have one. A copy begins without."""

    def __init__(self, *, asked: bool) -> None:
        """`asked`: by the user, who then knows that hooks do not run and adapters do not change in replays."""
        self.asked = asked
        self.failed = ""  # why none is captured any more
        self._compared = 0  # replays that gave what was computed
        self.forget()

    def __deepcopy__(self, memo: dict) -> "DecodeGraph":
        return DecodeGraph(asked=self.asked)

    def forget(self) -> None:
        """Drop the graph and its memory."""
        self._graph: Any = None
        self._result: tuple[type, Tensor] | None = None  # the decoder's kind of result, and its last hidden state
        self._places: Places | None = None
        self._step: Step | None = None  # the last one replayed, as long as nothing else has been computed
        self._facts: Any = None  # what a graph depends on beside shapes
        self._lasting: Lasting | None = None  # of transformers' own layers
        self._model: ModelState | None = None  # as it was captured
        self._stream: Any = None  # that of the last replay

    def run(self, cache: Any, decoder: nn.Module, compute: Compute, kwargs: dict[str, Any]) -> Any:
        """What `compute(**kwargs)`, the decoder's own forward, returns with this cache."""
        step, layers = self._step, [layer for layer in cache.layers if isinstance(layer, QAdALayer)]
        held = Held(cache.layers)
        in_place = held.lasts and self._lasting is not None and self._lasting.fits(held)
        followed = step is not None and in_place and self._facts[0]() is decoder and step.is_followed_by(layers)
        refused = self.failed or not held.lasts
        inputs = (
            None if refused else find_inputs(layers, decoder, kwargs, followed=followed, sliding_tokens=held.tokens)
        )
        if inputs is None:
            self._step = None
            return compute(**kwargs)
        if len(layers) < len(cache.layers):
            cache._begin_pass()  # as the first layer that is called does
        # The replay before has written the rest.
        prepared = step is not None and followed and step.takes(inputs) and not self._is_model_changed
        if step is None or not prepared:
            step, self._step = Step(layers, inputs), None
            if step.numbers["decisions"] != step.stores[0].batch:
                return compute(**kwargs)
            facts = weakref.ref(decoder), step.plans, step.numbers["row_moment_lengths"]
            fits = self._places is not None and self._places.fits(step)
            if self._places is None or not fits or facts != self._facts or not in_place or self._is_model_changed:
                self.forget()
                if not step.plans:  # which shows in the first step
                    if self.asked and step.is_torchs:
                        warn_once(logger, _TORCHS)
                    return compute(**kwargs)
                self._facts, self._places, self._lasting = facts, Places(step), Lasting(held)
                with step.use(self._places):  # a rehearsal, at positions of the decoder's own if it is told none
                    return compute(**self._tell(kwargs, inputs))
            self._places.write(step)
        assert self._places is not None
        assert self._lasting is not None
        self._lasting.put(held)
        self._places.write_inputs(inputs if prepared else step.inputs)
        stream = find_reader(step.device)
        if not prepared or stream != self._stream:  # else it has waited for all copies that a bulk has under way
            self._stream = stream
            for store in step.stores:
                if store.bulk.offloaded:
                    store.bulk.find_in_place()
        if self._graph is None and not self._capture(cache.layers, decoder, compute, kwargs, step):
            return compute(**kwargs)
        if self._compared < COMPARED:
            return self._compare(compute, kwargs, step)
        assert self._result is not None
        step.shared.progress.changing = "a replayed step"
        self._graph.replay()
        step.advance()
        for layer in held.sliding:
            layer.cumulative_length += 1
        step.shared.progress.changing = ""
        self._step = step
        kind, hidden = self._result
        return kind(last_hidden_state=hidden.clone(), **{CACHE: decoder_forward.find_cache(kwargs)})

    @property
    def _is_model_changed(self) -> bool:
        return self._model is not None and self._model.is_changed

    def _tell(self, kwargs: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
        """What the decoder is told by a graph, which has inputs of these names."""
        assert self._places is not None
        return kwargs | {name: self._places.inputs[name] for name in names} | {"attention_mask": None}

    def _capture(
        self, layers: list[Any], decoder: nn.Module, compute: Compute, kwargs: dict[str, Any], step: Step
    ) -> bool:
        """Whether the graph is there, and everything the host knows is as it was before."""
        assert self._places is not None
        assert self._lasting is not None
        model = ModelState(decoder, watches_hooks=not self.asked, forget=self.forget)
        adapted = not self.asked and any(hasattr(module, "base_layer") for module in decoder.modules())
        if model.has_hooks or adapted:
            self._fail("its modules have hooks or adapters: cuda_graph=True has one if these stay as they are")
            return False
        counters = [asker.counters for asker in step.askers]
        sums = _make_sums(step)
        for each, own in zip(counters, sums, strict=True):
            each.count_replays(*own)
        for store in step.stores:
            store.bulk.synchronize()
        kept = HostState(layers, step.shared)
        graph = GRAPHS[step.device.type](step.device)
        try:
            with step.use(self._places), self._lasting.write(Held(layers)), graph.capture():
                result = compute(**self._tell(kwargs, self._places.inputs))
                more = {name for name in result if name not in ("last_hidden_state", *CACHE_NAMES)}
                if more:
                    raise NotImplementedError(f"the model returns {', '.join(sorted(more))}")
                after = Held(layers)
                if not after.lasts or not self._lasting.fits(after):
                    raise NotImplementedError("what its linear or sliding layers hold is of another kind after a pass")
                _add_local([each.take_flags() for each in counters], sums)
                self._places.advance()
        except Exception as error:  # whatever a driver, a kernel or the model itself raises while it is captured
            self._fail(f"{type(error).__name__}: {error}".partition("\n")[0])
            return False
        finally:
            kept.restore()
        self._graph, self._result, self._model = graph, (type(result), result.last_hidden_state), model
        return True

    def _compare(self, compute: Compute, kwargs: dict[str, Any], step: Step) -> Any:
        """What `compute(**kwargs)` returns. A replay of the same step gives that as well, or the graph is dropped. The
        device is waited for."""
        assert self._result is not None
        assert self._lasting is not None
        written = [each for asker in step.askers for each in asker.counters.on_device] + self._lasting.tensors
        before = [each.clone() for each in written]
        step.shared.progress.changing = "a replayed step"
        self._graph.replay()
        hidden = self._result[1].clone()
        torch._foreach_copy_(written, before)
        step.shared.progress.changing = ""
        computed = compute(**kwargs)
        wanted = computed.last_hidden_state
        off = ((hidden.float() - wanted.float()).norm() / wanted.float().norm()).item()
        if off <= max(ROUNDING * torch.finfo(wanted.dtype).eps, MOST_EXACT):
            self._compared += 1
        else:
            self._fail(f"replays are off by {off:.2g}, as the model goes by numbers that its inputs do not tell")
        return computed

    def _fail(self, why: str) -> None:
        self.forget()
        self.failed = why
        said = f"decode steps of this model are computed without a CUDA graph ({why})"
        if self.asked:
            warn_once(logger, said)
        else:
            logger.info(said)


def _make_sums(step: Step) -> list[tuple[Tensor, Tensor]]:
    """Zeros that a graph adds decisions to, by layer that asks, as `Counters.count_replays` takes them."""
    sizes = [(asker.plan.queries[1], asker.plan.operands.kv_heads) for asker in step.askers]
    with torch.inference_mode(False):  # they may be added to outside inference mode
        of_heads = [
            torch.zeros(kv_heads, heads // kv_heads, dtype=torch.int64, device=step.device) for heads, kv_heads in sizes
        ]
        return [(each, each.new_zeros(len(each))) for each in of_heads]


def _add_local(flags: list[Tensor], sums: list[tuple[Tensor, Tensor]]) -> None:
    """Add what flags `[batch, kv_heads, group, 1]` call local to a layer's sums, at once for layers alike in heads."""
    for shape in dict.fromkeys(each.shape for each in flags):
        alike = [(each, own) for each, own in zip(flags, sums, strict=True) if each.shape == shape]
        local = ~torch.stack([each for each, _ in alike])  # [layers, batch, kv_heads, group, 1]
        heads, groups = local.sum(dim=(1, 4)), local.all(dim=3).sum(dim=(1, 3))
        torch._foreach_add_([own[0] for _, own in alike], list(heads.unbind()))
        torch._foreach_add_([own[1] for _, own in alike], list(groups.unbind()))
