"""Masks of one query, which are made from where a row's tokens begin and end, beside those of several."""

from dataclasses import fields

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from qada_cache.storage.geometry import ForwardPass

SINKS, WINDOW = 3, 8
ROWS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 25)), min_size=1, max_size=4)


@given(ROWS, st.integers(0, 3), st.lists(st.booleans(), min_size=4, max_size=4), st.booleans())
def test_one_query_sees_what_the_last_of_two_sees(
    rows: list[tuple[int, int]], spare: int, real: list[bool], padded: bool
) -> None:
    """Of rows that have flushed some tokens and hold others, in columns with room for more; some are padding."""
    flushed = [gone for gone, _ in rows]
    lengths = [gone + max(recent, 1) for gone, recent in rows]
    end = max(length - gone for length, gone in zip(lengths, flushed, strict=True)) + spare
    shown = torch.tensor(real[: len(rows)])[:, None]
    given: dict = {"lengths": lengths, "flushed": flushed, "end": end, "device": torch.device("cpu")}
    one, two = (
        ForwardPass(SINKS, WINDOW).geometry(**given, queries=queries, valid=valid if padded else None)
        for queries, valid in ((1, shown), (2, torch.cat([torch.zeros_like(shown), shown], dim=1)))
    )
    for field in fields(one):
        found, wanted = getattr(one, field.name), getattr(two, field.name)
        if isinstance(found, Tensor):
            last = slice(-1, None)
            wanted = wanted[:, :, last]
            assert found.dtype == wanted.dtype
            assert torch.equal(found, wanted), field.name
        elif padded or field.name == "row_lengths":
            assert found == wanted, field.name


@pytest.mark.parametrize("batch", [1, 3])
def test_rows_alike_are_counted_all(batch: int) -> None:
    made = ForwardPass(SINKS, WINDOW).geometry(
        lengths=[40] * batch, flushed=[20] * batch, end=20, queries=1, valid=None, device=torch.device("cpu")
    )
    assert made.local.shape == (1, 1, 1, SINKS + 20)
    assert (made.decisions, made.dense_tokens) == (batch, batch * (40 - SINKS - WINDOW - 12))
    assert made.any_pending
