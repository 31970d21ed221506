"""Counts of decisions, summed late: the same as summed at once."""

import copy

import torch

from qada_cache import tally
from qada_cache.tally import Tally


def test_sums_of_many_calls() -> None:
    """Across the bound on pending calls, with changes of shape between them, padded rows and calls of many queries."""
    generator = torch.Generator().manual_seed(0)
    counts, heads, groups = Tally(), torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    assert counts.heads is None
    assert counts.groups is None
    assert counts.nbytes == 0
    for call in range(3 * tally.PENDING):
        batch, queries = (2, 1) if call % 40 < 35 else (3, 4)
        rows = 1 if call % 7 else batch
        flags = torch.rand(batch, 2, 3, queries, generator=generator) < 0.3
        decided = torch.rand(rows, 1, queries, generator=generator) < 0.8
        counts.add(flags, decided)
        for row in range(batch):
            for query in range(queries):
                if decided[row if rows > 1 else 0, 0, query]:
                    heads += ~flags[row, :, :, query]
                    groups += ~flags[row, :, :, query].any(dim=-1)
        assert counts.nbytes <= 2 * 2 * 3 * tally.PENDING + heads.nbytes + groups.nbytes
        if call in (3, 50):
            assert torch.equal(counts.heads, heads)
            twin = copy.deepcopy(counts)
            twin.add(flags, decided)
    assert torch.equal(counts.heads, heads)
    assert torch.equal(counts.groups, groups)
    again = Tally(counts.heads, counts.groups)
    again.add(torch.zeros(1, 2, 3, 1, dtype=torch.bool), torch.ones(1, 1, 1, dtype=torch.bool))
    assert torch.equal(again.heads, heads + 1)
    assert torch.equal(counts.heads, heads)
