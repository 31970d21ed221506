"""Masks and counts of a call, beside their definition token by token."""

import copy
import gc
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qada_cache.state.forward_pass import ForwardPass
from qada_cache.storage.padding import NONE, Padding

SINKS, WINDOW = 3, 8
ROWS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 25)), min_size=1, max_size=4)


@given(ROWS, st.integers(0, 3), st.integers(1, WINDOW), st.data())
def test_masks_are_as_defined(rows: list[tuple[int, int]], spare: int, queries: int, data: st.DataObject) -> None:
    """Masks are as defined for rows that have flushed tokens, hold some, and get more, in columns with room; some of
    the new tokens are padding."""
    shown = [data.draw(st.lists(st.booleans(), min_size=queries, max_size=queries)) for _ in rows]
    flushed = [gone if held >= WINDOW else 0 for gone, held in rows]
    new = [held + sum(real) for (_, held), real in zip(rows, shown, strict=True)]
    lengths, end = [gone + recent for gone, recent in zip(flushed, new, strict=True)], max(new) + spare
    made = ForwardPass(SINKS, WINDOW).find_rows(
        lengths=lengths,
        flushed=flushed,
        end=end,
        queries=queries,
        valid=torch.tensor(shown),
        device=torch.device("cpu"),
    )
    tensors = made.local, made.pending, made.bulk_tokens, made.decided
    for row, (total, gone, real) in enumerate(zip(lengths, flushed, shown, strict=True)):
        sinks = [token if token < gone else None for token in range(SINKS)]
        recent = [token if token >= gone else None for token in range(total - end, total)]
        for query in range(queries):
            position = total - sum(real) + sum(real[: query + 1]) - 1
            seen = [None if token is None or token > position else token for token in sinks + recent]
            local = [token is not None and (token < SINKS or token > position - WINDOW) for token in seen]
            pending = [token is not None and not near for token, near in zip(seen, local, strict=True)]
            bulk = max(0, position + 1 - SINKS - WINDOW)
            wanted = local, pending, bulk, real[query] and bulk > 0
            assert made.bulk_lengths[row] == bulk - sum(pending)
            assert tuple(tensor[row, 0, query].tolist() for tensor in tensors) == wanted
    assert made.decisions == made.decided.sum()
    assert torch.equal(made.log_tokens.exp().round().long()[:, 0], made.bulk_tokens)
    mostly_pending = 4 * (made.bulk_tokens - made.bulk_lengths[:, None, None]) > made.bulk_tokens
    assert torch.equal(made.own_log_tokens.isposinf()[:, 0], mostly_pending)
    assert torch.equal(made.own_log_tokens[:, 0][~mostly_pending], made.log_tokens[:, 0][~mostly_pending])


@pytest.mark.parametrize("queries", [1, 2])
@pytest.mark.parametrize("batch", [1, 3])
def test_rows_alike_are_counted_all(batch: int, queries: int) -> None:
    made = ForwardPass(SINKS, WINDOW).find_rows(
        lengths=[40] * batch, flushed=[20] * batch, end=20, queries=queries, valid=None, device=torch.device("cpu")
    )
    assert made.local.shape == (1, 1, queries, SINKS + 20)
    assert (made.decisions, made.dense_tokens) == (batch * queries, batch * (40 - SINKS - WINDOW - 12))


@pytest.mark.parametrize("queries", [1, 2])
def test_a_window_longer_than_any_text(queries: int) -> None:
    """Everything is local, and nothing takes the memory of so many tokens."""
    made = ForwardPass(SINKS, 10**30).find_rows(
        lengths=[40, 30], flushed=[0, 0], end=40, queries=queries, valid=None, device=torch.device("cpu")
    )
    for row, length in enumerate((40, 30)):
        for query in range(queries):
            columns = range(-SINKS, 40)
            wanted = [40 - length <= column <= 40 - queries + query for column in columns]
            assert made.local[row, 0, query].tolist() == wanted
    assert not made.pending.any()
    assert made.decisions == 0


def test_a_mask_is_read_once_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer of a pass reads a mask for all layers. The next pass reads it again, as its numbers may have
    changed."""
    calls, compare = [], Padding._compare

    def counting(padding: Padding, *given: Any) -> Any:
        calls.append(padding)
        return compare(padding, *given)

    monkeypatch.setattr(Padding, "_compare", counting)
    passes, mask = ForwardPass(SINKS, WINDOW), torch.ones(2, 20, dtype=torch.bool)
    call = {"batch": 2, "seen": 20, "queries": 20}
    for padded in (3, 5):
        mask[1, :padded] = False
        first, *others = [passes.read_padding(NONE, mask, **call, first=layer == 0) for layer in range(4)]
        assert all(found is first for found in others)
        assert first[0].count_by_row(2) == [0, padded]
    assert len(calls) == 2
    assert copy.deepcopy(passes).read_padding(NONE, mask, **call, first=False)[0] is not first[0]
    assert len(calls) == 3
    del mask
    gc.collect()
    assert not len(passes._read)  # what was found goes with the mask
