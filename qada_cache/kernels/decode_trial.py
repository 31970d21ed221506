"""Trials of kernels for a decode step: on a layer of random tokens they are compared with `decode_reference.py`."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..sketch import MIN_TOKENS, Layout, count_closed
from ..sketch.codec import Sketch
from ..sketch.coded import RecordLayout, Records, code_tokens, find_query_weights, fit_records
from .decode_reference import decode_step, predict_keys
from .operands import Operands, Query, Rows
from .reference import find_fault

KV_HEADS = 3
LOCAL, PENDING_COLUMNS, COLUMNS = 20, 5, 29  # columns of the near buffer: local, pending, and all; 4 are unused
SHORT = 300  # tokens in the bulk of all rows but the first
UNREAD_BYTE = 255  # fills records that no kernel may read: as a scale it is nan
BULK = "bulk_keys", "bulk_values"
# A scene's fields of `Query` and of `Rows`.
QUERY, ROWS = (
    ("states", "scaling", "log_bulk", "sink_logits"),
    ("local", "pending", "bulk_tokens", "bulk_lengths", "decided"),
)
AXES = {"states": 2, "log_bulk": 3, "local": 2, "pending": 2, "bulk_tokens": 2, "decided": 2}  # axes of queries


@functools.cache
def find_decode_fault(
    kernel: Callable[[Query, Rows, Operands], tuple[Tensor, Tensor]],
    device: torch.device,
    dtype: torch.dtype,
    *,
    group: int,
    dim: int,
    value_dim: int,
    layout: Layout | None,  # of the bulk's sketch, by which tokens are selected; None: all tokens are read
    records: RecordLayout | None,  # of the bulk's records; None without records
    pinned: bool,  # whether the bulk lies in pinned host memory
    sinks: bool = False,  # whether query heads have learned sinks
    queries: int = 1,  # equal queries of each row; several for a `fused_turn`
    shared: bool = False,  # whether values are the first channels of keys
) -> str | None:
    """The fault of a `fused_decode` or a `fused_turn` on this device, as `reference.find_fault` says it. It is computed
    once a process.

    The trial covers both group rules. No decision is so close that rounding could change it. Tokens that a kernel must
    not read are nan.
    """
    scene = _make_scene(device, dtype, group, dim, value_dim, layout, records, shared)
    # A sink's weight changes the output, but no decision.
    scene["sink_logits"] = torch.full((KV_HEADS * group,), 5.0, dtype=dtype, device="cpu") if sinks else None
    for group_rule in ("any", "head"):
        scene["group_rule"] = group_rule
        expected = _compute(decode_step, scene, torch.device("cpu"))
        for name in BULK:
            scene[name] = scene[name].masked_fill(~expected[0].any(dim=2, keepdim=True), torch.nan)
        if records is not None:
            unread, stored = ~expected[0].any(dim=2, keepdim=True), scene["records"]
            parts = (part.masked_fill(unread, UNREAD_BYTE) for part in (stored.tensor, stored.open))
            scene["records"] = replace(stored, **dict(zip(("tensor", "open"), parts, strict=True)))
        flags, out, *counted = expected
        expected = flags.expand(-1, -1, -1, queries), out.expand(-1, -1, queries, -1), *counted
        repeated = scene | {name: scene[name].repeat_interleave(queries, dim=axis) for name, axis in AXES.items()}
        compute = functools.partial(_compute, kernel, repeated, device, pinned=pinned)
        size = max(1.0, float(out.abs().mean()))  # values are large, and so are roundings of their averages
        if (wrong := find_fault(compute, expected, size=size)) is not None:
            return wrong
    return None


def _compute(
    kernel: Callable, scene: dict[str, Any], device: torch.device, *, pinned: bool = False
) -> tuple[Tensor, ...]:
    """The kernel's results for a scene, on the host: flags, outputs, and bytes read of the bulk and of the sketch."""
    kwargs: dict[str, Any] = {n: part.to(device) if isinstance(part, Tensor) else part for n, part in scene.items()}
    if "sketch" in kwargs:
        kwargs["sketch"] = scene["sketch"].map(lambda part: part.to(device))
    read, sketch_read = (torch.zeros((), dtype=torch.int64, device=device) for _ in range(2))
    stored_names = list[str](BULK)
    if (records := scene.get("records")) is not None:
        stored_names = ["records"]
        kwargs["records"] = replace(records, weights=records.weights.to(device), open=records.open.to(device))
    for name in stored_names:
        buffer = (scene[name] if records is None else records.tensor).clone()
        placed = buffer.pin_memory() if pinned else buffer.to(device)
        kwargs[name] = placed if records is None else replace(kwargs[name], tensor=placed)
    if kwargs.pop("shared"):
        for keys, values in (("near_keys", "near_values"), BULK):
            kwargs[values] = kwargs[keys][..., : kwargs[values].shape[3]]
    query, rows = (kind(**{name: kwargs.pop(name) for name in names}) for kind, names in ((Query, QUERY), (Rows, ROWS)))
    out, flags = kernel(query, rows, Operands(**kwargs, bulk_read_bytes=read, sketch_read_bytes=sketch_read))
    # The host waits for the device here: until the kernels end, the tensors that they read must not be freed.
    return tuple(part.cpu() for part in (flags, out, read, sketch_read))


