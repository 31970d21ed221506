"""Tokens of a bulk in few bits, a record each: the residual of the key after the sketch, and the value.

    R (m * (k - k_hat)) ~ b * odd        R v ~ d * odd

`k_hat` is the key as the sketch has it, `m` the square root of the query energies, `R` a rotation by Hadamard blocks,
`odd` odd integers, `b` and `d` scales. A score is the sketch's plus `scaling * b * (R (q / m))·odd`: no key is decoded.
A sum of values is rotated back once.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from . import SEGMENT_TOKENS, WORD_BITS, Layout, find_peak, rotate, unpack
from .codec import MIN_ENERGY, set_floor

RECORD_BITS = (8, 6, 5, 4, 3)  # of a value
# By `bulk_bits`, the bits of a key's residual and of a value: eval/results/rungs-*.csv. With its part of the sketch a
# token takes 0.41 and 0.32 of its bytes in 16 bits.
RUNGS = {8: (5, 6), 4: (4, 4)}
OLDER_MIN_ENERGY = 0.03  # `MIN_ENERGY` of files that do not name theirs
SCALE = torch.bfloat16  # the dtype of scales: its range is that of all models' dtypes
ALIGNMENT = 4  # bytes
STRIDES = {"cuda": 32}  # bytes, by the type of the device that computes: records begin at multiples there
# By bits of a plane, the dtype with as many bytes as a byte of the plane has values.
WIDE = {8: torch.uint8, 4: torch.int16, 2: torch.int32, 1: torch.int64}


@dataclass(frozen=True)
class RecordLayout:
    """The bytes of a token's record: two scales, the key's planes, the value's planes, zeros up to a multiple of 4.

    A value of `b` bits lies in planes of 8, 4, 2 and 1 bits that add up to `b`, its lowest bits in the first. Value `i`
    of a plane of `p` bits lies in its bits `p i` to `p i + p - 1`, from the lowest bit of the first byte on.
    """

    dim: int  # channels of a key, a multiple of 8
    value_dim: int  # of a value, a multiple of 8; 0 for latents, whose values are channels of the keys
    key_bits: int
    value_bits: int

    @staticmethod
    def serves(dim: int, value_dim: int) -> bool:
        """Whether there are records of such keys and values."""
        return dim % 8 == 0 and value_dim % 8 == 0

    @staticmethod
    def from_bits(dim: int, value_dim: int, bits: int) -> "RecordLayout | None":
        """The layout for `bits` 8 or 4 (`RUNGS`); None for 16, and for sizes that records do not serve."""
        rung = RUNGS.get(bits)
        return RecordLayout(dim, value_dim, *rung) if rung and RecordLayout.serves(dim, value_dim) else None

    @property
    def key_bytes(self) -> int:
        """Bytes of a key's planes, which begin at byte 4."""
        return self.dim * self.key_bits // 8

    @property
    def value_bytes(self) -> int:
        """Bytes of a value's planes, which follow the key's."""
        return self.value_dim * self.value_bits // 8

    @property
    def unit(self) -> int:
        """Bits at whose multiples planes of one bit begin, as all then do: whole words, or whole bytes."""
        return WORD_BITS if self.dim % WORD_BITS == self.value_dim % WORD_BITS == 0 else 8

    @property
    def size(self) -> int:
        """Bytes of a record, as files have it."""
        return -(-(2 * SCALE.itemsize + self.key_bytes + self.value_bytes) // ALIGNMENT) * ALIGNMENT

    def find_stride(self, device: torch.device) -> int:
        """Bytes from one record to the next where `device` computes; zeros follow a record. A bus transfers whole
        sectors, so each record begins with one."""
        step = STRIDES.get(device.type, ALIGNMENT)
        return -(-self.size // step) * step


@dataclass(eq=False)
class Records:
    """Records of the rows with at least `MIN_TOKENS` in the bulk, for kernels."""

    tensor: Tensor  # of closed segments, uint8 `[batch, kv_heads, capacity, stride]`
    open: Tensor  # of the open segment, uint8 `[batch, kv_heads, room, stride]` on the compute device
    weights: Tensor  # `m`, float32 `[kv_heads, dim]`
    layout: RecordLayout


def fit_records(records: Tensor, stride: int) -> Tensor:
    """The same records, `stride` bytes apart."""
    more = stride - records.shape[-1]
    return torch.nn.functional.pad(records, (0, more)) if more else records


def list_planes(bits: int) -> list[int]:
    """Bits of the planes of a value of `bits` bits, in their order."""
    return [plane for plane in (8, 4, 2, 1) if bits & plane]


def find_block(dim: int) -> int:
    """Channels that are rotated together: the greatest power of two that divides `dim`."""
    return dim & -dim


def find_query_weights(energies: Tensor | None, dim: int, device: torch.device) -> Tensor:
    """`m` float32 `[..., dim]`, of the query energies `[..., dim]`; ones `[dim]` without them."""
    if energies is None:
        return torch.ones(dim, dtype=torch.float32, device=device)
    return set_floor(energies.to(device, torch.float32), MIN_ENERGY).sqrt()


def read_energies(energies: Tensor, least: float) -> Tensor:
    """The query energies float32 `[..., dim]` of a file whose records were coded with `least` as `MIN_ENERGY`, so that
    `find_query_weights` returns the same `m` as then; ValueError if it has never been that."""
    if least == MIN_ENERGY:
        return energies
    if least != OLDER_MIN_ENERGY:
        raise ValueError(f"its records were coded for query energies of at least {least} of their mean")
    return set_floor(energies, least)


def estimate_keys(made: dict[str, Tensor], layout: Layout, of: Tensor | None = None) -> Tensor:
    """`k_hat` float32 `[..., tokens, dim]`, from `made`, the `CODES` of these tokens by `quantize_segments`. If
    `of` is given, int64 `[tokens]`, it is the index of each token's segment, and tokens may be any."""
    tokens, count = made["scales"].shape[-1], made["units"].shape[-1]
    if of is None and count > 1 and tokens != count * SEGMENT_TOKENS:  # the last one of a bulk may be longer
        of = torch.arange(tokens, dtype=torch.int64, device=made["units"].device).div(
            SEGMENT_TOKENS, rounding_mode="floor"
        )
        of = of.clamp_max(count - 1)

    def of_tokens(name: str) -> Tensor:
        by_segment = made[name]
        return by_segment.unsqueeze(-2) if of is None else by_segment[..., of, :].unsqueeze(-3)

    segments = count if of is None else 1
    codes, scales = made["codes"].unflatten(-1, (segments, -1)).movedim(-3, -2), made["scales"].float()
    scales = scales.unflatten(-1, (segments, -1)) * (
        made["units"].unsqueeze(-1) if of is None else made["units"][..., of].unsqueeze(-2)
    )
    turned = scales.unsqueeze(-1) * rotate(unpack(codes, layout))
    weighed = torch.nn.functional.pad(turned, (0, layout.dim - layout.coded)) / of_tokens("weights").float()
    places = of_tokens("order").long().argsort(dim=-1)  # of each channel
    return (of_tokens("centres").float() + weighed.gather(-1, places.expand_as(weighed))).flatten(-3, -2)


def turn(values: Tensor) -> Tensor:
    """`R` times float32 `values` `[..., channels]`, by blocks of `find_block` channels, if there are any."""
    return rotate(values, find_block(values.shape[-1])) if values.shape[-1] else values


def code_tokens(keys: Tensor, values: Tensor, predicted: Tensor, weights: Tensor, layout: RecordLayout) -> Tensor:
    """Records uint8 `[..., tokens, size]` of keys `[..., tokens, dim]` and values `[..., tokens, value_dim]`.
    `predicted` is `k_hat` `[..., tokens, dim]`, `weights` are `m` `[..., dim]`."""
    residual = (keys.float() - predicted) * weights.unsqueeze(-2)
    parts, scales = [], []
    for wide, bits in ((residual, layout.key_bits), (values.float(), layout.value_bits)):
        scale, code = quantize_evenly(turn(wide), bits)
        scales.append(scale)
        parts.append(pack_planes(code, bits))
    record = torch.cat([torch.stack(scales, dim=-1).view(torch.uint8), *parts], dim=-1)
    return torch.nn.functional.pad(record, (0, layout.size - record.shape[-1]))


def quantize_evenly(values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Scales bfloat16 `[...]` and codes uint8 `[..., channels]`: `values ~ scale * (2 * code - (2^bits - 1))`. The
    greatest value lies at the edge of the last level, but for the scale's rounding; of six smaller scales the best one
    leaves 3% less error with 4 bits, nothing less with 5."""
    most = 2**bits - 1
    scale = (find_peak(values, -1) / 2**bits).to(SCALE)
    step = scale.float().clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(-1)
    code = torch.floor(values / (2 * step)) + 2 ** (bits - 1)
    return scale, code.clamp(0, most).to(torch.uint8)


def pack_planes(code: Tensor, bits: int) -> Tensor:
    """Bytes uint8 `[..., channels * bits / 8]` of codes uint8 `[..., channels]`."""
    if not code.shape[-1]:
        return code
    parts, done = [], 0
    for plane in list_planes(bits):
        part = (code >> done & 2**plane - 1).contiguous().view(WIDE[plane])  # a number of what makes up a byte
        for doubling in range(part.element_size().bit_length() - 1):
            part = part | part >> ((8 - plane) << doubling)
        parts.append(part.to(torch.uint8))  # the lowest byte
        done += plane
    return torch.cat(parts, dim=-1)


def unpack_planes(packed: Tensor, bits: int) -> Tensor:
    """The inverse of `pack_planes`."""
    channels, done, start = packed.shape[-1] * 8 // bits, 0, 0
    code = torch.zeros(*packed.shape[:-1], channels, dtype=torch.uint8, device=packed.device)
    for plane in list_planes(bits):
        stop = start + channels * plane // 8
        part = packed[..., start:stop, None] >> _make_shifts(plane, packed.device) & 2**plane - 1
        code |= part.flatten(-2) << done
        done, start = done + plane, stop
    return code


def _make_shifts(plane: int, device: torch.device) -> Tensor:
    """uint8 `[8 / plane]`: the shift, in bits, of each value in a byte of a plane."""
    return torch.arange(0, 8, plane, dtype=torch.uint8, device=device)


def _read_scales(records: Tensor) -> Tensor:
    """Scales float32 `[..., tokens, 2]`: `b` of the key, `d` of the value."""
    return records[..., : 2 * SCALE.itemsize].contiguous().view(SCALE).float()


def unpack_keys(records: Tensor, layout: RecordLayout) -> Tensor:
    """Odd integers float32 `[..., tokens, dim]` of residuals."""
    start = 2 * SCALE.itemsize
    return _unpack(records[..., start : start + layout.key_bytes], layout.key_bits)


def unpack_values(records: Tensor, layout: RecordLayout) -> Tensor:
    """Odd integers float32 `[..., tokens, value_dim]` of values."""
    start = 2 * SCALE.itemsize + layout.key_bytes
    return _unpack(records[..., start : start + layout.value_bytes], layout.value_bits)


def _unpack(packed: Tensor, bits: int) -> Tensor:
    return 2 * unpack_planes(packed, bits).float() - (2**bits - 1)


def decode_keys(records: Tensor, predicted: Tensor, weights: Tensor, layout: RecordLayout) -> Tensor:
    """Keys float32 `[..., tokens, dim]`; `predicted` and `weights` as for `code_tokens`."""
    turned = _read_scales(records)[..., :1] * turn(unpack_keys(records, layout))
    return predicted + turned / weights.unsqueeze(-2)


def decode_values(records: Tensor, layout: RecordLayout) -> Tensor:
    """Values float32 `[..., tokens, value_dim]`."""
    return _read_scales(records)[..., 1:] * turn(unpack_values(records, layout))


def score_residuals(query: Tensor, records: Tensor, weights: Tensor, layout: RecordLayout, scaling: float) -> Tensor:
    """The residuals' part of scores, float32 `[..., queries, tokens]`, of a query `[..., queries, dim]`. It is added to
    the sketch's."""
    turned = turn(query.float() / weights.unsqueeze(-2))
    return scaling * torch.matmul(turned, unpack_keys(records, layout).mT) * _read_scales(records)[..., 0].unsqueeze(-2)


def sum_values(shares: Tensor, records: Tensor, layout: RecordLayout) -> Tensor:
    """Sums of values, float32 `[..., queries, value_dim]`, weighed by attention's `shares` `[..., queries, tokens]`.
    The sum is rotated back, not each value."""
    weighed = shares * _read_scales(records)[..., 1].unsqueeze(-2)
    return turn(torch.matmul(weighed, unpack_values(records, layout)))
