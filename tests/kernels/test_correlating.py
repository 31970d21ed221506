"""Tokens taken into means and covariances in C++, against float64."""

import itertools

import pytest
import torch
from compilers import instructions, needs_compiler, needs_vectors  # noqa: F401 - a fixture
from torch import Tensor

from qada_cache.kernels import correlating as dispatch
from qada_cache.kernels.cpu import correlating

pytestmark = [needs_compiler, needs_vectors]
ROWS, HEADS = 2, 2
EPSILON = torch.finfo(torch.float32).eps


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(correlating, "MIN_TOKENS", 1)


def draw(tokens: int, dim: int, dtype: torch.dtype, mean: float, device: str = "cpu") -> Tensor:
    """Random tokens `[ROWS, HEADS, tokens, dim]` around `mean`, with a token's heads side by side, as models lay them
    out."""
    made = torch.Generator().manual_seed(dim)
    return (torch.randn(ROWS, tokens, HEADS, dim, generator=made) + mean).to(dtype).transpose(1, 2).to(device)


def make_empty(*shape: int, device: str = "cpu") -> Tensor:
    return torch.full((ROWS, HEADS, *shape), torch.nan, device=device)  # of no tokens nothing is read


def check(found: tuple[Tensor, Tensor, Tensor], left: Tensor, right: Tensor, budget: float, more: float = 1) -> None:
    """Means and the covariance against float64, whose budget is so many times that of means."""
    expected = [part.double().mean(dim=2) for part in (left, right)]
    wide, others = (part.double() - own.unsqueeze(2) for part, own in zip((left, right), expected, strict=True))
    for one, wanted in zip(found, (*expected, wide.mT @ others / left.shape[2]), strict=True):
        assert one.dtype == torch.float32
        assert (one - wanted).abs().max() <= budget * (more if wanted.dim() == 4 else 1)


def take_in(parts: list[tuple[Tensor, Tensor]], means: tuple[Tensor, Tensor], covariance: Tensor) -> None:
    count = 0
    for left, right in parts:
        assert correlating.takes_tokens(left, right)
        dispatch.take_in(count, means, covariance, left, right)
        count += left.shape[2]


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize(("dims", "dtype", "split", "mean", "instructions"), [
    ((64, 64), torch.float32, [1], 0.0, "least"),
    ((64, 64), torch.float32, [2, 30, 1, 600], 100.0, "newest"),
    ((20, 80), torch.bfloat16, [1100, 40], 0.0, "middle"),
    ((20, 80), torch.bfloat16, [130], 100.0, "least"),
    ((128, 16), torch.bfloat16, [64, 600], 10.0, "newest"),
    ((128, 16), torch.bfloat16, [64, 600], 10.0, "tiles"),
], indirect=["instructions"])  # fmt: skip
def test_any_split_equals_float64(dims: tuple[int, int], dtype: torch.dtype, split: list[int], mean: float) -> None:
    left, right = (draw(sum(split), dim, dtype, mean) for dim in dims)
    means, covariance = (make_empty(dims[0]), make_empty(dims[1])), make_empty(*dims)
    take_in(list(zip(left.split(split, dim=2), right.split(split, dim=2), strict=True)), means, covariance)
    check((*means, covariance), left, right, 2 * EPSILON * (1 + mean) * (1 + len(split) ** 0.5))


def test_keys_alone() -> None:
    """Moments of keys alone are updated if both means are the same tensor; other rows are left alone."""
    keys = draw(130, 48, torch.float32, 5.0)
    mean, covariance = torch.zeros(ROWS, HEADS, 48), torch.zeros(ROWS, HEADS, 48, 48)
    parts = [(own, own) for own in keys[1:].split([100, 30], dim=2)]
    take_in(parts, (mean[1:], mean[1:]), covariance[1:])
    wide = keys[1:].double()
    expected = wide.mean(dim=2)
    wide = wide - expected.unsqueeze(2)
    torch.testing.assert_close(mean[1:].double(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(covariance[1:].double(), wide.mT @ wide / 130, rtol=1e-5, atol=1e-6)
    assert not mean[0].any()
    assert not covariance[0].any()


def test_threads_change_nothing() -> None:
    values, keys = (draw(700, dim, torch.float32, 1.0) for dim in (64, 80))
    found, before = list[list[Tensor]](), torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        means, covariance = (make_empty(64), make_empty(80)), make_empty(64, 80)
        take_in([(values, keys)], means, covariance)
        found.append([*means, covariance])
    torch.set_num_threads(before)
    assert all(map(torch.equal, itertools.chain(*found[1:]), found[0] * 2))


def test_what_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other dtypes, channels apart, few tokens, and whoever asks for torch: the same, to rounding."""
    values, keys = (draw(200, 16, torch.float32, 1.0) for _ in range(2))
    assert correlating.takes_tokens(values, keys)
    apart = keys.repeat_interleave(2, dim=3)[..., ::2]
    assert not correlating.takes_tokens(values, apart)
    assert not correlating.takes_tokens(values.double(), keys.double())
    assert not correlating.takes_tokens(values.half(), keys.half())
    assert not correlating.takes_tokens(values, keys.bfloat16())
    assert not correlating.takes_tokens(values, keys[..., :8])
    assert not correlating.takes_channels(272, 272, torch.float32)
    monkeypatch.setattr(correlating, "MIN_TOKENS", 201)
    assert not correlating.takes_tokens(values, keys)
    monkeypatch.setattr(correlating, "MIN_TOKENS", 1)
    monkeypatch.setattr(dispatch, "take_in_compiled", None)
    means, covariance = (make_empty(16), make_empty(16)), make_empty(16, 16)
    dispatch.take_in(0, means, covariance, values, keys, "torch")
    assert covariance.isfinite().all()
