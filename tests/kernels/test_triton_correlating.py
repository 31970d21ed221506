"""Triton's kernels that take tokens into means and covariances, against float64, interpreted and on a GPU."""

import itertools
from typing import Any

import pytest
import torch
from test_correlating import EPSILON, HEADS, ROWS, check, draw, make_empty

from qada_cache.kernels import correlating as dispatch
from qada_cache.kernels.correlating import find_correlating_fault, take_in_by_torch

pytest.importorskip("triton", reason="triton is not installed: pip install triton", exc_type=ModuleNotFoundError)
from steps import DEVICES, interpreter

from qada_cache.kernels.triton import correlating


@DEVICES
@pytest.mark.parametrize(("dims", "dtypes", "split", "mean"), [
    ((32, 32), (torch.float32, torch.float32), [1], 0.0),
    ((32, 32), (torch.float32, torch.float32), [2, 30, 1, 600], 100.0),
    ((24, 80), (torch.bfloat16, torch.bfloat16), [1100, 40], 0.0),
    ((24, 80), (torch.bfloat16, torch.bfloat16), [130], 100.0),
    ((16, 8), (torch.float32, torch.float16), [2, 600], 10.0),
])  # fmt: skip
def test_any_split_equals_float64(
    dims: tuple[int, int], dtypes: tuple[torch.dtype, torch.dtype], split: list[int], mean: float, device: str
) -> None:
    """Products have 22 bits of what is off from a chunk's mean, which is of float32."""
    left, right = (draw(sum(split), dim, dtype, mean, device) for dim, dtype in zip(dims, dtypes, strict=True))
    means = make_empty(dims[0], device=device), make_empty(dims[1], device=device)
    covariance, count = make_empty(*dims, device=device), 0
    for parts in zip(left.split(split, dim=2), right.split(split, dim=2), strict=True):
        correlating.take_in(count, means, covariance, *parts)
        count += parts[0].shape[2]
    check((*means, covariance), left, right, 4 * EPSILON * (1 + mean) * (1 + len(split) ** 0.5), more=4)


@DEVICES
def test_keys_alone(device: str) -> None:
    """Moments of keys alone are updated if both means are the same tensor; other rows are left alone."""
    keys, dim = draw(130, 40, torch.bfloat16, 5.0, device), 40
    mean, covariance = (torch.zeros(ROWS, HEADS, *shape, device=device) for shape in ((dim,), (dim, dim)))
    for start, stop in itertools.pairwise((0, 100, 130)):
        own = keys[1:, :, start:stop]
        correlating.take_in(start, (mean[1:], mean[1:]), covariance[1:], own, own)
    expected = torch.zeros(1, HEADS, dim), torch.zeros(1, HEADS, dim, dim)
    take_in_by_torch(0, (expected[0], expected[0]), expected[1], *[keys[1:].cpu()] * 2)
    torch.testing.assert_close(mean[1:].cpu(), expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(covariance[1:].cpu(), expected[1], rtol=1e-5, atol=1e-5)
    assert not mean[0].any()
    assert not covariance[0].any()


@interpreter
def test_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes; what takes in something else does not, is warned of, and torch's operations serve."""
    told: dict[str, Any] = {"device": torch.device("cpu"), "dtypes": (torch.bfloat16,) * 2, "dims": (8, 16)}
    assert find_correlating_fault(correlating.take_in, **told) is None

    def forget(count: int, *given: Any) -> None:
        correlating.take_in(count // 2, *given)

    fault = find_correlating_fault(forget, **told)
    assert fault is not None
    assert "off by" in fault
    monkeypatch.setattr(dispatch, "AUTO_DEVICES", ("cpu",))
    warned: list[str] = []
    monkeypatch.setattr(dispatch, "warn_once", lambda _, text: warned.append(text))
    find = dispatch._find_kernel.__wrapped__
    of_dtypes = torch.device("cpu"), torch.bfloat16, torch.bfloat16
    assert find(*of_dtypes, 16, 8) is correlating.take_in
    assert find(*of_dtypes, 16, 12) is None
    assert find(torch.device("cpu"), torch.float64, torch.float64, 16, 8) is None
    assert not warned
    monkeypatch.setattr(correlating, "take_in", forget)
    assert find(*of_dtypes, 16, 8) is None
    assert len(warned) == 1
