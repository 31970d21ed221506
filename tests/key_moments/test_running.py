"""Running moments against two passes in float64."""

import pytest
import torch
from reference import key_moments
from torch import Tensor

from qada_cache.key_moments import running
from qada_cache.key_moments.running import RunningMoments
from qada_cache.selected_rows import SelectedRows

EPSILON = torch.finfo(torch.float32).eps


def keys_with_mean(
    tokens: int, mean: float, *, batch: int = 2, kv_heads: int = 2, dtype: torch.dtype = torch.float32
) -> Tensor:
    generator = torch.Generator().manual_seed(tokens)
    return (torch.randn(batch, kv_heads, tokens, 8, generator=generator) + mean).to(dtype)


def running_over(keys: Tensor, split: list[int]) -> RunningMoments:
    made = RunningMoments(keys.shape[0], keys.shape[1], keys.shape[3], keys.device)
    for part in keys.split(split, dim=2):
        made.update(slice(0, keys.shape[0]), part)
    return made


def errors(found: RunningMoments, keys: Tensor) -> tuple[float, float]:
    """The largest errors of mean and covariance against float64."""
    true = [[key_moments(keys=head) for head in row] for row in keys]
    mean = torch.stack([torch.stack([head[0] for head in row]) for row in true])
    covariance = torch.stack([torch.stack([head[1] for head in row]) for row in true])
    assert found.mean.dtype == found.covariance.dtype == torch.float32
    return float((found.mean - mean).abs().max()), float((found.covariance - covariance).abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mean", [0.0, 1e3])
@pytest.mark.parametrize("tokens", [1, 63, 111, 257])
def test_any_split_equals_float64(tokens: int, mean: float, dtype: torch.dtype) -> None:
    """Running moments equal float64 for any split of the tokens, also of keys a thousand standard deviations from 0,
    where E[k^2] - E[k]^2 in float32 would be noise."""
    keys = keys_with_mean(tokens, mean, dtype=dtype)
    first = tokens // 3
    for split in ([tokens], [1] * tokens, [first, 0, tokens - first], [min(tokens, 7)] * (tokens // 7) + [tokens % 7]):
        made = running_over(keys, split)
        assert made.count == [tokens] * 2
        mean_error, covariance_error = errors(made, keys)
        # One rounding of a mean per merge, which enters the covariance at most linearly.
        budget = 4 * EPSILON * (1 + mean) * (1 + len(split) ** 0.5)
        assert mean_error <= budget
        assert covariance_error <= budget


def test_large_mean_makes_naive_moments_useless() -> None:
    """The test above could not fail otherwise: the naive formula is off by more than the variance."""
    keys = keys_with_mean(257, 1e3)
    naive = (keys.square().mean(dim=2) - keys.mean(dim=2).square()) - keys.double().var(dim=2, correction=0)
    assert naive.abs().max() > 0.05  # the budget above is 0.001 to 0.009


def test_blocks_bound_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = keys_with_mean(111, 5.0)
    monkeypatch.setattr(running, "BLOCK_TOKENS", 10)
    made = running_over(keys, [111])
    assert made.count == [111, 111]
    assert max(errors(made, keys)) <= 1e-5


def test_rows_are_apart() -> None:
    keys = keys_with_mean(63, 2.0, batch=3)
    made = RunningMoments(3, 2, 8, keys.device)
    made.update(slice(0, 3), keys[:, :, :20])
    made.update(slice(1, 2), keys[1:2, :, 20:])
    assert made.count == [20, 63, 20]
    apart = running_over(keys[1:2], [63])
    torch.testing.assert_close(made.covariance[1], apart.covariance[0])
    first = running_over(keys[:1, :, :20], [20])
    torch.testing.assert_close(made.covariance[0], first.covariance[0])
    made.select_rows(SelectedRows([1, 1, 0, 2]))
    assert made.count == [63, 63, 20, 20]
    torch.testing.assert_close(made.mean[:2], apart.mean.expand(2, -1, -1))
    torch.testing.assert_close(made.mean[2], first.mean[0])
    made.clear(slice(1, 3))
    assert made.count == [63, 0, 0, 20]
    assert not made.mean[1:3].any()
    assert not made.covariance[1:3].any()
    torch.testing.assert_close(made.covariance[0], apart.covariance[0])
    made.update(slice(1, 2), keys[1:2])  # begins anew
    torch.testing.assert_close(made.covariance[1], apart.covariance[0])


def test_no_keys_no_moments() -> None:
    made = running_over(keys_with_mean(1, 3.0)[:, :, :0], [0])
    assert made.count == [0, 0]
    assert not made.mean.any()
    assert not made.covariance.any()
