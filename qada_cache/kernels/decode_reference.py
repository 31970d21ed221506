"""One decode step of one layer in plain torch, by `query_adaptive.py`, and trials of kernels by it."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..sketch import MIN_TOKENS, SEGMENT_TOKENS, Layout, closed_tokens
from ..sketch.codec import Sketch
from ..sketch.coded import decode_keys, decode_values, predicted_keys
from .operands import Operands, Query, Rows
from .query_adaptive import BulkAttention, attend_local, decide, group_queries, score_local, select, sum_local
from .reference import find_fault


def decode_step(query: Query, rows: Rows, layer: Operands) -> tuple[Tensor, Tensor]:
    """What every `fused_decode` computes: attention of one query token a row.

    Returns `[batch, heads, 1, value_dim]` in the query's dtype, and bool `[batch, kv_heads, group, 1]`, True where a
    head read its bulk (there is one, and the query is decided).
    """
    assert query.log_bulk is not None
    if layer.records is not None:
        decoded = decode_records(layer, rows.bulk_lengths.expand(len(query.states)).tolist())
        out, flags = decode_step(replace(query, states=query.states.float()), rows, decoded)
        return out.to(query.states.dtype), flags
    grouped, lengths = group_queries(query, layer.kv_heads), rows.bulk_lengths.expand(len(query.states)).tolist()
    # Cleared, because a weight of 0 does not keep a nan out of a sum.
    keys, values = (
        near[:, :, : rows.columns].masked_fill(~(rows.local | rows.pending).mT, 0.0)
        for near in (layer.local_keys, layer.local_values)
    )
    scores = score_local(grouped, keys, query)
    flags = decide(sum_local(scores, rows, None), query.log_bulk, rows, layer)
    local = attend_local(scores, values, rows, flags)
    whole, selecting, chosen = select(grouped, flags, local[1], lengths, query, rows, layer)
    bulk = BulkAttention(grouped, query, values.shape[3])
    for row, heads in enumerate(whole):
        for head in [head for head, wanted in enumerate(heads) if wanted and lengths[row]]:
            bulk.add_whole(slice(row, row + 1), slice(head, head + 1), *_gather(layer, row, head, slice(lengths[row])))
    for one in chosen:
        assert layer.sketch is not None
        one_keys, one_values = _gather(layer, one.row, one.head, one.tokens.to(layer.bulk_keys.device))
        bulk.add_chosen(one, one_keys, one_values, layer.sketch)
    out, _ = bulk.merge(*local, flags)
    if layer.sketch is not None and layer.sketch_read_bytes is not None:
        for length, heads in zip(lengths, selecting, strict=False):
            layer.sketch_read_bytes += layer.sketch.read_bytes(length) * sum(heads)
    return out.reshape(*query.states.shape[:3], -1).to(query.states.dtype), flags


def decode_records(layer: Operands, lengths: list[int]) -> Operands:
    """The same layer without records, in float32. It counts no bytes."""
    assert layer.records is not None
    assert layer.sketch is not None
    tensor, weights, layout = layer.records.tensor, layer.records.weights, layer.records.layout
    longest, device = max(lengths), tensor.device
    keys, values = (
        part.new_zeros(*part.shape[:2], longest, part.shape[3], dtype=torch.float32)
        for part in (layer.bulk_keys, layer.bulk_values)
    )
    for row, length in enumerate(lengths):
        closed, one = closed_tokens(length), (slice(row, row + 1),)
        if closed:
            made = {name: part[one] for name, part in layer.sketch.tensors().items()}
            made |= {name: made[name][..., :closed] for name in ("codes", "scales")}
            index = torch.arange(closed, device=device) // SEGMENT_TOKENS
            records = tensor[one][:, :, :closed]
            predicted = predicted_keys(made, layer.sketch.layout, of=index)
            keys[row, :, :closed] = decode_keys(records, predicted, weights, layout)[0]
            values[row, :, :closed] = decode_values(records, layout)[0]
        for decoded, beside in ((keys, layer.bulk_keys), (values, layer.bulk_values)):
            decoded[row, :, closed:length] = beside[row, :, : length - closed]
    sketch = layer.sketch if layer.token_threshold > 0 else None
    local = layer.local_keys.float(), layer.local_values.float()
    found = Operands(*local, keys, values, layer.logit_threshold, layer.group_rule, layer.token_threshold)
    found.sketch = sketch
    return found


def _gather(layer: Operands, row: int, head: int, tokens: slice | Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values `[1, 1, tokens, dim]` of one head of a bulk, on the query's device, counted."""
    keys, values = (
        part[row, head][tokens].to(layer.local_keys.device)[None, None] for part in (layer.bulk_keys, layer.bulk_values)
    )
    if layer.bulk_read_bytes is not None:
        layer.bulk_read_bytes += keys.nbytes + values.nbytes
    return keys, values


