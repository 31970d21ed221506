"""Decode steps as replays of one CUDA graph.

A short step costs the host more than the device: operator after operator is launched from Python. A graph holds all
launches of one step of the decoder and starts them at once. Values that differ between steps lie in tensors at fixed
addresses (`Places`). A replay reads them and writes those of the next step, so the host writes the new token alone.
The host's own counts of a step are updated by `Step.advance`.

A graph is valid as long as the tensors of all layers keep their addresses, so until the bulk grows. Turns and flushes
do not end it. The first step after its end is computed without a graph. The second is a rehearsal: it computes in the
tensors of `Places`, so that nothing is built or allocated while the third is captured. A decoder's first replays are
compared with its own results, as a model may compute with numbers on the host, which a replay does not update. From
then on, caches of this decoder compare nothing, and rehearse only where a capture fails without. A decoder with modules
of other kinds is compared anew.
No graph holds flushes, which go before a step, prompts, turns and other passes that `find_inputs` refuses.
"""

import logging
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..garbage import without_collecting
from ..models import attends_twice, decoder_forward
from ..models.latent import has_indexers
from ..models.sharding import UNSHARDED
from ..said_once import warn_once
from ..state import BULK_BITS, ManagedModel, Options
from ..state.layer import QAdALayer
from ..storage.transfers import WAITING, find_reader
from ..versions import CACHE, CACHE_NAMES
from .capturing import GRAPHS, HostState
from .counting import add_local, make_sums
from .inputs import find_inputs
from .lasting import Lasting, LayerStates, can_last
from .model_state import ModelState, list_kinds
from .step import Places, Step

logger = logging.getLogger(__name__)
# The error of a replayed hidden state, relative to the norm of the computed one, may be the larger of these two.
ROUNDING = 4  # times the dtype's eps
MOST_EXACT = 1e-5
COMPARED = 2  # replays: of the captured step, and of a step at another position
# Decoders whose replays were compared, and were right, with `list_kinds` of them.
_proven: weakref.WeakKeyDictionary[nn.Module, list[type]] = weakref.WeakKeyDictionary()
Compute = Callable[..., Any]
_TORCHS = "torch computes decode steps of this model, which no CUDA graph holds: cuda_graph=True has none"


