"""Masks for a row whose new tokens are all padding, and masks of a decode step beside known padding."""

from __future__ import annotations

import pytest
import torch

from qada_cache.storage.padding import NONE


@pytest.mark.parametrize(("seen", "is_refused"), [(0, False), (8, False), (5, False), (3, True)])
def test_a_row_of_padding_tells_of_the_past_where_it_sees_some_of_it(seen: int, is_refused: bool) -> None:
    """Behind five real tokens: its three see none, all, the real ones, or some of them."""
    mask = torch.zeros(1, 1, 3, 8, dtype=torch.bool)
    mask[..., :seen] = True
    if seen == 8:  # all three see each other, and so are real
        mask[..., 5:] = torch.ones(3, 3, dtype=torch.bool).tril()
    call = {"batch": 1, "seen": 8, "queries": 3}
    if is_refused:
        with pytest.raises(ValueError, match="does not agree with the tokens already cached"):
            NONE.extend(mask, **call)
    else:
        padding, valid, visible = NONE.extend(mask, **call)
        assert visible is None
        assert padding.count_by_row(1) == [0 if seen == 8 else 3]
        assert valid is None or not valid.any()


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
@pytest.mark.parametrize("padded", [0, 3])
def test_a_mask_that_hides_padding_alone(padded: int, dtype: torch.dtype) -> None:
    mask = torch.ones(2, 20, dtype=dtype)
    mask[1, :padded] = 0
    padding, *_ = NONE.extend(mask.bool(), batch=2, seen=20, queries=20)
    mask = torch.nn.functional.pad(mask, (0, 1), value=1)
    assert padding.is_all_that_hides(mask)
    for row, token in ((0, 0), (1, 2), (1, 3), (0, 19), (1, 20)):
        other = mask.clone()
        other[row, token] = 1 - other[row, token].to(torch.int64)
        assert not padding.is_all_that_hides(other)
