"""A cache of one layer, and several ways to bring the same tokens into it; its state must not depend on the way."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from harness import Driver, FakeAttention, Inputs, make_config
from torch import Tensor

from qada_cache import QAdACache

SINKS, WINDOW = 3, 8
TOKENS = 2170  # the bulk then has four segments
ENERGIES = torch.exp(2 * torch.randn(1, 2, 16, generator=torch.Generator().manual_seed(1)))


class LayerScene:
    """The cache, its `Driver`, and `calls`: keys, values and queries of the tokens that its rows hold in the end."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        self.config, self.folder, self.dtype = make_config(), folder, dtype
        keys, values, queries = Inputs(5)(TOKENS)
        # Keys change along the text, so that segments have unlike weights and centres.
        turn = torch.linspace(0, 3, TOKENS)[:, None] * torch.linspace(0.2, 1, 16)
        calls = keys * (1 + turn.sin().square()) + turn.cos(), values + keys, queries
        self.calls = tuple(tensor.to(dtype) for tensor in calls)
        self.module = FakeAttention(self.config, groups=2)
        cache = QAdACache(config=self.config, sink_tokens=SINKS, local_tokens=SINKS + WINDOW, **options)
        cache._shared.options = replace(cache.options, query_energies=ENERGIES)
        self.drive(cache)

    def drive(self, cache: QAdACache) -> None:
        """Go on with this cache."""
        self.cache = cache
        self.driver = Driver(cache.layers[0], module=self.module)

    @property
    def bulk(self) -> Any:
        return self.cache.layers[0].store.bulk

    def read(self, calls: tuple[Tensor, ...], *splits: int) -> Tensor:
        """Give the cache `calls`, keys, values and queries, in pieces of `splits` tokens, the last of the rest. Returns
        the last piece's outputs."""
        rest = calls[0].shape[2] - sum(splits)
        for part in zip(*(tensor.split([*splits, rest], dim=2) for tensor in calls), strict=True):
            if part[0].shape[2]:
                out, _ = self.driver(*part, None, scaling=0.25)
        return out

    def read_own(self, start: int = 0, stop: int = TOKENS) -> None:
        """Give the cache tokens `start..stop` of `calls` in one piece."""
        self.read(tuple(tensor[:, :, start:stop] for tensor in self.calls))

    def draw(self, seed: int, tokens: int) -> tuple[Tensor, ...]:
        """Keys, values and queries of other tokens, for `read`."""
        return tuple(tensor.to(self.dtype) for tensor in Inputs(seed)(tokens))

    def check(self) -> None:
        """Assert that the cache's state is the one that follows from its tokens."""
        raise NotImplementedError


def at_once(scene: LayerScene) -> None:
    scene.read_own()


def in_chunks(scene: LayerScene) -> None:
    """The first chunk is too short for a sketch, the others have several segments, and less than one."""
    scene.read(scene.calls, 600, 1000, 300, 77)


def token_by_token(scene: LayerScene) -> None:
    """Single tokens across the place where a segment closes."""
    scene.read(scene.calls, 1600, *[1] * 200)
    assert scene.bulk.lengths[0] == TOKENS - SINKS - WINDOW


def cropped_within_the_open_segment(scene: LayerScene) -> None:
    scene.read_own()
    scene.cache.crop(-150)
    scene.read_own(TOKENS - 150)


def reordered(scene: LayerScene) -> None:
    """One row twice and the other dropped, before the rest of the tokens."""
    scene.read_own(0, 1500)
    scene.cache.reorder_cache(torch.tensor([1, 1]))
    scene.calls = tuple(torch.cat([t[[1, 1], :, :1500], t[:, :, 1500:]], dim=2) for t in scene.calls)
    scene.read_own(1500)


def selected(scene: LayerScene) -> None:
    """The two rows are selected from three, before the rest of the tokens."""
    more = zip(scene.draw(7, 1400), scene.calls, strict=True)
    scene.read(tuple(torch.cat([other[:1], ours[:, :, :1400]]) for other, ours in more))
    scene.cache.batch_select_indices(torch.tensor([1, 2]))
    scene.read_own(1400)


def copied(scene: LayerScene) -> None:
    """The copy reads the tokens, while the original reads others."""
    scene.read_own(0, 1500)
    first, twin = scene.cache, copy.deepcopy(scene.cache)
    scene.read(scene.draw(6, 900))
    assert first.get_seq_length() == 2400
    scene.drive(twin)
    scene.read_own(1500)


def loaded(scene: LayerScene) -> None:
    """A loaded cache is not given the query energies of the saved one, but its sketch goes on by them."""
    scene.read_own(0, 1900)
    bits = scene.cache.options.bulk_bits
    scene.cache.save(scene.folder / "cache.safetensors")
    scene.drive(QAdACache.load(scene.folder / "cache.safetensors", config=scene.config))
    assert scene.cache.options.query_energies is None
    assert scene.cache.options.bulk_bits == bits
    scene.check()
    scene.read_own(1900)


WAYS = [
    *(at_once, in_chunks, token_by_token, cropped_within_the_open_segment),
    *(reordered, selected, copied, loaded),
]
