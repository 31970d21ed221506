"""A bulk in 8 or 4 bits: its records are those of its tokens alone, however they came, and are read as float64 reads
them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from harness import Driver, FakeAttention, Inputs
from record_reference import decoded, predicted
from sketch_reference import segment_spans
from stand_in import accelerator
from torch import Tensor
from transformers import LlamaConfig

from qada_cache import QAdACache
from qada_cache.kernels.cpu.recording import code_records
from qada_cache.sketch import codec, count_segments
from qada_cache.sketch.codec import quantize_segments
from qada_cache.sketch.coded import code_tokens, estimate_keys, find_query_weights
from qada_cache.storage import bulk as storage_bulk
from qada_cache.storage import reading
from qada_cache.storage.coded_bulk import CodedBulk

SINKS, WINDOW = 3, 8
TOKENS = 2170  # of which the bulk has four segments
ENERGIES = torch.exp(2 * torch.randn(1, 2, 16, generator=torch.Generator().manual_seed(1)))
LOST = {8: 0.004, 4: 0.016}  # of a value's and a weighed residual's variance
Calls = tuple[Tensor, ...]


class Scene:
    """A cache of one layer, what drives it, and the tokens of two rows that it is to hold in the end."""

    def __init__(self, folder: Path, bits: int = 8, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        self.config = LlamaConfig(
            hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2
        )
        self.config._attn_implementation = "sdpa"
        self.folder, self.bits, (keys, values, queries) = folder, bits, Inputs(5)(TOKENS)
        turn = torch.linspace(0, 3, TOKENS)[:, None] * torch.linspace(0.2, 1, 16)
        calls = keys * (1 + turn.sin().square()) + turn.cos(), values + keys, queries
        self.calls: Calls = tuple(tensor.to(dtype) for tensor in calls)
        self.module = FakeAttention(self.config, groups=2)
        asked = {"criterion": "dense", "sink_tokens": SINKS, "local_tokens": SINKS + WINDOW, "bulk_bits": bits}
        cache = QAdACache(config=self.config, **{**asked, **options})
        cache._shared.options = replace(cache.options, query_energies=ENERGIES)
        self.drive(cache)

    def drive(self, cache: QAdACache) -> None:
        self.cache = cache
        self.driver = Driver(cache.layers[0], module=self.module)

    @property
    def bulk(self) -> CodedBulk:
        found = self.cache.layers[0].store.bulk
        assert isinstance(found, CodedBulk)
        return found

    def read(self, calls: Calls, *splits: int) -> Tensor:
        """Calls of so many tokens; the last one has the rest. Returns its outputs."""
        rest = calls[0].shape[2] - sum(splits)
        for part in zip(*(tensor.split([*splits, rest], dim=2) for tensor in calls), strict=True):
            if part[0].shape[2]:
                out, _ = self.driver(*part, None, scaling=0.25)
        return out

    def given(self, row: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a row's bulk `[kv_heads, tokens, 16]`, as they were given."""
        tokens = slice(SINKS, SINKS + self.bulk.lengths[row])
        return self.calls[0][row, :, tokens], self.calls[1][row, :, tokens]

    def records(self, row: int) -> Tensor:
        """Of all tokens of a row's bulk, if it has a sketch: uint8 `[kv_heads, tokens, size]`."""
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
        """Against rows that are coded alone, in one go, from tokens as they were given; those coded `again`, after a
        crop, under another fit."""
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
        following = Inputs(9)(1)
        following = tuple(tensor.to(self.calls[0].dtype) for tensor in following)
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


def at_once(scene: Scene) -> None:
    scene.read(scene.calls)


def in_chunks(scene: Scene) -> None:
    """Shorter than what makes a sketch, then of several segments, then of less than one."""
    scene.read(scene.calls, 600, 1000, 300, 77)


def token_by_token(scene: Scene) -> None:
    """Across the place where a segment closes."""
    scene.read(scene.calls, 1700, *[1] * 200)
    assert scene.bulk.lengths[0] == TOKENS - SINKS - WINDOW


def short(scene: Scene) -> None:
    """Nothing is sketched yet, so nothing is coded."""
    scene.read(tuple(tensor[:, :, :900] for tensor in scene.calls))
    assert scene.bulk.stored == [0, 0]
    assert scene.bulk.nbytes == 0


def cropped_within_the_open_segment(scene: Scene) -> None:
    scene.read(scene.calls)
    scene.bulk.synchronize()
    before = scene.bulk.tensors[0].clone()
    scene.cache.crop(-150)
    scene.read(tuple(tensor[:, :, TOKENS - 150 :] for tensor in scene.calls))
    assert scene.bulk.stored == [1536, 1536]
    assert torch.equal(scene.bulk.tensors[0][:, :, :1536], before[:, :, :1536])


