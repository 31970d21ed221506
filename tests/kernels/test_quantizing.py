"""Keys coded as in a sketch in C++: as torch's definition codes them, and float64."""

import pytest
import torch
from compilers import needs_compiler
from sketch_reference import segment_spans
from torch import Tensor

from qada_cache.kernels.cpu import building, quantizing
from qada_cache.sketch import BLOCK, Layout, codec
from qada_cache.sketch.codec import MIN_ENERGY, MIN_VARIANCE, SCALE_LEVELS, round_keys, set_floor
from qada_cache.storage.bulk_sketch import BulkSketch

pytestmark = needs_compiler
SIZES = [
    (torch.bfloat16, 64, 1.5, 1100), (torch.float32, 80, 4.0, 1331), (torch.float16, 16, 0.5, 130),
    (torch.bfloat16, 576, 2.0, 640), (torch.float32, 8, 1.0, 1024),
]  # fmt: skip


def keys_and_energies(tokens: int, dim: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Keys that lie far from zero, and whose channels differ; heads lie side by side, as a projection leaves them."""
    made = torch.Generator().manual_seed(tokens)
    keys = torch.randn(2, tokens, 2, dim, generator=made) * torch.linspace(0.1, 3, dim)
    keys = (keys + 5 * torch.randn(2, 1, 2, dim, generator=made)).to(dtype)
    return keys.transpose(1, 2), torch.rand(2, dim, generator=made).expand(2, -1, -1)


@pytest.mark.parametrize(("dtype", "dim", "bits", "tokens"), SIZES)
def test_codes_are_torch_s(dtype: torch.dtype, dim: int, bits: float, tokens: int) -> None:
    """Codes equal torch's, except for some numbers near the middle of two codes: sums have another order."""
    (keys, energies), layout = keys_and_energies(tokens, dim, dtype), Layout.from_bits(dim, bits)
    for known in (energies, None):
        plain, found = (code(keys, known, layout) for code in (codec.quantize_segments, quantizing.quantize_segments))
        assert plain.keys() == found.keys()
        for name, one in plain.items():
            assert (found[name].dtype, found[name].shape) == (one.dtype, one.shape)
            if one.dtype == torch.float32:
                torch.testing.assert_close(found[name], one, rtol=1e-3, atol=0)
            else:
                assert (found[name] == one).float().mean() > 0.99, name


@pytest.mark.parametrize(("dtype", "dim", "bits", "tokens"), SIZES)
def test_equals_float64(dtype: torch.dtype, dim: int, bits: float, tokens: int) -> None:
    (keys, energies), layout = keys_and_energies(tokens, dim, dtype), Layout.from_bits(dim, bits)
    found, floored = quantizing.quantize_segments(keys, energies, layout), set_floor(energies.double(), MIN_ENERGY)
    half_steps = layout.find_half_steps(keys.device).double()
    assert found["units"].shape[2] == len(segment_spans(tokens))
    for index, (start, stop) in enumerate(segment_spans(tokens)):
        own, fit = keys[:, :, start:stop].double(), {name: found[name][:, :, index] for name in codec.FIT}
        centre, weights, order = fit["centres"].double(), fit["weights"].double(), fit["order"].long()
        torch.testing.assert_close(centre, own.mean(dim=2), rtol=2**-8 + 1e-5, atol=1e-5)
        variances = set_floor((own - centre.unsqueeze(2)).square().mean(dim=2), MIN_VARIANCE)
        needs = (floored * variances).gather(-1, order)
        assert (needs.diff() <= 1e-5 * needs[..., 1:]).all()
        assert codec.has_whole_order(order)
        torch.testing.assert_close(weights, variances.gather(-1, order).rsqrt() / half_steps, rtol=2**-8 + 1e-5, atol=0)
        importance = (floored.gather(-1, order) / weights.square()).unflatten(-1, (-1, BLOCK)).mean(dim=-1)
        importance = importance.repeat_interleave(BLOCK, dim=-1)[..., : layout.coded]
        wide = {"centres": centre, "weights": weights, "order": order}
        codes, scales = round_keys(own, wide, importance, None, layout)
        same = (found["codes"][..., start:stop] == codes).all(dim=-2)
        assert same.float().mean() > 0.99
        unit = fit["units"].double().unsqueeze(-1)
        torch.testing.assert_close(SCALE_LEVELS * unit[..., 0], scales.amax(dim=-1), rtol=1e-3, atol=0)
        levels = found["scales"][..., start:stop].double()
        assert ((levels - scales / unit).abs()[same] < 0.5 + 1e-2).all()
        squares = (levels * unit).square().mean(dim=-1)
        torch.testing.assert_close(found["mean_squares"][..., index].double(), squares, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_shows(bad: float) -> None:
    """A key that is not finite makes the unit of its own segment and head not finite, and no other."""
    keys, energies = keys_and_energies(1100, 64)
    keys[0, 1, 7, 3] = bad
    made = quantizing.quantize_segments(keys, energies, Layout.from_bits(64, 1.5))
    assert made["units"].isfinite().tolist() == [[[True, True], [False, True]], [[True, True], [True, True]]]
    assert codec.has_whole_order(made["order"])


def test_keys_that_are_all_alike() -> None:
    keys, layout = torch.full((1, 2, 600, 16), 3.0), Layout.from_bits(16, 2)
    plain, found = (code(keys, None, layout) for code in (codec.quantize_segments, quantizing.quantize_segments))
    assert all(torch.equal(found[name], plain[name]) for name in plain)


def test_threads_change_nothing() -> None:
    (keys, energies), before, found = keys_and_energies(1331, 64), torch.get_num_threads(), []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        found.append(quantizing.quantize_segments(keys, energies, Layout.from_bits(64, 1.5)))
    torch.set_num_threads(before)
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_segments_alone_and_together() -> None:
    """A segment is coded alone as among others, to the bit, whatever the strides of its keys."""
    (keys, energies), layout = keys_and_energies(1331, 80, torch.bfloat16), Layout.from_bits(80, 2)
    made = quantizing.quantize_segments(keys, energies, layout)
    for start, stop in segment_spans(1331):
        own = keys[1:, :1, start:stop].mT.contiguous().mT  # no channels side by side
        alone = quantizing.quantize_segments(own, energies[1:, :1], layout)
        for name, one in alone.items():
            assert torch.equal(one, codec.view_span(name, made[name][1:, :1], start, stop)), name


def test_kernels_that_a_cache_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a compiler these are torch's too."""
    (keys, energies), layout = keys_and_energies(700, 64), Layout.from_bits(64, 1.5)
    plain, compiled = (code(keys, energies, layout) for code in (codec.quantize_segments, quantizing.quantize_segments))
    assert not torch.equal(plain["mean_squares"], compiled["mean_squares"])
    for kernels, wanted in (("auto", compiled), ("torch", plain)):
        made = BulkSketch(keys[:, :, :0], keys[:, :, :0], layout, energies[0], kernels).code_keys(keys)
        assert all(torch.equal(made[name], wanted[name]) for name in wanted)
    monkeypatch.setattr(building, "find_compiler", lambda: "/no/compiler")
    quantizing.build_quantizer.cache_clear()
    made = quantizing.quantize_segments(keys, energies, layout)
    quantizing.build_quantizer.cache_clear()
    assert all(torch.equal(made[name], plain[name]) for name in plain)
