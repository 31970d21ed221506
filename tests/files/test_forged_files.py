"""A cache's file whose numbers were altered and whose checksum was made anew: refused by name, or the same tokens.

The checksum is no key. So nothing that a file says of itself is believed before it agrees with everything else there.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import SMALL, generate, logits_of, prompt, tiny
from torch import Tensor
from transformers import PreTrainedModel

from qada_cache import QAdACache, StaticHeads
from qada_cache.cache_file import KIND
from qada_cache.files import tensor_file

SCENES: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "sketched": ("llama", (1100,), {}),
    "coded": ("llama", (1150,), {"bulk_bits": 8}),
    "padded": ("llama", (150, 61), {"audit_every": 3, "moments": "current+random-tokens"}),
    "frozen": ("llama", (150, 61), {"update_moments": False}),
    "dense": ("llama", (150,), {"criterion": "dense"}),
    "static": ("llama", (150,), {"criterion": StaticHeads(torch.tensor([[True, False], [False, True]]))}),
    "no bulk": ("llama", (10,), {}),
    "sliding": ("gemma3", (90, 40), {}),
    "linear": ("qwen3_next", (90,), {}),
}
NUMBERS = (-1, 0, 1, 2, 7, 127, 255, 257, 10**6, 2**31, 2**63, 10**30)


class Scene:
    """A file, what it holds, and the logits that its cache goes on with for a text."""

    def __init__(self, model: PreTrainedModel, path: Path, text: Tensor, mask: Tensor) -> None:
        self.model, self.path, self.text, self.mask = model, path, text, mask
        self.tensors, self.state = tensor_file.read(path, KIND)
        self.wanted = self.goes_on()

    def goes_on(self) -> Tensor:
        cache = QAdACache.load(self.path, self.model)
        cache.stats()
        return logits_of(generate(self.model, self.text, cache, tokens=6, attention_mask=self.mask))

    def check(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        """The file with these in it is refused by name, or the cache goes on as before."""
        tensor_file.write(self.path, KIND, tensors, state)
        try:
            found = self.goes_on()
        except ValueError as error:
            with pytest.raises(ValueError, match=re.escape(str(self.path))):
                raise error
        else:
            assert torch.equal(found, self.wanted)


@pytest.fixture(scope="module", params=SCENES.values(), ids=SCENES)
def scene(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    family, lengths, options = request.param
    path, model, (ids, mask) = tmp_path_factory.mktemp("forged") / "file", tiny(family), prompt(*lengths)
    cache = QAdACache(model, **{"threshold": 0.12, "moments": "current", **SMALL, **options})
    text = generate(model, ids, cache, tokens=12, attention_mask=mask).sequences
    text = torch.cat([text, prompt(*[9] * len(ids), seed=4)[0]], dim=1)
    mask = torch.cat([mask, torch.ones(len(ids), text.shape[1] - mask.shape[1], dtype=torch.long)], dim=1)
    cache.save(path)
    return Scene(model, path, text, mask)


def places(value: Any, at: tuple = ()) -> Iterator[tuple]:
    """Where the numbers are."""
    if isinstance(value, (list, dict)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(item, (*at, key))
    elif type(value) in (int, float):
        yield at


def found(state: Any, at: tuple) -> Any:
    for key in at:
        state = state[key]
    return state


def altered(state: Any, at: tuple, number: Any) -> Any:
    changed = copy.deepcopy(state)
    found(changed, at[:-1])[at[-1]] = number
    return changed


def test_every_number_alone(scene: Scene) -> None:
    for at in places(scene.state["layers"]):
        number = found(scene.state["layers"], at)
        for other in {number + 1, max(0, number - 1), -1 - number, 10**30} - {number}:
            scene.check(scene.tensors, {**scene.state, "layers": altered(scene.state["layers"], at, other)})


def test_a_number_in_every_layer(scene: Scene) -> None:
    """All that is called so, as a reader would find who compares layers with one another alone."""
    layers = scene.state["layers"]
    named = [(layers[at[0]]["dict"][at[2]][0], at) for at in places(layers)]
    for name in {name for name, _ in named}:
        for more in (1, -1, 300):
            changed = layers
            for at in (at for other, at in named if other == name):
                changed = altered(changed, at, found(layers, at) + more)
            scene.check(scene.tensors, {**scene.state, "layers": changed})


@pytest.mark.parametrize("scene", [SCENES["sketched"]], ids=["sketched"], indirect=True)
def test_fields_that_are_missing_or_of_another_kind(scene: Scene) -> None:
    for field in range(len(scene.state["layers"][0]["dict"])):
        for forged in ([], [None], [[1, 2]]):
            state = copy.deepcopy(scene.state)
            fields = state["layers"][0]["dict"]
            fields[field : field + 1] = [[fields[field][0], value] for value in forged]
            scene.check(scene.tensors, state)
    for name in scene.state:
        scene.check(scene.tensors, {key: value for key, value in scene.state.items() if key != name})
    none: Any = []
    scene.check(scene.tensors, none)
    for name in scene.tensors:
        scene.check({key: value for key, value in scene.tensors.items() if key != name}, scene.state)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=st.booleans(),
    place=st.integers(0, 2**16),
    other=st.integers(0, 2**16),
    number=st.sampled_from(NUMBERS) | st.floats(allow_nan=False) | st.booleans(),
)
def test_numbers_and_shapes(scene: Scene, shape: bool, place: int, other: int, number: float) -> None:
    """Any one of them becomes any other."""
    layers, tensors, numbered = scene.state["layers"], dict(scene.tensors), list(places(scene.state["layers"]))
    if shape or not numbered:
        forged = sorted(tensors.keys() - {"static_heads"})  # half a table by query heads is one by KV heads
        name = forged[place % len(forged)]
        others = other_shapes(tensors[name])
        tensors[name] = others[other % len(others)]
    else:
        layers = altered(layers, numbered[place % len(numbered)], number)
    scene.check(tensors, {**scene.state, "layers": layers})


def other_shapes(tensor: Tensor) -> list[Tensor]:
    """The same values in other shapes, and fewer or more of them."""
    found = [tensor.reshape(-1), tensor[None], tensor.double()]
    for axis in range(tensor.dim()):
        found += [torch.cat([tensor, tensor], dim=axis), tensor.narrow(axis, 0, tensor.shape[axis] // 2)]
        found += [tensor.transpose(axis, other).contiguous() for other in range(axis)]
    return [other for other in found if (other.shape, other.dtype) != (tensor.shape, tensor.dtype)]


OPTIONS = {
    "threshold": (-1, 2, "0.9", None),
    "sink_tokens": (-1, 0, 3, 5, 10**30, 4.0),
    "local_tokens": (-1, 0, 3, 2000, 10**30),
    "sketch_bits": (0, 5, None),
    "bulk_bits": (4, 8, 5, 8.0, True),
    "token_threshold": (-1, float("inf"), None),
    "audit_every": (-1, 1.5),
    "device_budget": (-1, 2.5),
    "group_rule": ("none",),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_that_are_none_of_this_file(name: str, saved: Path) -> None:
    tensors, state = tensor_file.read(saved, KIND)
    for value in OPTIONS[name]:
        state["options"] = {**state["options"], name: value}
        tensor_file.write(saved, KIND, tensors, state)
        with pytest.raises(ValueError, match=f"{saved.name} cannot be loaded: "):
            QAdACache.load(saved, tiny())


def test_files_of_before_have_more_bytes_that_were_read(saved: Path) -> None:
    """Of copies of heads on the device, which were counted apart."""
    tensors, state = tensor_file.read(saved, KIND)
    read = QAdACache.load(saved, tiny()).stats().bulk_read_bytes
    for count in (10**6, -1):
        for layer in state["layers"]:
            layer["dict"] = [*(pair for pair in layer["dict"] if pair[0] != "resident_hit_bytes")]
            layer["dict"].append(["resident_hit_bytes", count])
        tensor_file.write(saved, KIND, tensors, state)
        if count > 0:
            assert QAdACache.load(saved, tiny()).stats().bulk_read_bytes == read + count * len(state["layers"])
    with pytest.raises(ValueError, match="resident_hit_bytes of -1, which should be a count"):
        QAdACache.load(saved, tiny())


def test_moments_that_are_none(tmp_path: Path) -> None:
    """Of another prompt, in a cache's file."""
    model, path = tiny(), tmp_path / "file"
    cache = QAdACache(model, moments="random-tokens", **SMALL)
    cache.save(path)
    tensors, state = tensor_file.read(path, KIND)
    layout = state["moments"]["rotations"][0][0]
    other: list[dict[str, Any]] = [{"rotations": [[layout, place]] * 2} for place in (7, -1)]
    for changed in [*other, {"rotations": []}, {"lengths": [5]}]:
        tensor_file.write(path, KIND, tensors, {**state, "moments": {**state["moments"], **changed}})
        with pytest.raises(ValueError, match="file cannot be loaded: "):
            QAdACache.load(path, model)
