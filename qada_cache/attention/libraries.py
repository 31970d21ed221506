"""The C++ libraries that a cache needs on a CPU, and building them while its prompt is read."""

from functools import partial

import torch
from torch import Tensor

from ..kernels import cpu
from ..kernels.cpu import compiled_decode, correlating, latent, prompt, quantizing, recording, selected_prompt
from ..kernels.cpu.building import Library, build_ahead
from ..kernels.operands import Query
from ..models.latent import LatentSizes
from ..sketch import BLOCK
from ..sketch.coded import RecordLayout
from ..state import Options
from ..state.layer import QAdALayer


def list_libraries(
    options: Options,
    dtype: torch.dtype,
    *,
    group: int,
    dim: int,
    value_dim: int,
    softcap: bool = False,
    sinks: bool = False,
) -> list[Library]:
    """The libraries that read a long prompt and decode after it on a CPU, for `group` query heads per KV head, keys of
    `dim` channels and values of `value_dim`, all in `dtype`. The decode step's come first: they are needed last, but
    take longest to build. `softcap` and `sinks` say whether scores have a cap, and heads learned sinks."""
    kernels, layout = options.kernels, RecordLayout.from_bits(dim, value_dim, options.bulk_bits)
    if kernels == "torch":
        return []
    found, decoding = [], (dtype, dim, value_dim, group)
    if cpu.supports_sizes(*decoding):
        element, by_torch = cpu.ELEMENTS[dtype], options.criterion == "oracle" or softcap
        if kernels == "auto" and not by_torch:
            sizes = dim, value_dim, group, layout
            found.append(Library(cpu.SOURCE, cpu.define(element, *sizes), partial(cpu.build, dtype, *sizes)))
        if by_torch or options.audit_every:  # both read whole heads by partial attention
            few = dim, value_dim, cpu.round_queries(group)
            found.append(Library(cpu.PARTIAL, cpu.define(element, *few), partial(cpu.build_partial, dtype, *few)))
    found += _list_coders(layout, dtype, dim, sketched=options.selects_tokens)
    if not (softcap or sinks) and prompt.has_instructions() and prompt.serves_sizes(dim, value_dim, dtype):
        of_prompt = dim, value_dim, dtype
        if options.prefill_threshold and selected_prompt.selects_sizes(*of_prompt):
            macros, build = selected_prompt.define_selecting(*of_prompt), selected_prompt.build_selecting
            found.append(Library(selected_prompt.SOURCE, macros, partial(build, *of_prompt)))
        found.append(Library(prompt.SOURCE, prompt.define(*of_prompt), partial(prompt.build, *of_prompt)))
    # Covariances with keys: keys' own for moments, values' for the sketch.
    left_dims = {dim} if options.tracks_moments else set[int]()
    left_dims |= {value_dim} if options.selects_tokens else set()
    for left_dim in left_dims:
        of_tokens = left_dim, dim, dtype
        if prompt.has_instructions() and correlating.takes_channels(*of_tokens):
            build = partial(correlating.build_correlating, *of_tokens)
            found.append(Library(correlating.SOURCE, prompt.define(*of_tokens), build))
    return found


def list_latent_libraries(options: Options, dtype: torch.dtype, sizes: LatentSizes, heads: int) -> list[Library]:
    """The libraries that decode with layers that cache latents of these `sizes` for `heads` query heads. A prompt needs
    none of these, as its keys are expanded."""
    dim, rank = sizes.dim, sizes.rank
    if options.kernels == "torch":
        return []
    found, layout = list[Library](), RecordLayout.from_bits(dim, 0, options.bulk_bits)
    if latent.serves_sizes(dtype, dim, rank):
        of_latents = dtype, dim, rank, layout
        found.append(
            Library(latent.SOURCE, latent.define_latent(*of_latents), partial(latent.build_latent, *of_latents))
        )
    decides, group = options.criterion != "dense", cpu.split_heads(heads)
    if decides and compiled_decode.supports_sizes(dtype, dim, rank, group, layout, shared=True):
        of_steps = dim, rank, group, layout
        macros, build = cpu.define(cpu.ELEMENTS[dtype], *of_steps, shared=True), partial(cpu.build, shared=True)
        found.append(Library(cpu.SOURCE, macros, partial(build, dtype, *of_steps)))
    return found + _list_coders(layout, dtype, dim, sketched=options.selects_tokens)


def _list_coders(layout: RecordLayout | None, dtype: torch.dtype, dim: int, *, sketched: bool) -> list[Library]:
    """The libraries that code and decode records, and that code the sketch, which records cannot do without."""
    found = list[Library]()
    if layout is not None:
        macros = recording.define_coder(layout)
        found.append(Library(recording.SOURCE, macros, partial(recording.build_coder, layout)))
    if dtype in cpu.ELEMENTS and dim % BLOCK == 0 and (sketched or layout is not None):
        macros = quantizing.define_quantizer(dtype, dim)
        found.append(Library(quantizing.SOURCE, macros, partial(quantizing.build_quantizer, dtype, dim)))
    return found


def build_for_prompt(layer: QAdALayer, query: Query, key: Tensor, value: Tensor, tokens: int) -> None:
    """Start building missing libraries in the background when the first layer begins to read a text whose prompt has
    `tokens` tokens, padding included, unless its bulk will be too short for kernels to decode from."""
    states, batch = query.states, len(key)
    bulk = tokens - min(layer.padding.count_by_row(batch)) - layer.options.local_tokens
    if bulk < cpu.MIN_TOKENS or not states.is_cpu or not states.dtype == key.dtype == value.dtype:
        return
    if (latents := layer.shared.model.latents) is not None:
        build_ahead(list_latent_libraries(layer.options, states.dtype, latents, states.shape[1]))
        return
    sizes = {"group": states.shape[1] // key.shape[1], "dim": key.shape[3], "value_dim": value.shape[3]}
    softcap, sinks = query.softcap is not None, query.sink_logits is not None
    build_ahead(list_libraries(layer.options, states.dtype, **sizes, softcap=softcap, sinks=sinks))
