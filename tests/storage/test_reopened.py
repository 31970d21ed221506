"""Whether tokens fit the coding of a segment that a crop has opened."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qada_cache.sketch import Layout
from qada_cache.sketch.codec import CODES, TOKENS, quantize
from qada_cache.sketch.coded import estimate_keys, find_query_weights
from qada_cache.storage.reopened import ReopenedSegment

HEADS, LEFT, NEW, DIM = 2, 300, 100, 64


def lose(keys: Tensor, made: dict[str, Tensor], energies: Tensor, layout: Layout) -> Tensor:
    """The errors of coded keys `[kv_heads, tokens, dim]`, weighed as queries do."""
    of_segment = {name: part if name in TOKENS else part.unsqueeze(1) for name, part in made.items()}
    return (keys - estimate_keys(of_segment, layout)) * find_query_weights(energies, DIM, keys.device).unsqueeze(-2)


@pytest.mark.parametrize("head", range(HEADS))
def test_other_tokens_may_lose_as_much_more_as_the_whole_segment(head: int) -> None:
    """Beside what they would lose if they were like its first tokens; either head counts."""
    generator, layout = torch.Generator().manual_seed(1), Layout.from_bits(DIM, 1.5)
    assert layout is not None
    keys = torch.randn(HEADS, LEFT + NEW, DIM, generator=generator)
    energies = torch.rand(HEADS, DIM, generator=generator) + 0.5
    fit = quantize(keys, energies, layout)
    segment = ReopenedSegment({name: fit[name] for name in CODES}, torch.zeros(HEADS, LEFT, 1).byte(), False)
    lost = lose(keys, fit, energies, layout).square().sum(dim=-1).mean(dim=-1)  # of a token
    made = quantize(keys[:, LEFT:], energies, layout, segment.sketch)
    assert segment._fits(keys, energies, layout, made)
    off = lose(keys[:, LEFT:], made, energies, layout)
    for share, fits in ((0.9, True), (1.1, False)):
        size = (share * (NEW + LEFT + NEW) * lost / off.square().sum(dim=(1, 2))).sqrt()
        size[1 - head] = 1.0
        weights = find_query_weights(energies, DIM, keys.device).unsqueeze(-2)
        others = keys.clone()
        others[:, LEFT:] += (size[:, None, None] - 1) * off / weights
        assert segment._fits(others, energies, layout, made) is fits
