"""A row's sketch follows from its tokens alone, to the bit, however they came and whatever other tokens there were."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from layer_scene import ENERGIES, SINKS, TOKENS, WAYS, LayerScene
from sketch_reference import segment_spans, slopes_of
from stand_in import accelerator

from qada_cache import QAdACache, StaticHeads
from qada_cache.sketch import Layout
from qada_cache.sketch.codec import average_channels, quantize_segments

EACH = ("codes", "scales", "units", "centres", "order", "weights", "mean_squares")  # of tokens or segments


class Scene(LayerScene):
    """A scene with a cache whose heads all select tokens."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, criterion=StaticHeads(torch.ones(1, 4, dtype=torch.bool)))

    def check(self) -> None:
        """Assert that rows have the sketch of the same tokens when they are coded alone and at once."""
        known, bulk = self.cache.layers[0].store.sketch, self.cache.layers[0].store.bulk
        kept = known.tensors.to_tensors()
        for row, length in enumerate(bulk.lengths):
            assert known.lengths[row] == length > 1024
            keys, values = (tensor[row, :, SINKS : SINKS + length] for tensor in self.calls[:2])
            made = {name: part[0] for name, part in known.code_keys(keys[None].clone()).items()}
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


def cropped(scene: LayerScene) -> None:
    """Other tokens are appended and cropped, and then some of its own, which are read again."""
    scene.read_own()
    scene.read(scene.draw(6, 900))
    scene.cache.crop(-900)
    scene.check()
    scene.cache.crop(-700)
    scene.read_own(TOKENS - 700)


def cropped_below_what_makes_a_sketch(scene: LayerScene) -> None:
    scene.read_own()
    scene.cache.crop(-(TOKENS - 500))
    assert scene.cache.layers[0].store.sketch.lengths == [0, 0]
    scene.read_own(500)


def loaded_and_cropped(scene: LayerScene) -> None:
    """A loaded cache, whose options have no query energies, is cropped and goes on."""
    scene.read_own(0, 1900)
    scene.cache.save(scene.folder / "cache.safetensors")
    scene.drive(QAdACache.load(scene.folder / "cache.safetensors", config=scene.config))
    scene.cache.crop(-400)
    scene.read_own(1500)


def forked(scene: LayerScene) -> None:
    """Options change, as in a fork: from no sketch to one without energies, then to one with energies."""
    scene.cache._shared.options = replace(scene.cache.options, token_threshold=0.0)
    scene.read_own(0, 1900)
    for energies in (None, ENERGIES):
        scene.cache._shared.options = replace(scene.cache.options, token_threshold=5.0, query_energies=energies)
        scene.cache.layers[0].apply_options()
    scene.check()
    scene.read_own(1900)


OWN = [cropped, cropped_below_what_makes_a_sketch, loaded_and_cropped, forked]


@pytest.mark.parametrize("offloading", [False, True])
@pytest.mark.parametrize("way", WAYS + OWN)
def test_follows_from_tokens_alone(way: Callable[[LayerScene], None], offloading: bool, tmp_path: Path) -> None:
    with accelerator() if offloading else nullcontext():
        scene = Scene(tmp_path)
        way(scene)
        scene.check()


def test_energies_and_keys_matter(tmp_path: Path) -> None:
    """Sketches differ between energies, and between segments, so that the comparisons above can fail."""
    scene = Scene(tmp_path)
    keys = scene.calls[0][0]
    one, other = (quantize_segments(keys, energies, Layout.from_bits(16, 2)) for energies in (ENERGIES[0], None))
    assert not torch.equal(one["weights"], other["weights"])
    assert (one["codes"] != other["codes"]).float().mean() > 0.05
    assert not torch.equal(one["centres"][:, 0], one["centres"][:, 1])
