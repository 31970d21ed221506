"""Records of tokens: what lies in which byte, what is lost, and scores and sums of values without decoding."""

import pytest
import torch
from drawn import random
from record_reference import decoded, hadamard, predicted
from torch import Tensor

from qada_cache.sketch import Layout, codec, rotate
from qada_cache.sketch.codec import Sketch, estimate_scores
from qada_cache.sketch.coded import (
    RECORD_BITS,
    RecordLayout,
    code_tokens,
    decode_keys,
    decode_values,
    estimate_keys,
    find_block,
    find_query_weights,
    pack_planes,
    quantize_evenly,
    score_residuals,
    sum_values,
    unpack_planes,
)

LENGTH = 1100  # two segments, the last of 588 tokens
SIZES = [(16, 24), (64, 64), (80, 128), (96, 96), (256, 64)]  # channels of keys and values
CPU = torch.device("cpu")


class Coded:
    """Two heads' tokens, their sketch and records; keys' channels and queries' energies differ."""

    def __init__(self, sizes: tuple[int, int], bits: tuple[int, int], dtype: torch.dtype = torch.float32) -> None:
        dim, value_dim = sizes
        self.energies = torch.exp(2 * random(2, dim, seed=2))
        turned = random(2, LENGTH, dim, seed=3) * torch.exp(random(dim, seed=1)) + 5 * random(dim, seed=4)
        self.keys, self.values = turned.to(dtype), random(2, LENGTH, value_dim, seed=5).to(dtype)
        sketch, self.layout = Layout.from_bits(dim, 1.5), RecordLayout(dim, value_dim, *bits)
        assert sketch is not None
        self.sketch = Sketch.of(self.keys, torch.zeros(2, LENGTH, value_dim), self.energies, sketch)
        self.predicted = estimate_keys(self.sketch.to_tensors(), sketch)
        self.weights = find_query_weights(self.energies, dim, CPU)
        self.records = code_tokens(self.keys, self.values, self.predicted, self.weights, self.layout)

    def float64(self, head: int) -> tuple[Tensor, Tensor]:
        """Keys and values `[LENGTH, *]` of a head as its records say, by the reference."""
        layout = self.layout
        sizes = {"dim": layout.dim, "value_dim": layout.value_dim}
        bits = {"key_bits": layout.key_bits, "value_bits": layout.value_bits}
        residuals, values = decoded(self.records[head], **sizes, **bits)
        energies = self.energies[head].double()
        weights = energies.clamp_min(codec.MIN_ENERGY * energies.mean()).sqrt()
        return predicted(self.sketch[head,], LENGTH) + residuals / weights, values


