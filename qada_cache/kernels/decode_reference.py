"""One decode step of one layer in plain torch, `query_adaptive.py` for a `DecodeCall`, and trials of kernels by it."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..sketch import MIN_TOKENS, Layout
from ..sketch.codec import Sketch, channel_means, quantize_segments, round_slopes
from .decode_call import DecodeCall
from .query_adaptive import Masks, Part, Request, Step, attend, decide
from .reference import find_fault


def decode_step(call: DecodeCall) -> tuple[Tensor, Tensor]:
    """What every `fused_decode` computes: attention of one query token a row.

    Returns `[batch, heads, 1, value_dim]` in the query's dtype, and bool `[batch, kv_heads, group]`, True where a head
    read its bulk (there is one, and the query is decided).
    """
    query, rows, sketch = call.query, call.rows, call.sketch
    batch, heads, _, dim = query.shape
    local, pending, decided = (mask[:, None, None] for mask in (rows.local, rows.pending, rows.decided))
    bulk_tokens = rows.bulk_lengths[:, None, None] + pending.sum(dim=-1)
    # Cleared, because a weight of 0 does not keep a nan out of a sum.
    local_keys, local_values = (
        near[:, :, : rows.columns].masked_fill(~(local | pending).mT, 0.0)
        for near in (call.local_keys, call.local_values)
    )
    lengths = rows.bulk_lengths.expand(batch).tolist()
    masks = Masks(local, pending, bulk_tokens, decided & (bulk_tokens > 0))
    step = Step(query.reshape(batch, -1, call.group, dim), local_keys, local_values, masks, call.rule, lengths, sketch)

    def read(whole: list[list[bool]], requests: Iterator[Request] | None) -> Iterator[Part]:
        for row, wanted in enumerate(whole):
            for head in [head for head, does in enumerate(wanted) if does and lengths[row]]:
                yield _part(call, row, head, slice(0, lengths[row]))
        for request in requests or ():
            yield _part(call, request.row, request.head, request.tokens.to(call.bulk_keys.device), request)

    flags = decide(step, call.log_bulk.unsqueeze(3))
    out, _, selecting = attend(step, flags, read)
    if sketch is not None and call.sketch_read_bytes is not None:
        for row, heads_selecting in enumerate(selecting):
            call.sketch_read_bytes += sketch.read_bytes(lengths[row]) * sum(heads_selecting)
    return out.reshape(batch, heads, 1, -1).to(query.dtype), flags.squeeze(3)


def _part(call: DecodeCall, row: int, head: int, tokens: slice | Tensor, request: Request | None = None) -> Part:
    """Tokens of one head of a call's bulk, on the query's device, counted."""
    bulk = call.bulk_keys, call.bulk_values
    keys, values = (part[row, head][tokens].to(call.query.device)[None, None] for part in bulk)
    if call.bulk_read_bytes is not None:
        call.bulk_read_bytes += keys.nbytes + values.nbytes
    return Part(slice(row, row + 1), slice(head, head + 1), keys, values, request)


# Of a trial.
KV_HEADS = 3
LOCAL, PENDING_COLUMNS, COLUMNS = 20, 5, 29  # columns of the local buffer; the others are neither
SHORT = 300  # tokens in the bulk of all rows but the first
ELSEWHERE = 0, 1  # the row and head that lie outside the buffers


@functools.cache
def find_decode_fault(
    kernel: Callable[[DecodeCall], tuple[Tensor, Tensor]],
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

    The trial takes both group rules, and once a head that lies elsewhere. Decisions are
    clear, so that no rounding changes them, and tokens that are not to be read are nan.
    """
    scene = _scene(dtype, group, dim, value_dim, layout)
    for group_rule, elsewhere in (("any", False), ("head", True)):
        scene["group_rule"] = group_rule
        expected = _compute(decode_step, scene, torch.device("cpu"))
        for name in ("bulk_keys", "bulk_values"):
            scene[name] = scene[name].masked_fill(~expected[0].any(dim=-1)[..., None, None], torch.nan)
        compute = functools.partial(_compute, kernel, scene, device, pinned=pinned, elsewhere=elsewhere)
        if (wrong := find_fault(compute, expected)) is not None:
            return wrong
    return None


def _compute(
    kernel: Callable, scene: dict[str, Any], device: torch.device, *, pinned: bool = False, elsewhere: bool = False
) -> tuple[Tensor, ...]:
    """What the kernel makes of a scene, on the host: flags, outputs, and bytes of the bulk and of the sketch."""
    kwargs = {name: part.to(device) if isinstance(part, Tensor) else part for name, part in scene.items()}
    if "sketch" in kwargs:
        kwargs["sketch"] = Sketch(*(part.to(device) for part in scene["sketch"].tensors().values()))
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
    out, flags = kernel(DecodeCall.of(**kwargs, bulk_read_bytes=read, sketch_read_bytes=sketch_read))
    # Here, as the host waits for the device: until then nothing that the kernels read may be let go of.
    return tuple(part.cpu() for part in (flags, out, read + hit, sketch_read))


def _scene(dtype: torch.dtype, group: int, dim: int, value_dim: int, layout: Layout | None) -> dict[str, Any]:
    """What `DecodeCall.of` takes, on the host, but for the group rule and what is counted.

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
    kwargs["decided"] = torch.tensor([True, True, False], device="cpu")
    kwargs["query"] = query.to(dtype).reshape(batch, KV_HEADS * group, 1, dim)
    columns = torch.arange(COLUMNS, device="cpu")[None]
    kwargs["local"], kwargs["pending"] = columns < LOCAL, (columns >= LOCAL) & (columns < LOCAL + PENDING_COLUMNS)
    used = [keys[:, :tokens].float() for keys, tokens in zip(bulk_keys, lengths.tolist(), strict=True)]
    scores = [4 / dim * queries @ keys.mT for queries, keys in zip(query, used, strict=True)]
    kwargs["log_bulk"] = torch.stack([row.logsumexp(dim=-1) for row in scores])
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
    made = quantize_segments(keys, energies.expand(*keys.shape[:2], -1), layout)
    made["units"][:, :, 0] *= 0.7
    made |= channel_means(made, layout, keys.shape[2])
    made["noise"][0, 2] = 1e9
    mean = values.float().mean(dim=2, keepdim=True)
    slopes = (values.float() - mean).mT @ (keys.float() - keys.float().mean(dim=2, keepdim=True)) / keys.shape[2]
    mean[0, 2] = 1e4
    return Sketch(**made, mean_value=mean.squeeze(2), **round_slopes(slopes))
