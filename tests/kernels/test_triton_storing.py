"""Triton's kernel that stores a token and estimates its bulk's attention, against float64, interpreted and on a GPU."""

import math
from typing import Any

import pytest
import reference
import torch
from drawn import make_moments, random
from torch import Tensor

from qada_cache.kernels import storing as dispatch
from qada_cache.kernels.operands import Moments, Query
from qada_cache.kernels.storing import find_storing_fault, make_storer
from qada_cache.key_moments.running import flatten

pytest.importorskip("triton", reason="triton is not installed: pip install triton", exc_type=ModuleNotFoundError)
from steps import DEVICES, interpreter

from qada_cache.kernels.triton import storing

ROWS, KV_HEADS, COLUMNS, SCALING = 2, 2, 7, 0.25


def to_told(moments: tuple[Tensor, Tensor, Tensor], device: str) -> Moments:
    mean, covariance, tokens = (part.to(device).float() for part in moments)
    return *flatten(mean, covariance), tokens.log()


def store(
    query: Tensor, new: list[Tensor], moments: list[Moments], place: int | Tensor, device: str
) -> tuple[Query, list[Tensor]]:
    """The query behind it, and near buffers of zeros that have taken the tokens."""
    near = [torch.zeros(len(query), KV_HEADS, COLUMNS, part.shape[3], dtype=part.dtype, device=device) for part in new]
    asked = Query(query.to(device), SCALING, moments=moments)
    asked.unstored = new[0].to(device), new[1].to(device)
    storing.Storer(near[0], near[1], query.shape[1]).store(asked, place)
    assert asked.unstored is None
    return asked, near


@DEVICES
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize(("group", "dim", "value_dim", "dtype"), [
    (3, 24, 20, torch.float32), (4, 32, 32, torch.bfloat16), (1, 256, 16, torch.float16),
    (5, 72, 0, torch.float32),
])  # fmt: skip
def test_estimates_equal_the_reference(
    group: int, dim: int, value_dim: int, dtype: torch.dtype, heads: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the budget that torch's estimate has in `test_criterion.py`, row by row and head by head."""
    monkeypatch.setattr(storing, "HEADS", heads)
    query = random(ROWS, KV_HEADS * group, 1, dim).to(dtype)
    new = [random(ROWS, KV_HEADS, 1, size, seed=1).to(dtype) for size in (dim, value_dim)]
    both = [make_moments(1, KV_HEADS, dim, 2), make_moments(ROWS, KV_HEADS, dim, 4)]
    asked, near = store(query, new, [to_told(each, device) for each in both], 5, device)
    assert asked.log_bulk is not None
    assert asked.log_bulk.shape == (ROWS, KV_HEADS, group, 1)
    for held, part in zip(near, new, strict=True):
        wanted = torch.zeros_like(held)
        wanted[:, :, 5:6] = part.to(device)
        assert torch.equal(held, wanted)
    for row in range(ROWS):
        for head in range(KV_HEADS):
            for index in range(group):
                one, found, budget = query[row, head * group + index, 0].float(), [], 0.0
                for mean, covariance, tokens in both:
                    own = row if len(mean) > 1 else 0
                    told = {"mean": mean[own, head], "covariance": covariance[own, head], "scaling": SCALING}
                    count = int(tokens[own])
                    found.append(reference.gaussian_log_bulk(query=one, bulk_tokens=count, **told))
                    size = float(one.abs() @ mean[own, head].float().abs()) * SCALING
                    size += float(one.abs() @ covariance[own, head].float().abs() @ one.abs()) * SCALING**2
                    budget = max(budget, 8 * torch.finfo(torch.float32).eps * (size + math.log(count) + 1))
                assert abs(float(asked.log_bulk[row, head, index]) - max(found)) <= budget


@DEVICES
def test_what_says_nothing(device: str) -> None:
    """If one of two estimates is nan, the other counts; infinities stay. Without moments tokens are stored alone."""
    query, new = random(4, KV_HEADS, 1, 8), [random(4, KV_HEADS, 1, 8, seed=1)] * 2
    mean, covariance, _ = to_told(make_moments(1, KV_HEADS, 8, 2), device)
    first, second = ([math.nan, 1.0, math.inf, -math.inf], [2.0, math.nan, 3.0, -math.inf])
    told = [(mean, covariance, torch.tensor(part, device=device).view(4, 1, 1, 1)) for part in (first, second)]
    found = store(query, new, told, 0, device)[0].log_bulk
    assert found is not None
    assert found.isfinite().flatten(1).all(dim=1).tolist() == [True, True, False, False]
    assert found[2].isposinf().all()
    assert found[3].isneginf().all()
    asked, near = store(query, new, [], 6, device)
    assert asked.log_bulk is None
    assert torch.equal(near[0][:, :, 6:].cpu(), new[0])


@DEVICES
def test_tokens_as_models_lay_them_out(device: str) -> None:
    """Columns of a product of all heads, at a place that a graph has; or with gaps between channels."""
    both = random(ROWS, 1, 2 * KV_HEADS, 8).transpose(1, 2)
    query, place = random(ROWS, KV_HEADS, 1, 8), torch.tensor([3], device=device)
    wide = random(ROWS, KV_HEADS, 1, 16, seed=3)[..., ::2]
    for new in (list(both.split(KV_HEADS, dim=1)), [wide, wide]):
        _, near = store(query, new, [], place, device)
        for held, part in zip(near, new, strict=True):
            assert torch.equal(held[:, :, 3:4].cpu(), part)
            assert held.count_nonzero() == part.numel()


@interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_trial(dtype: torch.dtype) -> None:
    """Passes; and what estimates or stores something else does not."""
    told: dict[str, Any] = {"device": torch.device("cpu"), "dtype": dtype, "group": 3, "dim": 16, "value_dim": 8}
    assert find_storing_fault(storing.Storer, **told) is None

    class Alone(storing.Storer):
        """Goes by the first prompt alone."""

        def store(self, query: Query, place: Any) -> None:
            query.moments = query.moments[:1]
            super().store(query, place)

    class Beside(storing.Storer):
        """Stores one column further."""

        def store(self, query: Query, place: Any) -> None:
            super().store(query, place + 1)

    for wrong in (Alone, Beside):
        fault = find_storing_fault(wrong, **told)
        assert fault is not None
        assert "off by" in fault


def test_who_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's storing kernel is taken if asked for, or by "auto" on its devices if a trial passes; a fault is warned
    of."""
    near, warned = torch.zeros(1, 1, 4, 8), []
    assert isinstance(make_storer("triton", near, near, 2), storing.Storer)
    assert make_storer("triton", near, near.half(), 2) is None  # no decode kernel serves these either
    assert make_storer("auto", near, near, 2) is None
    monkeypatch.setattr(dispatch, "AUTO_DEVICES", ("cpu",))
    monkeypatch.setattr(dispatch, "find_storing_fault", lambda *_, **__: "it is off")
    monkeypatch.setattr(dispatch, "warn_once", lambda _, text: warned.append(text))
    assert make_storer("auto", near, near, 2) is None
    assert warned[0].endswith("it is off")