@pytest.mark.parametrize("dim", [8, 64, 80, 96, 128, 256])
def test_rotation_of_whole_heads(dim: int) -> None:
    """Blocks of the greatest power of two in `dim`; the inverse of itself."""
    turn = rotate(torch.eye(dim), find_block(dim))
    torch.testing.assert_close(turn.double(), hadamard(dim), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(turn @ turn, torch.eye(dim), rtol=0, atol=1e-6)


@pytest.mark.parametrize("bits", RECORD_BITS)
@pytest.mark.parametrize("channels", [8, 24, 80, 256])
def test_planes_hold_every_code(bits: int, channels: int) -> None:
    code = (torch.rand(7, channels, generator=torch.Generator().manual_seed(0)) * 2**bits).to(torch.uint8)
    packed = pack_planes(code, bits)
    assert packed.shape == (7, channels * bits // 8)
    assert torch.equal(unpack_planes(packed, bits), code)


@pytest.mark.parametrize("bits", [(6, 8), (5, 6), (4, 4), (3, 5), (8, 3)])
@pytest.mark.parametrize("sizes", SIZES)
def test_records_say_what_float64_reads(sizes: tuple[int, int], bits: tuple[int, int]) -> None:
    """Byte by byte: scales, planes, rotation, weights, and the sketch's part."""
    made = Coded(sizes, bits)
    assert made.records.shape == (2, LENGTH, made.layout.size)
    keys = decode_keys(made.records, made.predicted, made.weights, made.layout)
    values = decode_values(made.records, made.layout)
    for head in range(2):
        true_keys, true_values = made.float64(head)
        torch.testing.assert_close(keys[head].double(), true_keys, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(values[head].double(), true_values, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sizes", SIZES)
def test_a_token_is_decoded_alone_as_among_others(sizes: tuple[int, int]) -> None:
    """A token is decoded alone as among others, to the bit: a crop decodes some of those that were read together."""
    made = Coded(sizes, (5, 6))
    keys = decode_keys(made.records, made.predicted, made.weights, made.layout)
    values = decode_values(made.records, made.layout)
    of_head = {name: part[:1] for name, part in made.sketch.to_tensors().items()}
    for tokens in ([0], [511], [1099], [7, 600]):
        own = of_head | {name: of_head[name][..., tokens] for name in codec.TOKENS}
        said = estimate_keys(own, made.sketch.layout, of=(torch.tensor(tokens) >= 512).long())
        records = made.records[:1, tokens]
        alone = decode_keys(records, said, made.weights[:1], made.layout)
        assert torch.equal(alone, keys[:1, tokens])
        assert torch.equal(decode_values(records, made.layout), values[:1, tokens])


@pytest.mark.parametrize("bits", [(6, 8), (4, 4)])
@pytest.mark.parametrize("sizes", SIZES)
def test_scores_and_sums_without_decoding(sizes: tuple[int, int], bits: tuple[int, int]) -> None:
    """Equal those of keys and values as float64 decodes them, but for the rounding of queries in the sketch's part."""
    made, query = Coded(sizes, bits), random(2, 3, sizes[0], seed=6)
    scaling = sizes[0] ** -0.5
    residual = score_residuals(query, made.records, made.weights, made.layout, scaling)
    shares = torch.softmax(random(2, 3, LENGTH, seed=7), dim=-1)
    sums = sum_values(shares, made.records, made.layout)
    for head in range(2):
        keys, values = made.float64(head)
        true = scaling * query[head].double() @ keys.mT
        behind = true - scaling * query[head].double() @ predicted(made.sketch[head,], LENGTH).mT
        torch.testing.assert_close(residual[head].double(), behind, rtol=1e-4, atol=1e-4 * float(behind.std()))
        scores = residual[head] + estimate_scores(
            query[head], made.sketch[head,], LENGTH, scaling=scaling, expected=False
        )
        assert float((scores - true).std()) < 0.02 * float(true.std())
        torch.testing.assert_close(sums[head].double(), shares[head].double() @ values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_lost(dtype: torch.dtype) -> None:
    """Records leave a small share of the score errors' variance that the sketch leaves, and of a value's mean square.
    Each bit more leaves about a quarter of it. Computed in float64."""
    query, lost = torch.exp(random(64, seed=2)) * random(50, 64, seed=8), {}
    for bits in (3, 4, 5, 6, 8):
        made = Coded((64, 64), (bits, bits), dtype)
        keys, values = made.float64(0)
        query = made.energies[0].double().sqrt() * random(50, 64, seed=8).double()
        true = query @ (made.keys[0].double() - made.keys[0].double().mean(dim=0)).mT
        off = query @ (keys - made.keys[0].double()).mT
        sketched = query @ (predicted(made.sketch[0,], LENGTH) - made.keys[0].double()).mT
        value = (values - made.values[0].double()).square().mean() / made.values[0].double().square().mean()
        lost[bits] = float(off.var() / sketched.var()), float(value)
        assert float(sketched.var() / true.var()) < 0.25
    assert max(lost[8]) < 1.2e-4
    assert max(lost[4]) < 0.015
    for fewer, more in ((3, 4), (4, 5), (5, 6)):
        assert all(0.2 < one / other < 0.34 for one, other in zip(lost[more], lost[fewer], strict=True))


@pytest.mark.parametrize("bits", RECORD_BITS)
def test_codes_are_the_nearest_odd_integers(bits: int) -> None:
    """Codes are the nearest odd integers in units of a scale that puts the greatest value at the last level's edge."""
    values = torch.cat([random(200, 64), 1e-20 * random(200, 64, seed=1) ** 3, 1e20 * random(200, 64, seed=2)])
    scale, code = quantize_evenly(values, bits)
    wide, step = values.double(), scale.double().unsqueeze(-1)
    torch.testing.assert_close(step * 2**bits, wide.abs().amax(dim=-1, keepdim=True), rtol=2**-8, atol=0)
    nearest = (2 * torch.floor(wide / step / 2) + 1).clamp(1 - 2**bits, 2**bits - 1)
    assert (2 * code.double() - 2**bits + 1 == nearest).double().mean() > 0.9999  # what lies between two may fall
    assert ((wide / step - (2 * code.double() - 2**bits + 1)).abs() < 1 + 2**bits * 2**-8).all()


def test_zeros_and_numbers_that_are_none() -> None:
    """Zeros stay zeros; a token that holds a nan or an infinity shows it, and no other token does."""
    layout = RecordLayout(64, 64, 4, 4)
    keys, values = random(5, 64), random(5, 64, seed=1)
    keys[1], values[1] = 0, 0
    keys[2, 3], values[3, 4] = torch.nan, torch.inf
    nothing, weights = torch.zeros(5, 64), find_query_weights(None, 64, CPU)
    records = code_tokens(keys, values, nothing, weights, layout)
    found, summed = decode_keys(records, nothing, weights, layout), decode_values(records, layout)
    assert not found[1].any()
    assert not summed[1].any()
    assert not found[2].isfinite().any()
    assert not summed[3].isfinite().any()
    assert found[[0, 1, 3, 4]].isfinite().all()
    assert summed[[0, 1, 2, 4]].isfinite().all()


def test_which_heads_have_records() -> None:
    assert [RecordLayout.serves(*sizes) for sizes in ((64, 64), (80, 8), (12, 64), (64, 100))] == [
        True,
        True,
        False,
        False,
    ]
    assert [RecordLayout(64, 64, *bits).size for bits in ((6, 8), (5, 6), (4, 4))] == [116, 92, 68]
