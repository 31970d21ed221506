"""QAdACache: the KV cache a user hands to `generate()`."""

import copy
import os
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from . import cache_file, tuned_choice
from .attention import forward as attention
from .attention import generation, support
from .criterion import StaticHeads
from .decode_graph import make_graph
from .kernels import choice
from .key_moments.defaults import DEFAULT_MOMENTS, MomentsSource
from .models import find_served_layers, unwrap_model
from .models.sharding import UNSHARDED
from .state import CONDITIONS, DECIDING, LAID_OUT, SKETCH_BITS, THRESHOLD, TOKEN_THRESHOLD, Options, Shared
from .state.layer import QAdALayer
from .state.observation import Observer
from .stats import CacheStats, collect, count_layer_bytes, describe_stats
from .storage.sharing import move_to_shared_memory
from .watched import WatchedCache


class QAdACache(WatchedCache):
    """A KV cache for transformers: each attention head reads 128 tokens near it, and selected tokens of the rest.

    Implements QAdA ("Adaptive Long-Context Head Identification", arXiv 2502.09647). The *bulk*, all tokens outside
    sinks and sliding window, lies in host memory. For every generated token each head computes `A_local =
    sum exp(score)` over sinks and window. It estimates the same sum over the bulk by the keys' mean and covariance
    (eq. 7): `log A_bulk = log T_bulk + mu_s + sigma_s^2 / 2`. A head with `A_local / (A_local + A_bulk) < threshold` is
    long-context: it also reads selected tokens of the bulk, or with `token_threshold=0` all. Nothing is evicted.

        cache = QAdACache(model)
        model.generate(**inputs, cache=cache)
        print(cache.stats())

    Building a cache puts our function before the model's attention, whose name stays. Calls of other caches pass
    straight through, and `restore_attention(model)` undoes it. The first cache of a model also runs the model over a
    short prompt, unless `moments="current"`, and writes the key moments to the user's cache folder. The first long
    prompt on a CPU starts to compile a kernel into that folder. `prepare` does both ahead. Calls with more new tokens
    than the window, or on a GPU than 8, are exact. Other layers keep transformers' own caches.

    Args:
        model: the model the cache is for, perhaps wrapped by `torch.compile` or peft. Instead of it, `config` takes the
            model's own `model.config`. Under tensor parallelism all processes build their caches together.
        threshold: tau in [0, 1]: a head is local if at least this share of its attention stays local. 0 makes every
            head local. 1 makes none local: `DynamicCache`'s attention, summed in another order. In bfloat16 and float16
            near-tied tokens may then differ, as between eager and sdpa attention.
        sink_tokens: tokens at the start of each row that are always read, at most 65,536.
        local_tokens: sinks and sliding window together, in tokens.
        criterion: "gaussian" (eq. 7); "oracle" (eq. 2, reads everything to decide: for analysis); "dense" (no head
            is local); "local" (every head is); or `StaticHeads`, the same heads for every token. None: "gaussian", but
            "dense" for latent attention.
        group_rule: how query heads that share a KV head decide. "any": if one of them is long-context, all are, as the
            keys and values are read anyway. "head": every query head decides for itself, as in the paper.
        moments: the prompt whose keys' mean and covariance count. "current": the prompt being read; in repetitive text
            its moments hide the one key that matters. "random-tokens": 1,024 ordinary tokens of the vocabulary in
            random order. "random-words", "wiki", "single-word": 1,024 tokens of our article (its words in random order,
            its text, one word repeated). The model reads these once (seconds); memory and the user's cache folder
            (`QADA_HOME`) keep the moments. Or `KeyMoments`, or their file's path or "hf://owner/name". "current+" and
            one of the others, or a tuple of "current" and one: the larger estimate of `A_bulk` counts. Words need the
            tokenizer beside the model's files, or given to `prepare`. Without it "wiki" raises, and the other two
            become "random-tokens" and "single-token", with a warning. With `config`, moments are looked up in the cache
            folder; if there are none, only the current prompt's count, with a warning.
        token_threshold: theta: a long-context head reads bulk tokens that get at least theta times an even share of
            its attention, by the sketch, and estimates the others. 0: it reads all, as in the paper, and always under
            "dense", "oracle" and a threshold of 1.
        sketch_bits: bits a value, on average, of the sketch, a copy of the bulk's keys on the compute device: 0.5 to 4.
        bulk_bits: 16: the bulk is as the model made it. 8 or 4: its tokens are read in about so many bits a value, the
            sketch's included, in layers whose heads have multiples of 8 channels, and a sketch is kept. None: 8 on a
            CPU if tokens are selected in the metric of another prompt's queries (of `moments`), else 16.
        prefill_threshold: 0: a first prompt is read exactly. Above: keys are read that get so many times an even share,
            on CPUs with AVX2 and FMA or NEON, from some 1,300 tokens on, where an estimate stands for others, and by
            Triton on GPUs, from 1,024 tokens on, where a sample does. None: 0, or as `tuned`.
        update_moments: with "current" moments, whether tokens that leave the window keep updating them during
            query-adaptive calls; False freezes them after prefill, as the paper does.
        offloading: keep the bulk in host memory. On a CPU model host and device are one and nothing is copied.
        device_budget: how much of an offloaded bulk lies on each of the model's devices instead, in whole layers: bytes
            (an int), a share (a float in [0, 1]), or "auto": what is free once the prompt has been read, but for a
            tenth of the device's memory and at least 1 GiB. A layer that outgrows it moves to host memory, for good.
            Outputs do not depend on it.
        audit_every: query-adaptive steps between audits; 0: none. An audit reads one layer's whole bulk, layers in
            turn, and records the missed attention in `stats().audit`. Outputs stay the same but for rounding.
        kernels: "auto", "torch" or "triton" (see `kernels/choice.py`); None: as `QADA_KERNELS` says, else "auto".
        progress: show a bar with the time left while a prompt of more than a few seconds is read.
        cuda_graph: whether decode steps on a GPU are replays of one CUDA graph, where they can be. None: if the decoder
            has no hooks and no adapters. With True these must stay as they are, and hooks do not run in replays.
        tuned: take both thresholds, neither given then, and if None `prefill_threshold` and few `bulk_bits`, as `qada
            tune` kept them. Without any, or under other options, defaults count, with a warning.

    Raises:
        TypeError, ValueError, FileNotFoundError: an argument of the wrong type or outside its range, moments that
            cannot be loaded or collected, moments or heads of another shape or model.
        NotImplementedError: a kind of model this cache does not support.
    """

    is_compileable = False  # transformers' flag: if True, `generate` would compile the model unasked

    def __init__(
        self,
        model: PreTrainedModel | None = None,
        *,
        config: PreTrainedConfig | None = None,
        threshold: float = THRESHOLD,
        sink_tokens: int = 16,
        local_tokens: int = 128,
        criterion: str | StaticHeads | None = None,
        group_rule: str = "any",
        moments: MomentsSource = DEFAULT_MOMENTS,
        token_threshold: float = TOKEN_THRESHOLD,
        sketch_bits: float = SKETCH_BITS,
        bulk_bits: int | None = None,
        prefill_threshold: float | None = None,
        update_moments: bool = True,
        offloading: bool = True,
        device_budget: int | float | str = 0,
        audit_every: int = 0,
        kernels: str | None = None,
        progress: bool = False,
        cuda_graph: bool | None = None,
        tuned: bool = False,
    ) -> None:
        given = locals()
        model = unwrap_model(model)
        text_config = support.find_text_config(model, config)
        left_open = [name for name in tuned_choice.LEFT_OPEN if given[name] is None]
        asked = {name: given[name] for name in DECIDING + LAID_OUT if name not in left_open}
        asked["kernels"] = choice.resolve_kernels(kernels)
        asked["criterion"] = "gaussian" if criterion is None else criterion
        options = Options(**asked, tuned=tuned)
        support.check_model(model, text_config)
        attention.check_implementation(text_config)
        super().__init__(config=text_config)
        managed = support.describe_model(model, config, ours := find_served_layers(self, text_config))
        tuned_choice.check_left_out(options)
        options = support.resolve_options(options, managed, chosen=criterion is not None)
        options = support.choose_bits(options, managed) if bulk_bits is None else options
        self._shared = Shared(tuned_choice.apply_tuned(options, managed, left_open), managed)
        for index in ours:
            self.layers[index] = support.make_layer(self._shared, index)
        self._decode_graph = make_graph(options, managed, self.layers)
        if not ours:
            support.warn_of_no_layers(self.layers, text_config)
        attention.switch_on(text_config, model)

    @property
    def options(self) -> Options:
        """The options this cache was built, forked or loaded with; frozen."""
        return self._shared.options

    @property
    def observer(self) -> Observer | None:
        """None, or a function that gets an `Observation` of every query-adaptive call of every layer, once computed.
        Copies of the cache have no observer. With an observer torch computes, whatever `kernels` says. Exact calls
        decide nothing and are not observed. An error that the observer raises interrupts the forward pass."""
        return self._shared.observer

    @observer.setter
    def observer(self, observer: Observer | None) -> None:
        if observer is not None and not callable(observer):
            raise TypeError(f"observer must be None or a function of one Observation, got {type(observer).__name__}")
        self._shared.observer = observer

    @attention.outside_graphs
    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple:
        """Take in one layer's new keys and values `[batch, kv_heads, tokens, dim]`; for the model to call."""
        if layer_idx >= (built := len(self.layers)):
            raise ValueError(
                f"this QAdACache was built for {built} layers and layer {layer_idx} called it: build one per model"
            )
        if layer_idx == 0 or layer_idx in self._shared.model.layers[:1]:  # layer 0 may have no keys, and so not call
            attention.check_switched_on(self._shared.model.config)
            self._shared.rope_deltas.note(key_states.shape[2], self._count_tokens())
        self._enter(layer_idx, "keys")
        layer: Any = self.layers[layer_idx]
        if self.options.progress:
            if (tokens := key_states.shape[2]) <= self.options.window:
                self._shared.bar.close()
            else:
                prompt = max((held := layer.get_seq_length()) + tokens, generation.find_prompt().tokens)
                self._shared.bar.advance(layer_idx, 1 + self._last_layer, held=held, tokens=tokens, prompt=prompt)
        if not isinstance(layer, QAdALayer):  # ours check for themselves, and notice what they did not store
            self._prepare_layer(layer_idx, key_states)
            self._shared.progress.changing = "a forward pass"  # it counts tokens before it stores them
        states = layer.update(key_states, value_states, *args, **kwargs)
        self._note(layer_idx, "keys")
        return states

    def fork(self, **options: Any) -> "QAdACache":
        """A `copy.deepcopy` of the cache that decides by other options, with its counters at zero.

            model(**inputs, cache=cache)  # prefill once, which is exact whatever decides afterwards
            full = cache.fork(criterion="dense")

        Args:
            options: deciding options of `QAdACache`; the others stay.

        Raises:
            TypeError, ValueError, FileNotFoundError: as `QAdACache`; an unknown option, or one that decides how tokens
                are stored; `update_moments=False` after decoding without it.
            RuntimeError: a forward pass was interrupted.
        """
        self._check_whole()
        # Records hold what keys differ by from the sketch, so its code has to stay.
        laid_out = (*LAID_OUT, "sketch_bits") if self.options.codes_tokens else LAID_OUT
        for name, value in options.items():
            if name not in DECIDING + LAID_OUT:
                raise TypeError(f"fork takes {', '.join(DECIDING)}, not {name}")
            if name in laid_out and value != getattr(self.options, name):
                raise ValueError(
                    f"fork cannot change {name} from {getattr(self.options, name)!r} to {value!r}, as what is held "
                    "was laid out by it: build another QAdACache and read the prompt again"
                )
        tuned = self.options.tuned and not options.keys() & set(CONDITIONS)
        chosen = "criterion" in options or self.options.criterion != "dense"
        decided = replace(self.options, **options, tuned=tuned)
        decided = support.resolve_options(decided, self._shared.model, chosen=chosen)
        twin = copy.deepcopy(self)
        twin._shared.options = decided
        twin._decode_graph = make_graph(decided, twin._shared.model, twin.layers)
        for layer in twin.layers:
            if isinstance(layer, QAdALayer):
                layer.apply_options()
        return twin

    @torch.inference_mode(False)  # the copies are written to later, perhaps outside inference mode
    def __deepcopy__(self, memo: dict) -> "QAdACache":
        self._finish_pass()
        self._check_files()
        move_to_shared_memory(self._list_bulks())
        twin = memo[id(self)] = type(self).__new__(type(self))
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin

    def __copy__(self) -> "QAdACache":
        (twin := type(self).__new__(type(self))).__dict__.update(self.__dict__)
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "QAdACache cannot be pickled, as a pickle runs code: use save() and QAdACache.load(path, model)"
        )

    def layer_bytes(self) -> list[tuple[int, int]]:
        """Bytes of every layer, on the device and on the host. Only `stats` counts snapshots of other layers, and key
        moments of another prompt."""
        return list(map(count_layer_bytes, self.layers))

    def stats(self, *, gather: bool = False) -> CacheStats:
        """Sparsity, bytes held and bytes read so far. `gather`: of all processes of a split model; all have to call."""
        return collect(self, self._shared.model.shard if gather else UNSHARDED)

    def save(self, path: str | os.PathLike) -> None:
        """Write the whole state to one safetensors file, so that a long prompt is prefilled once and reused. The file
        names its model by config, and by a sample of the weights if the cache was built with the model.

        Raises:
            RuntimeError: a forward pass was interrupted, so there is no whole state; the model has another dtype.
            NotImplementedError: a layer of another kind holds what no file may have, or processes share the model.
            OSError: the file cannot be written, or is no regular file.
        """
        self._check_whole()
        cache_file.write_cache(path, self._shared, self.layers)

    @classmethod
    @torch.inference_mode(False)  # as for deepcopy
    def load(
        cls,
        path: str | os.PathLike,
        model: PreTrainedModel | None = None,
        *,
        config: PreTrainedConfig | None = None,
        mmap: bool = True,
    ) -> "QAdACache":
        """The cache that `save` wrote, for the same model. Generation continues as if it had not been interrupted.

        Weights have to be the same; they are not compared if either cache is built with `config`, by which states of
        linear layers lie on the CPU. With `mmap`, on a CPU, the bulk is mapped from the file, which may be replaced but
        must not be written to in place. Without it, or if the system cannot tell who writes to the file, the bulk is
        read into memory.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is truncated, altered, contradicts itself, or is no such file or of another format or model.
            NotImplementedError: processes share the model.
        """
        model = unwrap_model(model)
        decoder = support.find_text_config(model, config)  # first, so that its errors do not blame the file
        make = partial(cls, model, config=config)
        return cache_file.read_cache(path, make, model=model, config=decoder, mmap=mmap)

    def __repr__(self) -> str:  # from host numbers alone: printing must not wait for the device
        return describe_stats(self, self.options, self._shared.model.model_type)
