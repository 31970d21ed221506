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
        return logits_of(generate(self.model, self.text, cache, tokens=4, attention_mask=self.mask))

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


RARE = "frozen", "dense", "static", "no bulk"


@pytest.fixture(
    scope="module",
    params=[pytest.param(each, id=name, marks=[pytest.mark.slow] * (name in RARE)) for name, each in SCENES.items()],
)
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
    """The places of the numbers in nested lists and dicts, as tuples of keys and indices."""
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
    """Every number of the last layer of each kind is changed alone; other layers of its kind have the same numbers."""
    layers = scene.state["layers"]
    fields = {tuple(name for name, _ in layer["dict"]): index for index, layer in enumerate(layers)}
    for place, at in enumerate(at for at in places(layers) if at[0] in fields.values()):
        number = found(scene.state["layers"], at)
        for other in {number + 1, max(0, number - 1), (-1 - number, 10**30)[place % 2]} - {number}:
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
    scene.check(scene.tensors, {**scene.state, "layers": [scene.state["layers"][0], {"dict": []}]})
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


KINDS: dict[str, Any] = {
    "a number": 3,
    "a string": "x",
    "a flag": True,
    "nothing": None,
    "a list": [1],
    "a dict": {"dict": [[0, 1]]},
    "a tensor": {"tensor": "forged", "dtype": "float32", "shape": [1, 2, 3, 8]},
    "ints": {"tensor": "forged ints", "dtype": "int64", "shape": [1, 2, 3, 8]},
    "a dtype": {"dtype": "float32"},
    "a function of torch": {"dtype": "zeros_like"},
    "a device": {"device": "cpu"},
    "another kind": {"other": "cpu"},
}
FORGED = {"forged": torch.ones(1, 2, 3, 8), "forged ints": torch.ones(1, 2, 3, 8, dtype=torch.int64)}
of_hybrids = pytest.mark.parametrize(
    "scene", [SCENES["sliding"], SCENES["linear"]], ids=["sliding", "linear"], indirect=True
)


def with_fields(scene: Scene, fields: list) -> dict[str, Any]:
    """The state of a file whose first layer has these."""
    return {**scene.state, "layers": [{"dict": fields}, *scene.state["layers"][1:]]}


def refuses(scene: Scene, fields: list) -> None:
    tensor_file.write(scene.path, KIND, scene.tensors | FORGED, with_fields(scene, fields))
    with pytest.raises(ValueError, match=re.escape(str(scene.path))):
        QAdACache.load(scene.path, scene.model)


@of_hybrids
def test_names_that_layers_do_not_have(scene: Scene) -> None:
    """Methods, properties and constants of transformers' layers, dunders, and names of nothing."""
    stock, fields = QAdACache(scene.model, moments="current").layers[0], scene.state["layers"][0]["dict"]
    names = [*dir(stock), "other", "other_device", "", "layers"]
    for at, name in enumerate(name for name in names if name not in dict(fields)):
        for kind in ("a function of torch", [*KINDS][at % len(KINDS)]):
            refuses(scene, [*fields, [name, KINDS[kind]]])


@of_hybrids
def test_fields_of_layers_of_another_kind(scene: Scene) -> None:
    """Every attribute of transformers' layers, and every entry of their dicts, is replaced by values of each kind."""
    fields = scene.state["layers"][0]["dict"]
    for at, (name, held) in enumerate(fields):
        before, after = fields[:at], fields[at + 1 :]
        if name != "dtype":  # which sliding layers of newer transformers have no longer
            refuses(scene, before + after)
        for kind, value in KINDS.items():
            if kind == "a flag" and name == "record_past":
                continue  # which assisted decoding sets, and older transformers cannot go on with
            scene.check(scene.tensors | FORGED, with_fields(scene, [*before, [name, value], *after]))
            for place, _ in held["dict"] if isinstance(held, dict) and "dict" in held else ():
                if kind == "a tensor" and name.endswith("_states"):
                    continue  # whose shape the model alone knows
                forged = {"dict": [[place, value]]}  # these have one state
                scene.check(scene.tensors | FORGED, with_fields(scene, [*before, [name, forged], *after]))


@pytest.mark.parametrize("scene", [SCENES["sketched"]], ids=["sketched"], indirect=True)
def test_dtypes_and_devices_that_are_none(scene: Scene) -> None:
    """A dtype or device whose text names none is refused, other names of torch included."""
    fields = scene.state["layers"][0]["dict"]
    for name in ("load", "Tensor", "cpu", "nn", "float33", "__doc__", "", None, 3, [], {}):
        refuses(scene, [*fields, ["unknown", {"dtype": name}]])


@pytest.mark.parametrize("scene", [SCENES["sketched"]], ids=["sketched"], indirect=True)
def test_what_a_file_may_say_of_itself(scene: Scene) -> None:
    """Names and kinds of the parts of a file, and of its options, which become keywords."""
    for part in scene.state:
        for value in (3, "x", [], [3], {}, {"x": 3}, True):
            scene.check(scene.tensors, {**scene.state, part: value})
    for name in ("cuda_graph", "kernels", "model", "config", "criterion", "moments", "other"):
        for value in (True, "torch", None):
            state = {**scene.state, "options": {**scene.state["options"], name: value}}
            tensor_file.write(scene.path, KIND, scene.tensors, state)
            with pytest.raises(ValueError, match=f"{re.escape(str(scene.path))} cannot be loaded: .*{name}"):
                QAdACache.load(scene.path, scene.model)
    for name in scene.state["options"]:
        options = {other: value for other, value in scene.state["options"].items() if other != name}
        scene.check(scene.tensors, {**scene.state, "options": options})
    deep: Any = 0
    for _ in range(400):
        deep = [deep]
    scene.check(scene.tensors, {**scene.state, "layers": [deep, deep]})


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
    """Bytes of heads' copies on the device, which older files count apart, are added to the bytes read."""
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
