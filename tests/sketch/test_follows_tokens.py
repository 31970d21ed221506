"""What is known of a row follows from its tokens alone, to the bit, however they came and whatever came besides."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from harness import Driver, FakeAttention, Inputs
from sketch_reference import segment_spans, slopes_of
from stand_in import accelerator
from torch import Tensor
from transformers import LlamaConfig

from qada_cache import QAdACache, StaticHeads
from qada_cache.sketch import Layout
from qada_cache.sketch.codec import average_channels, quantize_segments

SINKS, WINDOW = 3, 8
TOKENS = 2300  # of which the bulk has four segments
EACH = ("codes", "scales", "units", "centres", "order", "weights", "mean_squares")  # of tokens or segments
ENERGIES = torch.exp(2 * torch.randn(1, 2, 16, generator=torch.Generator().manual_seed(1)))
Calls = tuple[Tensor, Tensor, Tensor]


class Scene:
    """A cache of one layer, what drives it, and the tokens of two rows that it is to hold in the end."""

    def __init__(self, folder: Path) -> None:
        self.config = LlamaConfig(
            hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2
        )
        self.config._attn_implementation = "sdpa"
        self.folder, (keys, values, queries) = folder, Inputs(5)(TOKENS)
        # Keys that turn, so that segments are coded by unlike weights and centres.
        turn = torch.linspace(0, 3, TOKENS)[:, None] * torch.linspace(0.2, 1, 16)
        self.calls = keys * (1 + turn.sin().square()) + turn.cos(), values + keys, queries
        self.module = FakeAttention(self.config, groups=2)
        heads = StaticHeads(torch.ones(1, 4, dtype=torch.bool))
        sizes = {"sink_tokens": SINKS, "local_tokens": SINKS + WINDOW}
        cache = QAdACache(config=self.config, criterion=heads, **sizes)
        cache._shared.options = replace(cache.options, query_energies=ENERGIES)
        self.drive(cache)

    def drive(self, cache: QAdACache) -> None:
        self.cache = cache
        self.driver = Driver(cache.layers[0], module=self.module)

    def read(self, calls: Calls, *splits: int) -> None:
        """Calls of so many tokens; the last one has the rest."""
        rest = calls[0].shape[2] - sum(splits)
        for part in zip(*(tensor.split([*splits, rest], dim=2) for tensor in calls), strict=True):
            if part[0].shape[2]:
                self.driver(*part, None, scaling=0.25)

    def check(self) -> None:
        """Against rows that are coded alone, in one go, from tokens as they were given."""
        known, bulk = self.cache.layers[0].store.sketch, self.cache.layers[0].store.bulk
        kept = known.tensors.to_tensors()
        for row, length in enumerate(bulk.lengths):
            assert known.lengths[row] == length > 1024
            keys, values = (tensor[row, :, SINKS : SINKS + length] for tensor in self.calls[:2])
            made = quantize_segments(keys.clone(), ENERGIES[0], known.layout, known.rounding)
            for name in EACH:
                found, of_tokens = kept[name][row], name in ("codes", "scales")
                found = found[..., :length] if of_tokens else found[:, : len(segment_spans(length))]
                assert torch.equal(found, made[name]), f"{name} of row {row}"
            for name, mean in average_channels(made, known.layout, length).items():
                assert torch.equal(kept[name][row], mean)
            keys, values = keys.double(), values.double()
            mean_key, mean = (tokens.mean(dim=1, keepdim=True) for tokens in (keys, values))
            covariance = (values - mean).mT @ (keys - mean_key) / length
            # float32 sums of thousands of values of about 1
            for found, true in (
                (known.mean_key, mean_key[:, 0]),
                (kept["mean_value"], mean[:, 0]),
                (known.covariance, covariance),
            ):
                torch.testing.assert_close(found[row].double(), true, rtol=1e-5, atol=1e-5)
            units = kept["slope_units"][row].double().unsqueeze(-2)
            assert ((slopes_of(kept["slopes"][row]) * units - covariance).abs() <= 0.5 * units + 2e-5).all()


def at_once(scene: Scene) -> None:
    scene.read(scene.calls)


def in_chunks(scene: Scene) -> None:
    """Shorter than what makes a sketch, then of several segments, then of less than one."""
    scene.read(scene.calls, 600, 1000, 300, 77)


def token_by_token(scene: Scene) -> None:
    """Across the place where a segment closes."""
    scene.read(scene.calls, 1700, *[1] * 200)
    bulk = scene.cache.layers[0].store.bulk.lengths[0]
    assert len(segment_spans(bulk)) > len(segment_spans(1700 - SINKS - WINDOW))


def cropped(scene: Scene) -> None:
    """What was there longer, and went another way."""
    scene.read(scene.calls)
    scene.read(Inputs(6)(900))
    scene.cache.crop(-900)
    scene.check()
    scene.cache.crop(-700)
    scene.read(tuple(tensor[:, :, TOKENS - 700 :] for tensor in scene.calls))


def cropped_below_what_makes_a_sketch(scene: Scene) -> None:
    scene.read(scene.calls)
    scene.cache.crop(-(TOKENS - 500))
    assert scene.cache.layers[0].store.sketch.lengths == [0, 0]
    scene.read(tuple(tensor[:, :, 500:] for tensor in scene.calls))


def reordered(scene: Scene) -> None:
    """A row twice, the other not, and on from there."""
    scene.read(tuple(tensor[:, :, :1500] for tensor in scene.calls))
    scene.cache.reorder_cache(torch.tensor([1, 1]))
    scene.calls = tuple(torch.cat([t[[1, 1], :, :1500], t[:, :, 1500:]], dim=2) for t in scene.calls)
    scene.read(tuple(tensor[:, :, 1500:] for tensor in scene.calls))


def selected(scene: Scene) -> None:
    """From more rows."""
    more = Inputs(7)(1400)
    joined = tuple(torch.cat([other[:1], ours[:, :, :1400]]) for other, ours in zip(more, scene.calls, strict=True))
    scene.read(joined)
    scene.cache.batch_select_indices(torch.tensor([1, 2]))
    scene.read(tuple(tensor[:, :, 1400:] for tensor in scene.calls))


def copied(scene: Scene) -> None:
    """While the other goes another way."""
    scene.read(tuple(tensor[:, :, :1500] for tensor in scene.calls))
    first, twin = scene.cache, copy.deepcopy(scene.cache)
    scene.read(Inputs(6)(900))
    assert first.get_seq_length() == 2400
    scene.drive(twin)
    scene.read(tuple(tensor[:, :, 1500:] for tensor in scene.calls))


def loaded(scene: Scene) -> None:
    """Energies that a cache went by are not known when it is loaded: it goes on by them, also after a crop."""
    scene.read(tuple(tensor[:, :, :1900] for tensor in scene.calls))
    scene.cache.save(scene.folder / "cache.safetensors")
    scene.drive(QAdACache.load(scene.folder / "cache.safetensors", config=scene.config))
    assert scene.cache.options.query_energies is None
    scene.check()
    scene.cache.crop(-400)
    scene.read(tuple(tensor[:, :, 1500:] for tensor in scene.calls))


def forked(scene: Scene) -> None:
    """From one that had no sketch, or one without energies."""
    scene.cache._shared.options = replace(scene.cache.options, token_threshold=0.0)
    scene.read(tuple(tensor[:, :, :1900] for tensor in scene.calls))
    for energies in (None, ENERGIES):
        scene.cache._shared.options = replace(scene.cache.options, token_threshold=5.0, query_energies=energies)
        scene.cache.layers[0].apply_options()
    scene.check()
    scene.read(tuple(tensor[:, :, 1900:] for tensor in scene.calls))


@pytest.mark.parametrize("offloading", [False, True])
@pytest.mark.parametrize(
    "way",
    [
        at_once,
        in_chunks,
        token_by_token,
        cropped,
        cropped_below_what_makes_a_sketch,
        reordered,
        selected,
        copied,
        loaded,
        forked,
    ],
)
def test_follows_from_tokens_alone(way: Callable[[Scene], None], offloading: bool, tmp_path: Path) -> None:
    if offloading:
        with accelerator():
            scene = Scene(tmp_path)
            assert scene.cache.options.offloading
            way(scene)
            scene.check()
        return
    scene = Scene(tmp_path)
    way(scene)
    scene.check()


def test_energies_and_keys_matter(tmp_path: Path) -> None:
    """What the comparisons above go by is of these, and not the same of all."""
    scene = Scene(tmp_path)
    keys = scene.calls[0][0]
    one, other = (quantize_segments(keys, energies, Layout.from_bits(16, 2)) for energies in (ENERGIES[0], None))
    assert not torch.equal(one["weights"], other["weights"])
    assert (one["codes"] != other["codes"]).float().mean() > 0.05
    assert not torch.equal(one["centres"][:, 0], one["centres"][:, 1])