# Of a trial.
KV_HEADS = 3
LOCAL, PENDING_COLUMNS, COLUMNS = 20, 5, 29  # columns of the local buffer; the others are neither
SHORT = 300  # tokens in the bulk of all rows but the first
ELSEWHERE = 0, 1  # the row and head that lie outside the buffers
QUERY, ROWS = (
    ("states", "scaling", "log_bulk"),
    ("local", "pending", "bulk_tokens", "bulk_lengths", "decided"),
)  # of a scene


@functools.cache
def find_decode_fault(
    kernel: Callable[[Query, Rows, Operands], tuple[Tensor, Tensor]],
    device: torch.device,
    dtype: torch.dtype,
    *,
    group: int,
    dim: int,
    value_dim: int,
    layout: Layout | None,  # of the sketch that tokens are selected by, None if all are read
    pinned: bool,  # whether the bulk lies in pinned host memory
) -> str | None:
    """The fault of a `fused_decode` on this device, as of `reference.find_fault`; the answer is kept for the process.

    The trial takes both group rules, and once a head that lies elsewhere. Decisions are clear, so that no rounding
    changes them, and tokens that are not to be read are nan.
    """
    scene = _scene(dtype, group, dim, value_dim, layout)
    for group_rule, elsewhere in (("any", False), ("head", True)):
        scene["group_rule"] = group_rule
        expected = _compute(decode_step, scene, torch.device("cpu"))
        for name in ("bulk_keys", "bulk_values"):
            scene[name] = scene[name].masked_fill(~expected[0].any(dim=2, keepdim=True), torch.nan)
        compute = functools.partial(_compute, kernel, scene, device, pinned=pinned, elsewhere=elsewhere)
        if (wrong := find_fault(compute, expected)) is not None:
            return wrong
    return None


def _compute(
    kernel: Callable, scene: dict[str, Any], device: torch.device, *, pinned: bool = False, elsewhere: bool = False
) -> tuple[Tensor, ...]:
    """What the kernel makes of a scene, on the host: flags, outputs, and bytes of the bulk and of the sketch."""
    kwargs: dict[str, Any] = {n: part.to(device) if isinstance(part, Tensor) else part for n, part in scene.items()}
    if "sketch" in kwargs:
        kwargs["sketch"] = scene["sketch"].map(lambda part: part.to(device))
    read, hit, sketch_read = (torch.zeros((), dtype=torch.int64, device=device) for _ in range(3))
    moved = []
    for name in ("bulk_keys", "bulk_values"):
        buffer = scene[name].clone()
        if elsewhere:
            moved.append(buffer[ELSEWHERE].to(device, copy=True))
            buffer[ELSEWHERE] = torch.nan
        kwargs[name] = buffer.pin_memory() if pinned else buffer.to(device)
    if elsewhere:
        pointers = torch.zeros(*scene["bulk_keys"].shape[:2], 2, dtype=torch.int64, device="cpu")
        pointers[ELSEWHERE] = torch.tensor([part.data_ptr() for part in moved], device="cpu")
        kwargs |= {"resident_pointers": pointers.to(device), "resident_hit_bytes": hit}
    query, rows = (kind(**{name: kwargs.pop(name) for name in names}) for kind, names in ((Query, QUERY), (Rows, ROWS)))
    out, flags = kernel(query, rows, Operands(**kwargs, bulk_read_bytes=read, sketch_read_bytes=sketch_read))
    # Here, as the host waits for the device: until then nothing that the kernels read may be let go of.
    return tuple(part.cpu() for part in (flags, out, read + hit, sketch_read))


