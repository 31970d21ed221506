"""A bulk in 8 or 4 bits: its records are those of its tokens alone, however they came, and are read as float64 reads
them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from layer_scene import ENERGIES, SINKS, TOKENS, WAYS, WINDOW, LayerScene, in_chunks
from record_reference import decoded, predicted
from sketch_reference import segment_spans
from stand_in import accelerator
from torch import Tensor

from qada_cache.kernels.cpu.recording import code_records
from qada_cache.sketch import codec, count_segments
from qada_cache.sketch.codec import quantize_segments
from qada_cache.sketch.coded import code_tokens, estimate_keys, find_query_weights
from qada_cache.storage import bulk as storage_bulk
from qada_cache.storage import reading
from qada_cache.storage.coded_bulk import CodedBulk

LOST = {8: 0.004, 4: 0.016}  # of a value's and a weighed residual's variance


class Scene(LayerScene):
    """A scene with a cache whose heads all read everything."""

    def __init__(self, folder: Path, bits: int = 8, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(folder, dtype, criterion="dense", bulk_bits=bits)
        self.bits = bits

    @property
    def bulk(self) -> CodedBulk:
        found = super().bulk
        assert isinstance(found, CodedBulk)
        return found

    def given(self, row: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a row's bulk `[kv_heads, tokens, 16]`, as they were given."""
        tokens = slice(SINKS, SINKS + self.bulk.lengths[row])
        return self.calls[0][row, :, tokens], self.calls[1][row, :, tokens]

    def records(self, row: int) -> Tensor:
        """The records of all tokens of a row's bulk with a sketch: uint8 `[kv_heads, tokens, size]`."""
        bulk, stored, length = self.bulk, self.bulk.stored[row], self.bulk.lengths[row]
        bulk.synchronize()
        return torch.cat([bulk.tensors[0][row, :, :stored].cpu(), bulk.beside[2][row, :, : length - stored].cpu()], 1)

    def float64(self, row: int, *, coded: bool = False) -> tuple[Tensor, Tensor]:
        """The same as records say, by the reference; those of the open segment as they are held, unless `coded`."""
        bulk, layout = self.bulk, self.bulk.layout
        bulk.synchronize()
        length, stored = bulk.lengths[row], bulk.stored[row]
        sizes = {"dim": 16, "value_dim": 16, "key_bits": layout.key_bits, "value_bits": layout.value_bits}
        found, recorded = [], length if coded and length >= 1024 else stored
        for head in range(2):
            beside = tuple(held[row, head, recorded - stored : length - stored].double() for held in bulk.beside[:2])
            if recorded:
                residuals, values = decoded(self.records(row)[head, :recorded], **sizes)
                energies = ENERGIES[0, head].double()
                weights = energies.clamp_min(codec.MIN_ENERGY * energies.mean()).sqrt()
                keys = residuals / weights + predicted(bulk.sketch.tensors[row, head], length)[:recorded]
                beside = tuple(torch.cat(pair) for pair in zip((keys, values), beside, strict=True))
            found.append(beside)
        return tuple(torch.stack(heads) for heads in zip(*found, strict=True))

    def check(self, *, again: bool = False) -> None:
        """Assert that rows have the records of the same tokens when they are coded alone and at once; with `again`,
        tokens were coded again after a crop, under another fit."""
        bulk = self.bulk
        for row, length in enumerate(bulk.lengths):
            closed = segment_spans(length)[-1][0] if length >= 1024 else 0
            assert bulk.stored[row] == closed
            assert bulk.sketch.lengths[row] == (length if length >= 1024 else 0)
            given = self.given(row)
            for coded in (False, True):
                true = self.float64(row, coded=coded)
                held = bulk.read(slice(row, row + 1), slice(None), 0, length, coded=coded)
                for ours, theirs, made in zip(held, true, given, strict=True):
                    assert ours.dtype == made.dtype
                    close = 1e-4 if made.dtype == torch.float32 else 0.05
                    torch.testing.assert_close(ours[0].double(), theirs, rtol=close, atol=close)
                    if not again and not (coded and closed):
                        assert torch.equal(ours[0, :, closed:], made[:, closed:])
            scale = find_query_weights(ENERGIES[0], 16, torch.device("cpu")).double().unsqueeze(-2)
            off, whole = (true[0] - given[0].double()) * scale, given[0].double() * scale
            assert float(off.square().mean() / whole.square().mean()) < LOST[self.bits]
            off = (true[1] - given[1].double()).square().mean() / given[1].double().square().mean()
            assert float(off) < LOST[self.bits]
            if not again and closed:
                made = quantize_segments(given[0].clone(), ENERGIES[0], bulk.sketch.layout)
                says = estimate_keys(made, bulk.sketch.layout)
                weights = find_query_weights(ENERGIES[0], 16, torch.device("cpu"))
                expected, found = code_tokens(*given, says, weights, bulk.layout), self.records(row)
                assert float((found == expected).float().mean()) > 0.999  # a kernel takes another level at a tie
                own = bulk.sketch.tensors.map(lambda held, row=row: held[row : row + 1])
                told = {"first": 0, "segments": count_segments(length)}
                pair = (part[None] for part in given)
                compiles = bulk.sketch.kernels != "torch"
                at_once = code_records(*pair, own, weights, bulk.layout, **told) if compiles else None
                assert torch.equal(found, expected if at_once is None else at_once[0])

    def check_outputs(self) -> None:
        """The next token of full attention is that of the tokens as stored, in float64."""
        following = self.draw(9, 1)
        out = self.read(following)
        for row in range(2):
            store = self.cache.layers[0].store
            (keys, values), bulk = self.float64(row, coded=True), self.bulk.lengths[row]
            recent = slice(store.sinks + store.end - (store.lengths[row] - bulk - SINKS), store.sinks + store.end)
            near = [(held[row, :, :SINKS], held[row, :, recent]) for held in (store.near_keys, store.near_values)]
            whole = [
                torch.cat([a.double(), far, b.double()], dim=1)
                for (a, b), far in zip(near, (keys, values), strict=True)
            ]
            query = following[2][row].double()
            scores = 0.25 * query @ whole[0].repeat_interleave(2, dim=0).mT
            wanted = scores.softmax(dim=-1) @ whole[1].repeat_interleave(2, dim=0)
            torch.testing.assert_close(out[row].double(), wanted, rtol=1e-4, atol=1e-4)


