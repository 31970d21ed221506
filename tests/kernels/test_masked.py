"""Attention under a mask of every pair, against float64."""

from __future__ import annotations

import pytest
import torch

from qada_cache.kernels import masked
from qada_cache.kernels.masked import masked_attention
from qada_cache.kernels.reference import TOLERANCE, partial_attention


@pytest.mark.parametrize("how", ["operator", "plain"])
@pytest.mark.parametrize(("dim", "value_dim"), [(24, 16), (16, 16), (8, 16)])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_it_is_that_of_float64(
    dtype: torch.dtype, dim: int, value_dim: int, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A query that sees nothing gives nothing."""
    found = []
    original = masked._attend_masked
    monkeypatch.setattr(masked, "_attend_masked", lambda *given: found.append(1) or original(*given))
    if how == "plain":
        monkeypatch.setattr(masked, "_takes_masks", lambda *_: False)
    made = torch.Generator().manual_seed(0)
    sizes = ((9, dim), (70, dim), (70, value_dim))
    query, key, value = (torch.randn(2, 3, *size, generator=made).to(dtype) for size in sizes)
    mask = torch.rand(9, 70, generator=made) > 0.7
    mask[5] = False
    out, lse = masked_attention(query, key, value, mask, scaling=0.3, softcap=None, kernels="auto")
    assert bool(found) == (how == "operator" and dim >= value_dim)
    scores = (0.3 * query.double() @ key.double().mT).masked_fill(~mask, -torch.inf)
    wanted = scores.softmax(dim=-1).nan_to_num() @ value.double()
    assert (out - wanted).norm() <= TOLERANCE[dtype] * wanted.norm()
    torch.testing.assert_close(lse.double(), scores.logsumexp(dim=-1), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert not out[:, :, 5].any()


def test_an_operator_that_is_wrong_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    masked._takes_masks.cache_clear()
    original = masked._attend_masked

    def wrong(*given: object) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = original(*given)  # type: ignore[arg-type]
        return 2 * out, lse

    monkeypatch.setattr(masked, "_attend_masked", wrong)
    query, mask = torch.randn(1, 2, 5, 40, generator=torch.Generator().manual_seed(0)), torch.ones(5, 5).tril().bool()
    out, lse = masked_attention(query, query, query, mask, scaling=0.1, softcap=None, kernels="auto")
    wanted = partial_attention(query, query, query, scaling=0.1, causal=True)
    torch.testing.assert_close((out, lse), wanted)
    assert "is not used under masks for torch.float32 and head dimension 40: it is off by" in caplog.text
    masked._takes_masks.cache_clear()
