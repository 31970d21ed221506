"""Triton's kernel that decodes records, against torch's definition, interpreted and on a GPU."""

from collections.abc import Iterator

import pytest
import torch
from quick_cases import mark_rest_slow
from small_sketch import small_sketch

from qada_cache.sketch import Layout, count_segments
from qada_cache.sketch.codec import Sketch
from qada_cache.sketch.coded import RecordLayout, code_tokens, decode_keys, decode_values, estimate_keys

pytest.importorskip("triton", reason="triton is not installed: pip install triton", exc_type=ModuleNotFoundError)
from steps import DEVICES
from test_triton_coding import HEADS, ROWS, SEGMENT, make_keys

from qada_cache.kernels.triton import decoding

# Relative tolerance of numbers rounded to a dtype: a sum in another order is sometimes rounded to a neighbour.
ROUNDED = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(decoding, "RUN", 16)
    with small_sketch(40, SEGMENT):
        yield
    decoding._bind_decoding.cache_clear()


@DEVICES
@pytest.mark.parametrize("distance", [12, pytest.param(0, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("dim", "value_dim", "bits", "rung", "dtype"),
    mark_rest_slow(
        [
            (64, 64, 1.5, 8, torch.bfloat16),
            (80, 40, 2, 8, torch.float16),
            (128, 128, 1.5, 4, torch.float32),
            (24, 8, 4, 8, torch.float32),
            (64, 128, 1, 4, torch.bfloat16),
            (96, 80, 4, 4, torch.float32),
            (256, 256, 1.5, 8, torch.bfloat16),
        ],
        4,
    ),
)
def test_tokens_are_those_of_torch(
    dim: int, value_dim: int, bits: float, rung: int, dtype: torch.dtype, distance: int, device: str
) -> None:
    """Decoded tokens equal torch's: of any span of a bulk, in closed segments or the last one, of some rows and heads,
    and from records with `distance` more bytes of stride."""
    tokens = 3 * SEGMENT + SEGMENT // 4 + 5
    keys, energies = make_keys(tokens, dim, dtype, rows=ROWS)
    values, _ = make_keys(tokens, value_dim, dtype, rows=ROWS)
    layout, records = Layout.from_bits(dim, bits), RecordLayout.from_bits(dim, value_dim, rung)
    assert layout is not None
    assert records is not None
    sketch, weights = Sketch.of(keys, values, energies.expand(ROWS, -1, -1), layout), energies.sqrt()
    predicted = estimate_keys(sketch.to_tensors(), layout)
    coded = code_tokens(keys, values, predicted, weights, records)
    expected = decode_keys(coded, predicted, weights, records), decode_values(coded, records)
    apart = torch.full((*coded.shape[:3], records.size + distance), 255, dtype=torch.uint8)
    apart[..., : records.size] = coded
    there, weights = sketch.map(lambda tensor: tensor.to(device)), weights.to(device)
    for rows, heads, first, stop in (
        (slice(0, 1), slice(0, HEADS), 0, tokens),
        (slice(1, 2), slice(1, 2), SEGMENT - 3, 2 * SEGMENT + 9),
        (slice(1, ROWS), slice(0, HEADS), 2 * SEGMENT, tokens),
    ):
        given = apart.to(device)[rows, heads, first:stop]
        found = decoding.decode_tokens(
            given, there, rows, heads, weights, records, (keys, values), first=first, segments=count_segments(tokens)
        )
        for one, other in zip(found, expected, strict=True):
            wanted = other[rows, heads, first:stop].to(dtype)
            assert (one.dtype, one.shape) == (dtype, wanted.shape)
            size = float(other.abs().max())
            close = {"rtol": ROUNDED[dtype], "atol": 1e-6 * size}
            torch.testing.assert_close(one.cpu().float(), wanted.float(), **close)