def short(scene: Scene) -> None:
    """Nothing is sketched yet, so nothing is coded."""
    scene.read_own(0, 900)
    assert scene.bulk.stored == [0, 0]
    assert scene.bulk.nbytes == 0


def forked(scene: Scene) -> None:
    """A fork selects tokens, and a fork of that reads all again; codes stay the same."""
    scene.read_own(0, 1500)
    assert scene.cache.layers[0].store.sketch is None
    fork = scene.cache.fork(criterion="gaussian", moments="current")
    assert fork.layers[0].store.sketch is not None
    scene.drive(fork.fork(criterion="dense"))
    scene.read_own(1500)


def where(offloading: bool) -> AbstractContextManager:
    return accelerator() if offloading else nullcontext()


@pytest.mark.parametrize(
    ("way", "offloading"),
    [*zip(WAYS, itertools.cycle((False, True))), *itertools.product((short, forked), (False, True))],
)
def test_records_follow_from_tokens_alone(way: Callable[[Any], None], offloading: bool, tmp_path: Path) -> None:
    with where(offloading):
        scene = Scene(tmp_path)
        way(scene)
        scene.check()
        scene.check_outputs()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [8, 4])
def test_both_rungs(bits: int, dtype: torch.dtype, tmp_path: Path) -> None:
    scene = Scene(tmp_path, bits, dtype)
    in_chunks(scene)
    scene.check()
    assert scene.bulk.tensors[0].shape[3] == {8: 28, 4: 20}[bits]  # 4 of scales, and 11 or 8 bits of 16 channels


@pytest.mark.parametrize("offloading", [False, True])
@pytest.mark.parametrize("kept", [1600, 1100, 700, 30])
def test_crops_into_closed_segments(kept: int, offloading: bool, tmp_path: Path) -> None:
    """A reopened segment has the tokens that its records decode to, and the same records when it closes again: tokens
    are coded once in all."""
    with where(offloading):
        scene = Scene(tmp_path)
        scene.read_own()
        before, known = [scene.float64(row) for row in range(2)], scene.bulk.tensors[0].clone()
        scene.cache.crop(kept - TOKENS)
        for row, length in enumerate(scene.bulk.lengths):
            assert length == max(0, kept - SINKS - WINDOW)
            for ours, theirs in zip(scene.float64(row), before[row], strict=True):
                torch.testing.assert_close(ours, theirs[:, :length], rtol=1e-4, atol=1e-4)
        scene.check(again=True)
        stored = scene.bulk.stored[0]
        scene.read_own(kept)
        scene.check(again=True)
        assert scene.bulk.stored[0] == 1536
        assert torch.equal(scene.bulk.tensors[0][:, :, :stored], known[:, :, :stored])
        for row in range(2):  # of tokens that were left
            for ours, theirs in zip(scene.float64(row), before[row], strict=True):
                left = min(1536, max(0, kept - SINKS))
                torch.testing.assert_close(ours[:, :left], theirs[:, :left], rtol=1e-12, atol=1e-12)
        scene.check_outputs()


def test_a_long_turn_decodes_little_at_once(tmp_path: Path) -> None:
    """Blocks are short, the one over the end of the records too, and say what reading all of it at once says."""
    scene = Scene(tmp_path)
    scene.read_own()
    bulk, row = scene.bulk, slice(0, 1)
    with mock.patch.object(storage_bulk, "STREAM_TOKENS", 16 * 2 * 300):
        parts = list(reading.stream(bulk, row))
    assert [part.keys.shape[2] for part in parts] == [300] * 7 + [bulk.lengths[0] - 2100]
    whole = bulk.read(row, slice(None), 0, bulk.lengths[0])
    for name, wanted in zip(("keys", "values"), whole, strict=True):
        found = torch.cat([getattr(part, name) for part in parts], dim=2)
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
