"""Decodes tokens' records in float64 and plain arithmetic, byte by byte. Records here are one head's, uint8 `[tokens,
size]`."""

import math
import struct

import torch
from sketch_reference import layout_of, odd_values, rotation, segment_spans, token_scales
from torch import Tensor

from qada_cache.sketch.codec import Sketch


def hadamard(dim: int) -> Tensor:
    """Float64 `[dim, dim]`: Hadamard blocks of the greatest power of two that divides `dim`. An entry's sign is the
    parity of the bits that row and column have in common."""
    block = math.gcd(dim, 2**20) if dim else 1
    signs = [[(-1.0) ** bin(row & column).count("1") for column in range(block)] for row in range(block)]
    return torch.kron(torch.eye(dim // block).double(), torch.tensor(signs, dtype=torch.float64) / math.sqrt(block))


def predicted(sketch: Sketch, length: int) -> Tensor:
    """The sketch's estimates of keys, float64 `[length, dim]`."""
    odd = odd_values(sketch.codes[:, :length], words=layout_of(sketch).words)
    scales, coded, parts = token_scales(sketch, length), odd.shape[1], []
    for segment, (first, last) in enumerate(segment_spans(length)):
        keys = sketch.centres[segment].double().repeat(last - first, 1)
        turned = scales[first:last, None] * odd[first:last] @ rotation(coded)
        for place, channel in enumerate(sketch.order[segment][:coded].tolist()):
            keys[:, channel] += turned[:, place] / sketch.weights[segment][place].double()
        parts.append(keys)
    return torch.cat(parts)


def odd_integers(records: Tensor, *, start: int, dim: int, bits: int) -> Tensor:
    """The odd integers, float64 `[tokens, dim]`, whose codes of `bits` bits are in the planes from byte `start` on."""
    codes, done = torch.zeros(len(records), dim, dtype=torch.long), 0
    for plane in (8, 4, 2, 1):
        if bits & plane:
            size = dim * plane // 8
            for value in range(dim):
                held = records[:, start + value * plane // 8].long() // 2 ** (value * plane % 8) % 2**plane
                codes[:, value] += held * 2**done
            start, done = start + size, done + plane
    return 2 * codes.double() - (2**bits - 1)


def scales_of(records: Tensor, place: int) -> Tensor:
    """The scales at byte `place`, which are bfloat16 there: float64 `[tokens, 1]`."""
    words = [bytes([0, 0, *record[place : place + 2]]) for record in records.tolist()]
    return torch.tensor([struct.unpack("<f", word) for word in words], dtype=torch.float64)


def decoded(records: Tensor, *, dim: int, value_dim: int, key_bits: int, value_bits: int) -> tuple[Tensor, Tensor]:
    """Residuals of keys, times the weights, `[tokens, dim]`, and values `[tokens, value_dim]`, float64."""
    keys = odd_integers(records, start=4, dim=dim, bits=key_bits)
    values = odd_integers(records, start=4 + dim * key_bits // 8, dim=value_dim, bits=value_bits)
    return scales_of(records, 0) * keys @ hadamard(dim), scales_of(records, 2) * values @ hadamard(value_dim)
