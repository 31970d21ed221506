"""Masks for a row whose new tokens are all padding."""

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
