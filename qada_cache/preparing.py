"""`prepare`: collect key moments and compile kernels before the first request."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from . import tuned_choice
from .attention.decode import attend_adaptively, takes_turns
from .attention.libraries import list_latent_libraries, list_libraries
from .attention.plan import find_kernel
from .cache import QAdACache
from .kernels import partial_attention
from .kernels.cpu import latent, prompt
from .kernels.latent_choice import attend_to_latents
from .kernels.operands import Query
from .key_moments.defaults import CURRENT, DEFAULT_MOMENTS, MomentsSource, load_default_moments, split_sources
from .models import find_inputs_device, find_value_dim, list_sizes, read_sizes, unwrap_model
from .names import PROMPTS
from .sketch import MIN_TOKENS
from .state import Shared
from .state.layer import QAdALayer
from .storage import PENDING_TOKENS, ROOM_TOKENS, TokenStore


def prepare(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    moments: MomentsSource = DEFAULT_MOMENTS,
    **options: Any,
) -> None:
    """Collect moments and compile kernels ahead, before this model's caches need them.

        prepare(model, tokenizer, moments="wiki")
        cache = QAdACache(model, moments="wiki")  # takes milliseconds, here and in later requests

    - Moments by a prompt's name are collected, unless they are kept already, and kept in memory and in the user's cache
      folder (`QADA_HOME`). Later caches of the model find them by name, without a tokenizer.
    - The kernels for decode steps on a CPU are compiled (two to six seconds each) and kept in the same folder, if the
      model has parameters on a CPU, and unless `kernels` forbids it. Without a compiler there is a warning.
    - On a GPU Triton's kernels are tried, and compiled for the model's sizes and these options, for single tokens and
      short turns, of one row or rows that differ in length. Single tokens of equal rows have them compiled when first
      met.
    - The model's attention is switched to ours (see `QAdACache`).

    Args:
        model: the model that caches will be built for.
        tokenizer: the model's, for moments by a prompt's name; without it, the one beside the model is looked up.
        moments: of these caches, as for `QAdACache`.
        **options: of these caches, as for `QAdACache`.

    Raises:
        TypeError, ValueError, NotImplementedError, FileNotFoundError: as `QAdACache`. NotImplementedError also, if
            `kernels="triton"`, and this model's decode steps on the CPU cannot go by Triton.
    """
    model = unwrap_model(model)
    # Wrong options are refused before anything is read.
    shared = QAdACache(model, moments=CURRENT, **{**options, "tuned": False})._shared
    tuned_choice.check_left_out(replace(shared.options, tuned=options.get("tuned", False)))
    _, other = split_sources(moments)
    if other in PROMPTS and shared.options.uses_moments and shared.model.layers:
        load_default_moments(model, str(other), tokenizer, shared.model.shard)
    shared = QAdACache(model, moments=moments, **options)._shared
    if not shared.model.layers:
        return
    devices = {find_inputs_device(model), *(weight.device for weight in model.parameters())}
    if shared.model.latents is not None:
        for device in devices:
            _build_latent_kernels(device, model.dtype, shared)
        return
    _, heads, kv_heads, dim = read_sizes(shared.model.config)
    if (seen := shared.options.other_moments) is not None:  # configs of some models have other numbers
        _, kv_heads, dim = seen.shape
    differing = list_sizes(shared.model.config)
    for of_heads in set(differing) if len(differing) > 1 else ((heads, kv_heads, dim),):
        _build_for_heads(devices, model.dtype, shared, *of_heads)


def _build_for_heads(
    devices: Iterable[torch.device], dtype: torch.dtype, shared: Shared, heads: int, kv_heads: int, dim: int
) -> None:
    """Those for layers of these heads, over all processes."""
    value_dim, group = find_value_dim(shared.model.config, dim), heads // kv_heads
    kv_heads //= shared.model.shard.size
    for device in devices:
        if device.type in ("cpu", "cuda"):
            _build_kernels(device, dtype, shared, kv_heads=kv_heads, group=group, dim=dim, value_dim=value_dim)


def _build_kernels(
    device: torch.device, dtype: torch.dtype, shared: Shared, *, kv_heads: int, group: int, dim: int, value_dim: int
) -> None:
    """Compute turns and single tokens in one layer of an empty cache: without a bulk, then with one, then with a sketch
    of it. So kernels are chosen and compiled by the very calls of such steps. `partial_attention` reads the bulk for
    audits, and if no kernel serves. A NotImplementedError as by `choice.choose_kernel`."""
    options, generator = shared.options, torch.Generator(device).manual_seed(0)

    def draw(heads: int, tokens: int, size: int) -> torch.Tensor:
        return torch.randn(1, heads, tokens, size, dtype=dtype, device=device, generator=generator)

    local = min(options.local_tokens, options.sink_tokens + ROOM_TOKENS)  # a longer window starts with as many columns
    if device.type == "cpu":
        for library in list_libraries(options, dtype, group=group, dim=dim, value_dim=value_dim):
            library.build()
    layer = QAdALayer(Shared(replace(options, local_tokens=local), shared.model), shared.model.layers[0])
    layer.lazy_initialization(draw(kv_heads, 0, dim), draw(kv_heads, 0, value_dim))
    store, query = cast(TokenStore, layer.store), draw(kv_heads * group, 1, dim)
    turn = draw(kv_heads * group, min(2, store.window), dim)
    for tokens in (max(1, local - 2), PENDING_TOKENS, MIN_TOKENS):  # two single tokens fit beside the first ones
        store.absorb(draw(kv_heads, tokens, dim), draw(kv_heads, tokens, value_dim), None)
        for states in (query, turn) if takes_turns(layer, store, turn) else (query,):
            kernel, new = find_kernel(layer, store, states), states.shape[2]
            for _ in range(0 if kernel is None else 2):  # the first may be audited, which no kernel computes
                unstored = draw(kv_heads, new, dim), draw(kv_heads, new, value_dim)
                store.append(*unstored, None, write=False)
                attend_adaptively(layer, store, Query(states, scaling=dim**-0.5, unstored=unstored))
    if kernel is None or options.audit_every:
        bulk = store.bulk.keys.to(device), store.bulk.values.to(device)
        partial_attention(query.view(1, kv_heads, group, dim), *bulk, scaling=1.0, kernels=options.kernels)


def _build_latent_kernels(device: torch.device, dtype: torch.dtype, shared: Shared) -> None:
    """Build kernels for layers of latents, whose prompts are expanded: attention over these, and that of two tokens."""
    config, sizes, kernels = shared.model.config, shared.model.latents, shared.options.kernels
    assert sizes is not None
    heads = config.num_attention_heads // shared.model.shard.parts
    if kernels != "torch" and device.type == "cpu":
        of_prompt = config.qk_nope_head_dim + sizes.rope, config.v_head_dim, dtype
        if prompt.serves_sizes(*of_prompt):
            prompt.build(*of_prompt)
        libraries = list_latent_libraries(shared.options, dtype, sizes, heads)
        built = {library.source: library.build() for library in libraries}
        if built.get(latent.SOURCE):
            return
    latents = torch.zeros(1, 1, MIN_TOKENS, sizes.dim, dtype=dtype, device=device)
    for tokens in (1, 2):
        states = latents.new_zeros(1, 1, heads * tokens, sizes.dim)
        attend_to_latents(states, latents, sizes.rank, scaling=1.0, kernels=kernels)
