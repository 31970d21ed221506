"""Crops of a bulk in few bits: tokens say for good what they were coded as, however often segments open and close."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Driver, FakeAttention, Inputs, make_config, transformers_mask
from small_sketch import small_sketch
from stand_in import accelerator
from torch import Tensor

from qada_cache import QAdACache
from qada_cache.kernels import choice, coding
from qada_cache.storage import coded_bulk
from qada_cache.storage.coded_bulk import CodedBulk

SINKS, WINDOW, SEGMENT, MIN_TOKENS = 3, 8, 64, 128
MOST, TURN = 560, 150  # tokens of a row, of some eight segments, and of a turn
LOST = {8: 0.01, 4: 0.04}  # of a value's variance, by one coding
Pair = tuple[Tensor, Tensor]


class Walk:
    """A cache of one layer that goes back and forth, and what each token of its bulk said when it was coded."""

    def __init__(self, folder: Path, *, seed: int, bits: int, dtype: torch.dtype, alike: bool) -> None:
        self.config = make_config()
        self.file, self.bits, self.inputs = folder / "cache", bits, Inputs(seed, dtype=dtype)
        self.generator, self.reopened, self.alike = torch.Generator().manual_seed(seed), 0, alike
        self.module = FakeAttention(self.config, groups=2)
        told: dict[str, Any] = {"criterion": "dense", "sink_tokens": SINKS, "local_tokens": SINKS + WINDOW}
        self.adopt(QAdACache(config=self.config, bulk_bits=bits, **told))
        self.said: list[Pair] = []  # of each row's tokens that have been in a closed segment
        self.again: list[Tensor] = [torch.zeros(MOST, dtype=torch.long)] * 2  # how often each has been coded again
        self.given: list[Pair] = []  # all of its tokens
        self.valid = torch.ones(2, 0, dtype=torch.bool)
        self.read(300)

    def adopt(self, cache: QAdACache) -> None:
        self.cache = cache
        self.driver = Driver(cache.layers[0], module=self.module)

    def draw(self, below: int) -> int:
        return int(torch.randint(below, (), generator=self.generator))

    def read(self, tokens: int) -> None:
        """Keys of a turn lie elsewhere than those of the last one, unless all are alike."""
        keys, values, queries = self.inputs(tokens)
        if not self.alike:
            keys = keys * 10.0 ** (self.draw(3) - 1) + 3 * self.draw(5)
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
            self.again[row] = torch.where(torch.arange(MOST) < length - SINKS, self.again[row], 0)

    def act(self) -> None:
        room = MOST - self.cache.get_seq_length()
        if room >= TURN and self.draw(2):
            self.read(1 + self.draw(TURN))
        else:
            [self.crop, self.reorder, self.branch, self.save_and_load][self.draw(4)]()

    def reorder(self) -> None:
        index = [self.draw(2), self.draw(2)]
        self.cache.reorder_cache(torch.tensor(index))
        self.said, self.given = [self.said[row] for row in index], [self.given[row] for row in index]
        self.valid, self.again = self.valid[index], [self.again[row] for row in index]

    def branch(self) -> None:
        """A copy goes another way, and leaves the original as it is; or the original does."""
        twin, known = copy.deepcopy(self.cache), (list(self.said), list(self.given), list(self.again), self.valid)
        other = twin if self.draw(2) else self.cache
        stays = self.cache if other is twin else twin
        self.adopt(other)
        self.crop()
        self.check()
        self.read(TURN)
        self.check()
        self.said, self.given, self.again, self.valid = known
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
        """Assert that tokens of closed segments decode as before, and that others are as they were given. Unless turns
        are alike, all tokens of a closed segment may have been coded a second time, and no more."""
        for row, length in enumerate(self.bulk.lengths):
            rows, stored = slice(row, row + 1), self.bulk.stored[row]
            known = self.said[row][0].shape[1]
            held = self.store.copy_tokens(rows, SINKS, max(SINKS, self.store.lengths[row]))
            same = torch.ones(known, dtype=torch.bool)
            for ours, said, made in zip(held, self.said[row], self.given[row], strict=True):
                same &= (ours[0, :, :known] == said).all(dim=2).all(dim=0)
                after = max(known, stored)
                assert torch.equal(ours[0, :, after:], made[:, SINKS + after :])
            assert same[stored:].all()
            self.again[row] = self.again[row].clone()
            self.again[row][:known] += ~same
            assert int(self.again[row].max()) <= (0 if self.alike else 1)
            # Records decode to the tokens, also in the open segment, whose end is coded until it joins the next one.
            coded = (min(known, stored + SEGMENT, length) if self.alike else min(known, stored)) * (
                length >= MIN_TOKENS
            )
            for ours, exact in zip(self.bulk.read(rows, slice(None), 0, coded, coded=True), held, strict=True):
                assert torch.equal(ours[0], exact[0, :, :coded])
            self.said[row] = tuple(part[0, :, : max(known, stored)] for part in held)
        for said, given in zip(self.said, self.given, strict=True):
            for ours, made in zip(said, given, strict=True):
                off = (ours - made[:, SINKS : SINKS + ours.shape[1]]).double().square().sum()
                assert off <= LOST[self.bits] * made.double().square().sum()


def cat(old: Pair, new: Pair) -> Pair:
    return torch.cat([old[0], new[0]], dim=1), torch.cat([old[1], new[1]], dim=1)


def cut(pair: Pair, tokens: int) -> Pair:
    return pair[0][:, :tokens], pair[1][:, :tokens]


WAYS = {"c++": (torch.float32, 8), "torch": (torch.bfloat16, 8), "offloaded": (torch.bfloat16, 4)}


@pytest.mark.parametrize("alike", [True, False])
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
    way: str, dtype: torch.dtype, bits: int, alike: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
        walk = Walk(tmp_path, seed=1, bits=bits, dtype=dtype, alike=alike)
        assert (walk.bulk.sketch.find_coder() is not None) == (way == "triton")
        walk.check()
        for _ in range(15 if way == "triton" else 50):
            walk.act()
            walk.check()
        assert walk.reopened > 4 - 2 * (way == "triton")


@pytest.mark.parametrize("bits", [8, 4])
def test_a_fit_is_left_that_other_tokens_do_not_fit(bits: int, tmp_path: Path) -> None:
    """That of a text that repeats itself: what follows a crop into it is coded as well as if it had come first, and is
    coded so for good."""
    with small_sketch(MIN_TOKENS, SEGMENT):
        walk, fits = Walk(tmp_path, seed=1, bits=bits, dtype=torch.float32, alike=True), []
        walk.draw = lambda below: 1  # no padding
        walk.cache.reset()
        for name in ("said", "given"):
            setattr(walk, name, [])
        walk.valid = walk.valid[:, :0]
        walk.read(left := SINKS + 4 * SEGMENT + 3)
        keys, values, queries = walk.inputs(1)
        alike = (part.expand(-1, -1, 200, -1) + 0.01 * walk.inputs(200)[0] for part in (keys, values))
        mask = transformers_mask(torch.ones(2, left + 200, dtype=torch.bool), 200)
        walk.driver(*alike, queries.expand(-1, -1, 200, -1), mask, scaling=0.25)
        for _ in range(3):
            walk.cache.crop(left - walk.cache.get_seq_length())
            assert [[each.tokens for each in row] for row in walk.bulk.reopened] == [[SEGMENT, 3]] * 2
            walk.given = [cut(pair, left) for pair in walk.given]
            walk.said, walk.valid = [cut(pair, 0) for pair in walk.given], walk.valid[:, :left]
            walk.read(200)
            assert walk.bulk.recoded == [{4}] * 2
            for row in range(2):
                held = walk.store.copy_tokens(slice(row, row + 1), left, SINKS + 5 * SEGMENT)
                for ours, (made, lost) in zip(held, zip(walk.given[row], (0.02, 0.01), strict=True), strict=True):
                    off = (ours[0] - made[:, left : SINKS + 5 * SEGMENT]).square().mean()
                    assert off < lost * {8: 1, 4: 4}[bits]
            fits.append(walk.bulk.sketch.tensors.centres[:, :, 4].clone())
        assert torch.equal(fits[0], fits[2])