def make_graph(options: Options, managed: ManagedModel, layers: list[Any]) -> "DecodeGraph | None":
    """The graph of a cache with these options and layers, or None. From now on the decoder's forward function uses it.
    ValueError or NotImplementedError if `options.cuda_graph` is True and the model shows that there can be none."""
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
    """The graph of one cache's decode steps, once it is captured. A copy begins without one."""

    def __init__(self, *, asked: bool) -> None:
        """`asked`: the user gave `cuda_graph=True`, and so accepts that replays run no hooks and change no adapters."""
        self.asked = asked
        self.failed = ""  # the reason why no graph is captured any more
        self._refused = False  # whether a capture has failed that no rehearsal preceded
        self.forget()

    def __deepcopy__(self, memo: dict) -> "DecodeGraph":
        return DecodeGraph(asked=self.asked)

    def forget(self) -> None:
        """Drop the graph and its memory."""
        self._graph: Any = None
        self._result: tuple[type, Tensor] | None = None  # the type of the decoder's output, and its last hidden state
        self._places: Places | None = None
        self._step: Step | None = None  # the last replayed one; None after a pass without the graph
        self._facts: Any = None  # decoder, plans, places of moments: what the graph depends on, beside shapes
        self._lasting: Lasting | None = None  # state of transformers' own layers
        self._model: ModelState | None = None  # the model's state when the graph was captured
        self._counts: list[Tensor] = []  # what a replay adds to, and what that was before the last one
        self._counts_before: list[Tensor] = []
        self._stream: Any = None  # the stream of the last replay
        self._compared = 0  # replays whose results were compared, and were right

    def run(self, cache: Any, decoder: nn.Module, compute: Compute, kwargs: dict[str, Any]) -> Any:
        """Returns what `compute(**kwargs)`, the decoder's own forward, returns with this cache; replays if it can."""
        step, layers = self._step, [layer for layer in cache.layers if isinstance(layer, QAdALayer)]
        states = LayerStates(cache.layers)
        in_place = states.keeps_shapes and self._lasting is not None and self._lasting.fits(states)
        followed = step is not None and in_place and self._facts[0]() is decoder and step.is_followed_by(layers)
        inputs = None
        if not self.failed and states.keeps_shapes:
            tokens = states.window_tokens
            inputs = find_inputs(layers, decoder, kwargs, followed=followed, sliding_tokens=tokens)
        if inputs is None:
            self._step = step = None  # what layers have dropped is freed before a prompt
            return compute(**kwargs)
        if len(layers) < len(cache.layers):
            cache._begin_pass()  # the first called layer does so too, and a replay calls none
        if step is not None and not step.stores[0].has_room:
            _flush(step)
            followed = False
        # Whether the last replay has written all that this one reads, but `inputs`. Plans hold memory of the graph's.
        same = step is not None and followed and step.keeps_moments and step.takes(inputs)
        same = same and all(plan() is not None for plan in self._facts[1])
        prepared = same and decoder in _proven and not self._is_model_stale
        if step is None or not prepared:
            step, self._step = Step(layers, inputs), None
            if step.numbers["decisions"] != step.stores[0].batch:
                return compute(**kwargs)
            facts = weakref.ref(decoder), step.plans, step.find_moments()
            fits = self._places is not None and self._places.fits(step)
            if self._places is None or not fits or facts != self._facts or not in_place or self._is_model_changed:
                self.forget()
                if not step.plans:  # after one step without a graph, each layer that a kernel computes has a plan
                    if self.asked and step.is_torchs:
                        warn_once(logger, _TORCHS)
                    return compute(**kwargs)
                self._facts, self._places, self._lasting = facts, Places(step), Lasting(states)
                if _proven.get(decoder) != list_kinds(decoder):
                    _proven.pop(decoder, None)
                if decoder not in _proven or self._refused:
                    with step.use(self._places):  # a rehearsal; without `position_ids` the decoder makes its own
                        return compute(**self._replace_inputs(kwargs, inputs))
            self._places.write(step)
        assert self._places is not None
        assert self._lasting is not None
        self._lasting.put(states)
        self._places.write_inputs(inputs if prepared else step.inputs)
        stream = find_reader(step.device)
        if not prepared or stream != self._stream:  # else this stream has waited for all copies to bulks
            self._stream = stream
            for store in step.stores:
                if store.bulk.offloaded:
                    store.bulk.find_in_place()
        if self._graph is None and not self._capture(cache.layers, decoder, compute, kwargs, step):
            return compute(**kwargs)
        if decoder not in _proven:
            return self._compare(decoder, compute, kwargs, step)
        assert self._result is not None
        step.shared.progress.changing = "a replayed step"
        self._graph.replay()
        if self._undoes and prepared and self._is_model_changed:  # found while the device computes
            torch._foreach_copy_(self._counts, self._counts_before)
            step.shared.progress.changing = ""
            self.forget()
            return compute(**kwargs)
        step.advance()
        for layer in states.sliding:
            layer.cumulative_length += 1
        step.shared.progress.changing = ""
        self._step = step
        kind, hidden = self._result
        return kind(last_hidden_state=hidden.clone(), **{CACHE: decoder_forward.find_cache(kwargs)})

    @property
    def _undoes(self) -> bool:
        """Whether a replay can be undone: all that it changes and a pass would not write again are counts."""
        return self._lasting is not None and not self._lasting.tensors

    @property
    def _is_model_stale(self) -> bool:
        """Whether the model has changed, as far as it must show before a replay."""
        return self._model is not None and (self._model.is_moved if self._undoes else self._model.is_changed)

    @property
    def _is_model_changed(self) -> bool:
        return self._model is not None and self._model.is_changed

    def _replace_inputs(self, kwargs: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
        """The decoder's arguments, with those of these `names` from `Places`, and without a mask."""
        assert self._places is not None
        return kwargs | {name: self._places.inputs[name] for name in names} | {"attention_mask": None}

    def _capture(
        self, layers: list[Any], decoder: nn.Module, compute: Compute, kwargs: dict[str, Any], step: Step
    ) -> bool:
        """Captures a graph of this step; returns whether it could. The host's state is then as it was before."""
        assert self._places is not None
        assert self._lasting is not None
        model = ModelState(decoder, watches_hooks=not self.asked, forget=self.forget)
        adapted = not self.asked and any(hasattr(module, "base_layer") for module in decoder.modules())
        if model.has_hooks or adapted:
            self._fail("its modules have hooks or adapters: cuda_graph=True has one if these stay as they are")
            return False
        counters = [asker.counters for asker in step.askers]
        sums = make_sums(step)
        for each, layer_sums in zip(counters, sums, strict=True):
            each.count_replays(*layer_sums)
        for store in step.stores:
            store.bulk.synchronize()
        counts = [each for own in counters for each in own.on_device]
        with torch.inference_mode(False):  # a replay may write to them outside inference mode
            before = [torch.empty_like(each) for each in counts]
        host_state = HostState(layers, step.shared)
        graph = GRAPHS[step.device.type](step.device)
        try:
            with (
                step.use(self._places),
                self._lasting.write(LayerStates(layers)),
                WAITING,
                without_collecting(),  # a cache that is freed asks its stream for its state, which ends a capture
                graph.capture(),
            ):
                torch._foreach_copy_(before, counts)
                result = compute(**self._replace_inputs(kwargs, self._places.inputs))
                others = {name for name in result if name not in ("last_hidden_state", *CACHE_NAMES)}
                if others:
                    raise NotImplementedError(f"the model returns {', '.join(sorted(others))}")
                after = LayerStates(layers)
                if not after.keeps_shapes or not self._lasting.fits(after):
                    raise NotImplementedError("what its linear or sliding layers hold is of another kind after a pass")
                add_local([each.take_flags() for each in counters], sums)
                self._places.advance()
            self._graph, self._result, self._model = graph, (type(result), result.last_hidden_state), model
            self._counts, self._counts_before = counts, before
        except Exception as error:  # whatever a driver, a kernel or the model itself raises while it is captured
            if decoder in _proven and not self._refused:  # this cache may have needed a rehearsal
                self._refused = True
                _proven.pop(decoder, None)
                self.forget()
            else:
                self._fail(f"{type(error).__name__}: {error}".partition("\n")[0])
            return False
        finally:
            host_state.restore()
            if self._graph is None:
                for layer in step.layers:
                    layer.drop_plans()  # what kernels have prepared in the capture was never computed
        return True

    def _compare(self, decoder: nn.Module, compute: Compute, kwargs: dict[str, Any], step: Step) -> Any:
        """Returns what the decoder's `compute(**kwargs)` returns, and drops the graph if a replay of the same step
        returns something else. Waits for the device."""
        assert self._result is not None
        assert self._lasting is not None
        before = [each.clone() for each in self._lasting.tensors]
        step.shared.progress.changing = "a replayed step"
        self._graph.replay()
        hidden = self._result[1].clone()
        torch._foreach_copy_(self._counts + self._lasting.tensors, self._counts_before + before)
        step.shared.progress.changing = ""
        computed = compute(**kwargs)
        expected = computed.last_hidden_state
        error = ((hidden.float() - expected.float()).norm() / expected.float().norm()).item()
        if error <= max(ROUNDING * torch.finfo(expected.dtype).eps, MOST_EXACT):
            self._compared += 1
            if self._compared >= COMPARED:
                _proven[decoder] = list_kinds(decoder)
        else:
            self._fail(f"replays are off by {error:.2g}, as the model goes by numbers that its inputs do not tell")
        return computed

    def _fail(self, why: str) -> None:
        self.forget()
        self.failed = why
        message = f"decode steps of this model are computed without a CUDA graph ({why})"
        if self.asked:
            warn_once(logger, message)
        else:
            logger.info(message)


def _flush(step: Step) -> None:
    """Flush all layers behind a replayed `step`, as they have no room for another token: no graph does this. Plans of
    buffers that a flush has replaced go at once: until the next pass they would keep those of all layers."""
    step.shared.progress.changing = "a flush"
    for layer, store in zip(step.layers, step.stores, strict=True):
        store.flush_for(1)
        layer.drop_old_plans(store.version)
    step.shared.progress.changing = ""
