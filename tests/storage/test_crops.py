"""Crops of a bulk in few bits: what was coded once says the same for good, however often segments open and close."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Driver, FakeAttention, Inputs, transformers_mask
from small_sketch import small_sketch
from stand_in import accelerator
from torch import Tensor
from transformers import LlamaConfig

from qada_cache import QAdACache
from qada_cache.kernels import choice, coding
from qada_cache.storage import coded_bulk
from qada_cache.storage.coded_bulk import CodedBulk

SINKS, WINDOW, SEGMENT, MIN_TOKENS = 3, 8, 16, 32
MOST = 150  # tokens of a row: of some eight segments
LOST = {8: 0.01, 4: 0.04}  # of a value's variance, by one coding
Pair = tuple[Tensor, Tensor]


class Walk:
    """A cache of one layer that goes back and forth, and what each token of its bulk said when it was coded."""

    def __init__(self, folder: Path, *, seed: int, bits: int, dtype: torch.dtype) -> None:
        self.config = LlamaConfig(
            hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2
        )
        self.config._attn_implementation = "sdpa"
        self.file, self.bits, self.inputs = folder / "cache", bits, Inputs(seed, dtype=dtype)
        self.generator, self.reopened = torch.Generator().manual_seed(seed), 0
        self.module = FakeAttention(self.config, groups=2)
        told: dict[str, Any] = {"criterion": "dense", "sink_tokens": SINKS, "local_tokens": SINKS + WINDOW}
        self.adopt(QAdACache(config=self.config, bulk_bits=bits, **told))
        self.said: list[Pair] = []  # of each row's tokens that have been in a closed segment
        self.given: list[Pair] = []  # all of its tokens
        self.valid = torch.ones(2, 0, dtype=torch.bool)
        self.read(70)

    def adopt(self, cache: QAdACache) -> None:
        self.cache = cache
        self.driver = Driver(cache.layers[0], module=self.module)

    def draw(self, below: int) -> int:
        return int(torch.randint(below, (), generator=self.generator))

    def read(self, tokens: int) -> None:
        """Keys of a turn lie elsewhere than those of the last one."""
        keys, values, queries = self.inputs(tokens)
        keys = keys * (0.5 + self.draw(3)) + self.draw(5)
        padding = [0, 0] if self.draw(2) else [self.draw(tokens), 0]  # on the left of one row
        real = torch.arange(tokens) >= torch.tensor(padding)[:, None]
        self.valid = torch.cat([self.valid, real], dim=1)
        self.driver(keys, values, queries, transformers_mask(self.valid, tokens), scaling=0.25)
        for row, gone in enumerate(padding):
            new = keys[row, :, gone:], values[row, :, gone:]
            if len(self.given) <= row:
                self.given.append(new)
                self.said.append((new[0][:, :0], new[1][:, :0]))
            else:
                self.given[row] = cat(self.given[row], new)

    def crop(self) -> None:
        removed = self.draw(self.cache.get_seq_length() - 5)
        self.cache.crop(-removed)
        self.valid = self.valid[:, : self.cache.get_seq_length()]
        self.reopened += any(self.bulk.reopened)
        assert self.store.lengths == self.valid.sum(dim=1).tolist()
        for row, length in enumerate(self.store.lengths):
            self.given[row] = cut(self.given[row], length)
            self.said[row] = cut(self.said[row], max(0, length - SINKS))

    def act(self) -> None:
        room = MOST - self.cache.get_seq_length()
        if room >= 40 and self.draw(2):
            self.read(1 + self.draw(40))
        else:
            [self.crop, self.reorder, self.branch, self.save_and_load][self.draw(4)]()

    def reorder(self) -> None:
        index = [self.draw(2), self.draw(2)]
        self.cache.reorder_cache(torch.tensor(index))
        self.said, self.given = [self.said[row] for row in index], [self.given[row] for row in index]
        self.valid = self.valid[index]

    def branch(self) -> None:
        """A copy goes another way, and leaves the original as it is; or the original does."""
        twin, known = copy.deepcopy(self.cache), (list(self.said), list(self.given), self.valid)
        other = twin if self.draw(2) else self.cache
        stays = self.cache if other is twin else twin
        self.adopt(other)
        self.crop()
        self.check()
        self.read(40)
        self.check()
        self.said, self.given, self.valid = known
        self.adopt(stays)

    def save_and_load(self) -> None:
        self.cache.save(self.file)
        before = self.state()
        self.adopt(QAdACache.load(self.file, config=self.config))
        for one, other in zip(self.state(), before, strict=True):
            assert torch.equal(one, other)

    @property
    def store(self) -> Any:
        return self.cache.layers[0].store

    @property
    def bulk(self) -> CodedBulk:
        return self.store.bulk

    def state(self) -> list[Tensor]:
        """All that tokens are read by."""
        found, sketch = [], self.bulk.sketch.tensors.to_tensors()
        for row, length in enumerate(self.bulk.lengths):
            rows = slice(row, row + 1)
            for coded in (False, True):
                found += self.bulk.read(rows, slice(None), 0, length, coded=coded)
            if length >= MIN_TOKENS:
                segments = (length + SEGMENT - SEGMENT // 4) // SEGMENT
                found += [sketch[name][row][..., :length] for name in ("codes", "scales")]
                found += [sketch[name][row][:, :segments] for name in ("units", "centres", "order", "weights")]
                found += [sketch[name][row] for name in ("noise", "variances", "slopes")]
        return found

    def check(self) -> None:
        """Tokens that have been coded for good say what they said; others are as they were given."""
        for row, length in enumerate(self.bulk.lengths):
            rows, stored = slice(row, row + 1), self.bulk.stored[row]
            known = self.said[row][0].shape[1]
            held = self.store.copy_tokens(rows, SINKS, max(SINKS, self.store.lengths[row]))
            for ours, said, made in zip(held, self.said[row], self.given[row], strict=True):
                assert torch.equal(ours[0, :, :known], said)
                after = max(known, stored)
                assert torch.equal(ours[0, :, after:], made[:, SINKS + after :])
            # What records say, of the open segment too: the part of it that will be another's is coded for now.
            lasts = min(known, stored + SEGMENT, length) if length >= MIN_TOKENS else 0
            for ours, said in zip(self.bulk.read(rows, slice(None), 0, lasts, coded=True), self.said[row], strict=True):
                assert torch.equal(ours[0], said[:, :lasts])
            if stored > known:
                self.said[row] = tuple(part[0, :, :stored] for part in held)
        for said, given in zip(self.said, self.given, strict=True):
            for ours, made in zip(said, given, strict=True):
                if ours.shape[1]:
                    off = (ours - made[:, SINKS : SINKS + ours.shape[1]]).double().square().mean()
                    assert off < LOST[self.bits] * made.double().square().mean()


def cat(old: Pair, new: Pair) -> Pair:
    return torch.cat([old[0], new[0]], dim=1), torch.cat([old[1], new[1]], dim=1)


def cut(pair: Pair, tokens: int) -> Pair:
    return pair[0][:, :tokens], pair[1][:, :tokens]


WAYS = {"c++": (torch.float32, 8), "torch": (torch.bfloat16, 8), "offloaded": (torch.bfloat16, 4)}


@pytest.mark.parametrize(
    ("way", "dtype", "bits"),
    [
        *((way, *told) for way, told in WAYS.items()),
        *(
            pytest.param(way, dtype, bits, marks=pytest.mark.slow)
            for way in [*WAYS, *["triton"] * choice._is_installed()]
            for dtype in (torch.float32, torch.bfloat16)
            for bits in (8, 4)
            if (dtype, bits) != WAYS.get(way)
        ),
    ],
)
def test_tokens_keep_what_they_were_coded_as(
    way: str, dtype: torch.dtype, bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random crops, turns, copies, files and rows. Triton's kernels code in their interpreter."""
    if way in ("torch", "triton"):
        monkeypatch.setattr(coded_bulk, "code_records", lambda *_, **__: None)
        monkeypatch.setattr(coded_bulk, "decode_records", lambda *_, **__: None)
    if way == "triton":
        monkeypatch.setattr(coding, "AUTO_DEVICES", ("cpu",))
    with ExitStack() as stack:
        stack.enter_context(small_sketch(MIN_TOKENS, SEGMENT))
        if way == "offloaded":
            stack.enter_context(accelerator())
        walk = Walk(tmp_path, seed=1, bits=bits, dtype=dtype)
        assert (walk.bulk.sketch.find_coder() is not None) == (way == "triton")
        walk.check()
        for _ in range(15 if way == "triton" else 50):
            walk.act()
            walk.check()
        assert walk.reopened > 4