def _make_scene(
    device: torch.device,
    dtype: torch.dtype,
    group: int,
    dim: int,
    value_dim: int,
    layout: Layout | None,
    records: RecordLayout | None,
    shared: bool,
) -> dict[str, Any]:
    """The fields of `Query`, `Rows` and `Operands`, on the host, without the group rule and counters. Records have the
    stride that `device` needs.

    Every KV head has a direction. Its queries point along it, and its keys along or against it. Queries of the first KV
    head attend to the near buffer. Those of the second attend to the bulk, above all to every third token. In the
    third's group, every other query points against the direction, and attends to the bulk. The first row's bulk is long
    enough to be split and coded, too roughly for the third head. The last row is padding. Values of the bulk are large,
    so that one token too many or too few changes the output.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    length = MIN_TOKENS + 87
    batch, capacity = 3, length + 41

    def draw_noise(*shape: int) -> Tensor:
        return torch.randn(batch, KV_HEADS, *shape, generator=generator, dtype=torch.float32, device="cpu")

    def move_along(*parts: float) -> Tensor:
        return torch.tensor(parts, dtype=torch.float32, device="cpu").view(-1, 1, 1) * direction

    direction = draw_noise(1, dim)[:1].sign()
    query = 0.1 * draw_noise(group, dim) + direction
    query[:, 2, ::2] -= move_along(0, 0, 2)[:, 2]
    near_keys, near_values = 0.2 * draw_noise(COLUMNS, dim), 5 * draw_noise(COLUMNS, value_dim)
    near_keys[:, :, :LOCAL] += move_along(1, 0.8, 1)
    near_keys[:, :, LOCAL:] += move_along(-1, 1, -1)
    near_values[:, :, LOCAL:] *= 8  # few among many
    bulk_keys, bulk_values = (
        0.1 * draw_noise(capacity, dim) + move_along(-1, 0.2, -1),
        40 * draw_noise(capacity, value_dim),
    )
    bulk_keys[:, :, ::3] += move_along(0, 0.8, -0.3)
    bulk_values[:, 1] += 120
    bulk_values[:, 1, ::3] -= 120  # values of selected tokens differ from the others'
    scaling, energies = 4 / dim, torch.logspace(-1, 1, dim, dtype=torch.float32, device="cpu").repeat(KV_HEADS, 1)
    if shared:  # these channels of keys are large values, where queries are 0
        large = slice(value_dim // 2, value_dim)
        query[..., large] = energies[:, large] = 0
        scaling = 4 / (dim - value_dim + value_dim // 2)
        for keys, values in ((near_keys, near_values), (bulk_keys, bulk_values)):
            keys[..., large] = values[..., large]
    near_keys, near_values, bulk_keys, bulk_values = (
        part.to(dtype) for part in (near_keys, near_values, bulk_keys, bulk_values)
    )
    if shared:
        near_values, bulk_values = near_keys[..., :value_dim], bulk_keys[..., :value_dim]

    lengths = torch.tensor([length, SHORT, SHORT], dtype=torch.int64, device="cpu")
    kwargs: dict[str, Any] = {"scaling": scaling, "logit_threshold": 0.0, "bulk_lengths": lengths}
    kwargs["decided"] = torch.tensor([True, True, False], dtype=torch.bool, device="cpu")[:, None, None]
    kwargs["bulk_tokens"] = (lengths + PENDING_COLUMNS)[:, None, None]
    kwargs["states"] = query.to(dtype).reshape(batch, KV_HEADS * group, 1, dim)
    columns = torch.arange(COLUMNS, dtype=torch.int64, device="cpu")[None, None, None]
    kwargs["local"], kwargs["pending"] = columns < LOCAL, (columns >= LOCAL) & (columns < LOCAL + PENDING_COLUMNS)
    used_keys = [keys[:, :tokens].float() for keys, tokens in zip(bulk_keys, lengths.tolist(), strict=True)]
    scores = [scaling * queries @ keys.mT for queries, keys in zip(query, used_keys, strict=True)]
    kwargs["log_bulk"] = torch.stack([row.logsumexp(dim=-1, keepdim=True) for row in scores])
    if layout is not None:
        kwargs |= {"sketch": _make_sketch(bulk_keys, bulk_values, energies, layout), "token_threshold": 0.8}
    near_keys[:, :, LOCAL + PENDING_COLUMNS :] = near_values[:, :, LOCAL + PENDING_COLUMNS :] = torch.nan
    for row, tokens in enumerate(lengths.tolist()):
        bulk_keys[row, :, tokens:] = bulk_values[row, :, tokens:] = torch.nan
    if records is not None:  # only the first row has records: the others are too short
        closed, first = count_closed(length), slice(1)
        weights = find_query_weights(energies, dim, bulk_keys.device)
        # Latents' records have no values.
        tokens = bulk_keys[first, :, :length], bulk_values[first, :, :length, : records.value_dim]
        coded = code_tokens(*tokens, predict_keys(kwargs["sketch"], first, length), weights, records)
        coded = fit_records(coded, records.find_stride(device))
        parts = coded[:, :, :closed], coded[:, :, closed:]
        stored, following = [
            coded.new_full((batch, KV_HEADS, part.shape[2] + 41, part.shape[3]), UNREAD_BYTE) for part in parts
        ]
        for tensor, part in zip((stored, following), parts, strict=True):
            tensor[first, :, : part.shape[2]] = part
        kwargs["records"] = Records(stored, following, weights, records)
        bulk_keys[first] = bulk_values[first] = torch.nan
    kwargs |= {"near_keys": near_keys, "near_values": near_values, "bulk_keys": bulk_keys, "bulk_values": bulk_values}
    return kwargs | {"shared": shared}


def _make_sketch(keys: Tensor, values: Tensor, energies: Tensor, layout: Layout) -> Sketch:
    """The sketch of all tokens of the buffers, for queries with different energies in each channel.

    The first segment's unit is wrong on purpose, so that a kernel that takes another segment's unit is off. The third
    head of the first row is unreliable, and its mean value of unread tokens is absurd.
    """
    sketch = Sketch.of(keys, values, energies.expand(*keys.shape[:2], -1), layout)
    sketch.units[:, :, 0] *= 0.7
    sketch.noise[0, 2], sketch.mean_value[0, 2] = 1e9, 1e4
    return sketch
