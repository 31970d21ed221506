"""Keys rounded to the codes of a sketch in C++: the codes of torch's definition, in float64 as well."""

import pytest
import torch
from compilers import needs_compiler
from torch import Tensor

from qada_cache.kernels.cpu import quantizing
from qada_cache.sketch import Layout
from qada_cache.sketch.codec import FIT, quantize, round_keys
from qada_cache.storage.bulk_sketch import BulkSketch

pytestmark = needs_compiler


def keys_and_energies(tokens: int, dim: int) -> tuple[Tensor, Tensor]:
    """Two heads of keys that lie far from zero, and whose channels differ."""
    made = torch.Generator().manual_seed(tokens)
    keys = torch.randn(1, 2, tokens, dim, generator=made) * torch.linspace(0.1, 3, dim)
    return keys + 5 * torch.randn(1, 2, 1, dim, generator=made), torch.rand(1, 2, dim, generator=made)


@pytest.mark.parametrize("under_a_fit", [False, True])
@pytest.mark.parametrize(("dim", "bits", "tokens"), [(64, 1.5, 512), (80, 4.0, 331), (16, 0.5, 130)])
def test_codes_are_torch_s(dim: int, bits: float, tokens: int, under_a_fit: bool) -> None:
    """But for a value that lies between two levels, now and then: sums are made in another order."""
    (keys, energies), layout = keys_and_energies(tokens, dim), Layout.from_bits(dim, bits)
    fit = None
    if under_a_fit:
        fit = quantize(keys, energies, layout)
        keys = 1.3 * keys_and_energies(tokens - 1, dim)[0]
        fit["units"][0, 1] /= 3  # at which scales end
    plain, found = (quantize(keys, energies, layout, fit, rounding) for rounding in (round_keys, quantizing.round_keys))
    for name in ("centres", "order", "weights"):
        assert torch.equal(found[name], plain[name])
    assert (found["codes"] == plain["codes"]).float().mean() > 0.999
    assert (found["scales"] == plain["scales"]).float().mean() > 0.999
    torch.testing.assert_close(found["units"], plain["units"], rtol=1e-6, atol=0)
    importance = torch.rand(1, 2, layout.coded)
    codes, scales = quantizing.round_keys(keys, plain, importance, None, layout)
    wide = {name: plain[name] if name == "order" else plain[name].double() for name in FIT}
    wanted, wanted_scales = round_keys(keys.double(), wide, importance.double(), None, layout)
    same = (codes == wanted).all(dim=-2)
    assert same.float().mean() > 0.999
    torch.testing.assert_close(scales[same].double(), wanted_scales[same], rtol=1e-5, atol=0)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_shows(bad: float) -> None:
    keys, energies = keys_and_energies(200, 64)
    keys[0, 1, 7, 3] = bad
    made = quantize(keys, energies, Layout.from_bits(64, 1.5), rounding=quantizing.round_keys)
    assert made["units"].isfinite().tolist() == [[True, False]]


def test_threads_change_nothing() -> None:
    (keys, energies), before, found = keys_and_energies(331, 64), torch.get_num_threads(), []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        found.append(quantize(keys, energies, Layout.from_bits(64, 1.5), rounding=quantizing.round_keys))
    torch.set_num_threads(before)
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_kernels_that_a_cache_asks_for() -> None:
    keys, layout = torch.zeros(1, 2, 0, 64), Layout.from_bits(64, 1.5)
    for kernels, rounding in (("auto", quantizing.round_keys), ("torch", round_keys)):
        assert BulkSketch(keys, keys, layout, None, kernels).rounding is rounding