def reordered(scene: Scene) -> None:
    """A row twice, the other not, and on from there."""
    scene.read(tuple(tensor[:, :, :1500] for tensor in scene.calls))
    scene.cache.reorder_cache(torch.tensor([1, 1]))
    scene.calls = tuple(torch.cat([t[[1, 1], :, :1500], t[:, :, 1500:]], dim=2) for t in scene.calls)
    scene.read(tuple(tensor[:, :, 1500:] for tensor in scene.calls))


def selected(scene: Scene) -> None:
    """From more rows."""
    more = tuple(tensor.to(scene.calls[0].dtype) for tensor in Inputs(7)(1400))
    joined = tuple(torch.cat([other[:1], ours[:, :, :1400]]) for other, ours in zip(more, scene.calls, strict=True))
    scene.read(joined)
    scene.cache.batch_select_indices(torch.tensor([1, 2]))
    scene.read(tuple(tensor[:, :, 1400:] for tensor in scene.calls))


def copied(scene: Scene) -> None:
    """While the other goes another way."""
    scene.read(tuple(tensor[:, :, :1500] for tensor in scene.calls))
    first, twin = scene.cache, copy.deepcopy(scene.cache)
    scene.read(tuple(tensor.to(scene.calls[0].dtype) for tensor in Inputs(6)(900)))
    assert first.get_seq_length() == 2400
    scene.drive(twin)
    scene.read(tuple(tensor[:, :, 1500:] for tensor in scene.calls))


def loaded(scene: Scene) -> None:
    """Energies that a cache went by are not known when it is loaded: it goes on by them."""
    scene.read(tuple(tensor[:, :, :1900] for tensor in scene.calls))
    scene.cache.save(scene.folder / "cache.safetensors")
    scene.drive(QAdACache.load(scene.folder / "cache.safetensors", config=scene.config))
    assert scene.cache.options.query_energies is None
    assert scene.cache.options.bulk_bits == scene.bits
    scene.check()
    scene.read(tuple(tensor[:, :, 1900:] for tensor in scene.calls))


def forked(scene: Scene) -> None:
    """To select tokens, and back: codes stay."""
    scene.read(tuple(tensor[:, :, :1500] for tensor in scene.calls))
    assert scene.cache.layers[0].store.sketch is None
    fork = scene.cache.fork(criterion="gaussian", moments="current")
    assert fork.layers[0].store.sketch is not None
    scene.drive(fork.fork(criterion="dense"))
    scene.read(tuple(tensor[:, :, 1500:] for tensor in scene.calls))


WAYS = [
    at_once,
    in_chunks,
    token_by_token,
    short,
    cropped_within_the_open_segment,
    reordered,
    selected,
    copied,
    loaded,
    forked,
]


def where(offloading: bool) -> AbstractContextManager:
    return accelerator() if offloading else nullcontext()


@pytest.mark.parametrize("offloading", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_records_follow_from_tokens_alone(way: Callable[[Scene], None], offloading: bool, tmp_path: Path) -> None:
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
    """What opens again is what records said of it, and says the same when it closes again: one coding in all."""
    with where(offloading):
        scene = Scene(tmp_path)
        scene.read(scene.calls)
        before, known = [scene.float64(row) for row in range(2)], scene.bulk.tensors[0].clone()
        scene.cache.crop(kept - TOKENS)
        for row, length in enumerate(scene.bulk.lengths):
            assert length == max(0, kept - SINKS - WINDOW)
            for ours, theirs in zip(scene.float64(row), before[row], strict=True):
                torch.testing.assert_close(ours, theirs[:, :length], rtol=1e-4, atol=1e-4)
        scene.check(again=True)
        stored = scene.bulk.stored[0]
        scene.read(tuple(tensor[:, :, kept:] for tensor in scene.calls))
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
    scene.read(scene.calls)
    bulk, row = scene.bulk, slice(0, 1)
    with mock.patch.object(storage_bulk, "STREAM_TOKENS", 16 * 2 * 300):
        parts = list(reading.stream(bulk, row))
    assert [part.keys.shape[2] for part in parts] == [300] * 7 + [bulk.lengths[0] - 2100]
    whole = bulk.read(row, slice(None), 0, bulk.lengths[0])
    for name, wanted in zip(("keys", "values"), whole, strict=True):
        found = torch.cat([getattr(part, name) for part in parts], dim=2)
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
