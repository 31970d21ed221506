"""Counts of decisions, summed late: the same as summed at once."""

import copy
from types import SimpleNamespace

import pytest
import torch

from qada_cache.state import counters
from qada_cache.state.counters import Counters


def test_sums_of_many_calls() -> None:
    """Sums are right over more calls than may be pending, with changes of shape between them, padded rows and calls of
    many queries."""
    generator = torch.Generator().manual_seed(0)
    counted, heads, groups = Counters(), torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    dense_tokens = 0
    assert counted.record["local_heads"] is None
    assert counted.record["local_groups"] is None
    assert counted.nbytes == 0
    for call in range(3 * counters.UNSUMMED_CALLS):
        batch, queries = (2, 1) if call % 40 < 35 else (3, 4) if call % 40 < 38 else (1, 9)
        rows = 1 if call % 7 else batch
        flags = torch.rand(batch, 2, 3, queries, generator=generator) < 0.3
        decided = torch.rand(rows, 1, queries, generator=generator) < 0.8
        geometry = SimpleNamespace(decided=decided, decisions=int(decided.sum()) * batch // rows, dense_tokens=call)
        counted.count(flags, geometry, 3)
        dense_tokens += call if decided.any() else 0
        for row in range(batch):
            for query in range(queries):
                if decided[row if rows > 1 else 0, 0, query]:
                    heads += ~flags[row, :, :, query]
                    groups += ~flags[row, :, :, query].any(dim=-1)
        assert counted.nbytes <= 3 * 2 * 3 * 4 * counters.UNSUMMED_CALLS + heads.nbytes + groups.nbytes
        if call in (3, 50):
            assert torch.equal(counted.record["local_heads"], heads)
            twin = copy.deepcopy(counted)
            twin.count(flags, geometry, 3)
    assert counted.steps == 3 * counters.UNSUMMED_CALLS
    assert torch.equal(counted.record["local_heads"], heads)
    assert torch.equal(counted.record["local_groups"], groups)
    again, decided = Counters(**counted.record), torch.ones(1, 1, 1, dtype=torch.bool)
    again.count(
        torch.zeros(1, 2, 3, 1, dtype=torch.bool), SimpleNamespace(decided=decided, decisions=1, dense_tokens=5), 3
    )
    assert torch.equal(again.record["local_heads"], heads + 1)
    assert torch.equal(counted.record["local_heads"], heads)
    assert again.decisions == counted.decisions + 1
    assert counted.dense_bulk_bytes == 3 * dense_tokens
    assert again.dense_bulk_bytes == counted.dense_bulk_bytes + 15


def test_drafts_are_summed_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum for each draft would be nine kernels a layer; calls of more queries hold more flags."""
    counted, summed, own = Counters(), list[int](), Counters._sum
    monkeypatch.setattr(Counters, "_sum", lambda self: summed.append(len(self._unsummed)) or own(self))
    for queries in (*range(1, 9), 9, 100):
        geometry = SimpleNamespace(decided=torch.ones(1, 1, queries, dtype=torch.bool), decisions=1, dense_tokens=1)
        counted.count(torch.zeros(1, 2, 3, queries, dtype=torch.bool), geometry, 3)
    assert summed == [9, 1]


def test_flags_of_two_devices() -> None:
    """As of a model that was moved between calls."""
    counted, geometry = Counters(), SimpleNamespace(decisions=1, dense_tokens=1)
    for device in ("cpu", "meta"):
        geometry.decided = torch.ones(1, 1, 1, dtype=torch.bool, device=device)
        counted.count(torch.zeros(1, 2, 3, 1, dtype=torch.bool, device=device), geometry, 3)
    assert counted.record["local_heads"].shape == (2, 3)