def _scene(dtype: torch.dtype, group: int, dim: int, value_dim: int, layout: Layout | None) -> dict[str, Any]:
    """What `Query`, `Rows` and `Operands` take, on the host, but for the group rule and what is counted.

    Every KV head has a direction, in which its queries point, and keys lie along it or against it. Those of the first
    KV head find their keys nearby, those of the second far away, most of all in every third token. In the group of the
    third, every other query points the other way, and so finds its keys far away. The first row's bulk is long enough
    to be split and coded, for the third head too roughly; the last row is padding. Where many tokens are read values
    are large, so that one too many or too few shows.
    """
    made = torch.Generator("cpu").manual_seed(0)
    length = MIN_TOKENS + 87
    batch, capacity = 3, length + 41

    def noise(*shape: int) -> Tensor:
        return torch.randn(batch, KV_HEADS, *shape, generator=made, dtype=torch.float32, device="cpu")

    def along(*parts: float) -> Tensor:
        return torch.tensor(parts, dtype=torch.float32, device="cpu").view(-1, 1, 1) * direction

    direction = noise(1, dim)[:1].sign()
    query = 0.1 * noise(group, dim) + direction
    query[:, 2, ::2] -= along(0, 0, 2)[:, 2]
    local_keys, local_values = 0.2 * noise(COLUMNS, dim), 5 * noise(COLUMNS, value_dim)
    local_keys[:, :, :LOCAL] += along(1, 0.8, 1)
    local_keys[:, :, LOCAL:] += along(-1, 1, -1)
    local_values[:, :, LOCAL:] *= 8  # few among many
    bulk_keys, bulk_values = 0.1 * noise(capacity, dim) + along(-1, 0.2, -1), 40 * noise(capacity, value_dim)
    bulk_keys[:, :, ::3] += along(0, 0.8, 0)
    bulk_values[:, 1] += 120
    bulk_values[:, 1, ::3] -= 120  # values of selected tokens differ from the others'
    local_keys, local_values, bulk_keys, bulk_values = (
        part.to(dtype) for part in (local_keys, local_values, bulk_keys, bulk_values)
    )

    lengths = torch.tensor([length, SHORT, SHORT], device="cpu")
    kwargs: dict[str, Any] = {"scaling": 4 / dim, "logit_threshold": 0.0, "bulk_lengths": lengths}
    kwargs["decided"] = torch.tensor([True, True, False], device="cpu")[:, None, None]
    kwargs["bulk_tokens"] = (lengths + PENDING_COLUMNS)[:, None, None]
    kwargs["states"] = query.to(dtype).reshape(batch, KV_HEADS * group, 1, dim)
    columns = torch.arange(COLUMNS, device="cpu")[None, None, None]
    kwargs["local"], kwargs["pending"] = columns < LOCAL, (columns >= LOCAL) & (columns < LOCAL + PENDING_COLUMNS)
    used = [keys[:, :tokens].float() for keys, tokens in zip(bulk_keys, lengths.tolist(), strict=True)]
    scores = [4 / dim * queries @ keys.mT for queries, keys in zip(query, used, strict=True)]
    kwargs["log_bulk"] = torch.stack([row.logsumexp(dim=-1, keepdim=True) for row in scores])
    if layout is not None:
        kwargs |= {"sketch": _sketch(bulk_keys, bulk_values, layout), "token_threshold": 0.8}
    local_keys[:, :, LOCAL + PENDING_COLUMNS :] = local_values[:, :, LOCAL + PENDING_COLUMNS :] = torch.nan
    for row, tokens in enumerate(lengths.tolist()):
        bulk_keys[row, :, tokens:] = bulk_values[row, :, tokens:] = torch.nan
    return dict(kwargs, local_keys=local_keys, local_values=local_values, bulk_keys=bulk_keys, bulk_values=bulk_values)


def _sketch(keys: Tensor, values: Tensor, layout: Layout) -> Sketch:
    """Of all tokens, whatever is in use, for queries that are stronger in some channels.

    The first segment has the scores of its tokens lie closer together than they do, so that no other segment's unit
    will do for it. The third head of the first row tells too little, and says something absurd of unread tokens.
    """
    energies = torch.logspace(-1, 1, keys.shape[3], dtype=torch.float32, device="cpu")
    sketch = Sketch.of(keys, values, energies.expand(*keys.shape[:2], -1), layout)
    sketch.units[:, :, 0] *= 0.7
    sketch.noise[0, 2], sketch.mean_value[0, 2] = 1e9, 1e4
    return sketch
