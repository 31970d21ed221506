"""A cache's file that is damaged, or is another model's, says so; so does what is no such file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from models import exact, generate, prompt, tiny
from safetensors.torch import load_file, save_file

from qada_cache import KeyMoments, QAdACache, StaticHeads
from qada_cache.cache_file import KIND
from qada_cache.files import tensor_file


def split(path: Path) -> tuple[dict[str, Any], bytes]:
    """A safetensors file's own header (JSON) and its tensor data."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def join(path: Path, header: dict[str, Any], data: bytes) -> None:
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def flip_a_byte(path: Path) -> None:
    header, data = split(path)
    join(path, header, data[:100] + bytes([data[100] ^ 1]) + data[101:])


def flip_the_last_byte(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 0x80]))


def swap_tensors(path: Path) -> None:
    """Swap two tensors of one shape in a file's header."""
    header, data = split(path)
    first, second = next(
        (one, other) for one in header for other in header
        if one < other and "shape" in header[one] and header[one]["shape"] == header[other].get("shape")
    )  # fmt: skip
    header[first], header[second] = header[second], header[first]
    join(path, header, data)


def with_tensor(path: Path) -> None:
    header, _ = split(path)
    save_file(load_file(path) | {"extra": torch.zeros(1)}, path, metadata=header["__metadata__"])


def says(**fields: str | None) -> Callable[[Path], None]:
    """Other things of itself; None: nothing."""

    def edit(path: Path) -> None:
        header, data = split(path)
        about = {**header["__metadata__"], **fields}
        header["__metadata__"] = {name: value for name, value in about.items() if value is not None}
        join(path, header, data)

    return edit


def cut(keep: float) -> Callable[[Path], Any]:
    return lambda path: path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])


TRUNCATED, ALTERED = (
    "not a safetensors file, or is truncated",
    r"was altered after it was written \(checksum mismatch\)",
)
DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (cut(0.9), TRUNCATED),
    "truncated in the header": (cut(0.001), TRUNCATED),
    "empty": (lambda path: path.write_bytes(b""), TRUNCATED),
    "text": (lambda path: path.write_text("hello " * 50), TRUNCATED),
    "extra bytes": (lambda path: path.write_bytes(path.read_bytes() + b"\0" * 8), "not a safetensors file"),
    "a byte": (flip_a_byte, ALTERED),
    "the last byte": (flip_the_last_byte, ALTERED),
    "names swapped": (swap_tensors, ALTERED),
    "another tensor": (with_tensor, ALTERED),
    "another state": (says(state='{"tokens": 5, "model_type": "llama", "prompt": "x"}'), ALTERED),
    "no state": (says(state=None), ALTERED),
    "an empty checksum": (says(sha256=""), ALTERED),
    "no checksum": (says(sha256=None), ALTERED),
    "older": (says(version="3"), "has format version '3', this qada-cache reads 4: make it again"),
    "newer": (says(version="5"), "has format version '5', this qada-cache reads 4: upgrade"),
    "of no version": (says(version="one"), "format version 'one'"),
    "of another kind": (says(kind="qada-other"), r"not a qada-\w+ file \(it says 'qada-other'\)"),
    "foreign": (lambda path: save_file({"x": torch.ones(2)}, path), r"is not a qada-\w+ file .*nothing about what it"),
}


@pytest.mark.parametrize(
    ("kind", "damage"),
    [*(("cache", damage) for damage in DAMAGE), *(("moments", damage) for damage in DAMAGE if "swapped" not in damage)],
)
def test_damaged_files(kind: str, damage: str, saved: Path) -> None:
    act, message = DAMAGE[damage]
    model = tiny()
    if kind == "moments":
        KeyMoments.collect(model, prompt=prompt(50)[0]).save(saved)
    act(saved)
    with pytest.raises(ValueError, match=f"{saved} .*{message}"):
        KeyMoments.load(saved) if kind == "moments" else QAdACache.load(saved, model)
    assert model.config._attn_implementation == "sdpa"


def test_another_format_of_any_kind(tmp_path: Path) -> None:
    path = tmp_path / "heads"
    StaticHeads(torch.eye(2, dtype=torch.bool)).save(path)
    says(version="3")(path)
    with pytest.raises(ValueError, match="has format version '3', this qada-cache reads 4: make it again"):
        StaticHeads.load(path)


def test_the_wrong_file(saved: Path, tmp_path: Path) -> None:
    model = tiny()
    with pytest.raises(FileNotFoundError, match=r"no qada-cache file at .*missing"):
        QAdACache.load(tmp_path / "missing", model)
    with pytest.raises(FileNotFoundError, match="no qada-cache file at"):
        QAdACache.load(tmp_path, model)  # a folder
    with pytest.raises(ValueError, match=r"not a qada-moments file \(it says 'qada-cache'\)"):
        KeyMoments.load(saved)
    KeyMoments.collect(model, prompt=prompt(50)[0]).save(tmp_path / "moments")
    with pytest.raises(ValueError, match=r"not a qada-cache file \(it says 'qada-moments'\)"):
        QAdACache.load(tmp_path / "moments", model)
    with pytest.raises(TypeError, match="either a model or config"):
        QAdACache.load(saved)
    with pytest.raises(TypeError, match="either a model or config"):
        QAdACache.load(saved, model, config=model.config)
    assert model.config._attn_implementation == "sdpa"


CHANGES = {
    "num_hidden_layers": {"num_hidden_layers": 3},
    "num_attention_heads": {"num_attention_heads": 8},
    "num_key_value_heads": {"num_key_value_heads": 4},
    "hidden_size": {"hidden_size": 64},
    "vocab_size": {"vocab_size": 98},
    "rope_parameters": {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
}


@pytest.mark.parametrize("name", CHANGES)
def test_another_models_file(name: str, saved: Path) -> None:
    other = tiny(**CHANGES[name])
    with pytest.raises(ValueError, match=f"{saved.name} was saved for another model: its ({name}|head_dim) is"):
        QAdACache.load(saved, other)
    with pytest.raises(ValueError, match=r"another model: its model_type is 'llama', this model's (is )?'qwen2'"):
        QAdACache.load(saved, config=tiny("qwen2").config)
    assert other.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    "change", [{"sliding_window": 24}, {"layer_types": ["full_attention", "sliding_attention"]}], ids=str
)
def test_another_hybrid_models_file(change: dict[str, Any], tmp_path: Path) -> None:
    """Other windows, or the same layers in another order: keys that mean nothing to this model."""
    model = tiny("gemma3")
    cache = exact(model)
    generate(model, prompt(90)[0], cache)
    cache.save(tmp_path / "cache.safetensors")
    with pytest.raises(ValueError, match=f"was saved for another model: its {next(iter(change))} is"):
        QAdACache.load(tmp_path / "cache.safetensors", tiny("gemma3", **change))


def test_other_weights_of_the_same_config(saved: Path, tmp_path: Path) -> None:
    other, changed = tiny(seed=1), tiny()
    with torch.no_grad():
        changed.model.layers[1].mlp.up_proj.weight.add_(0.01)
    another = "was saved for another model: its config is this model's, and its weights are not"
    lower = "was saved for a model in float32, this model is in bfloat16"
    for model, message in ((other, another), (changed, another), (tiny(dtype=torch.bfloat16), lower)):
        with pytest.raises(ValueError, match=f"{saved.name} {message}"):
            QAdACache.load(saved, model)
        assert model.config._attn_implementation == "sdpa"
    QAdACache.load(saved, tiny())
    cache = QAdACache.load(saved, config=other.config)  # which says nothing of weights, and neither will its file
    cache.save(tmp_path / "unknown")
    QAdACache.load(tmp_path / "unknown", tiny())


def test_weights_kept_elsewhere_are_not_compared(saved: Path) -> None:
    """Offloaded weights, as accelerate has them of a model that exceeds the memory, are not compared with a file's."""
    for seed in (0, 1):
        model = tiny(seed=seed)
        cpu_offload(model.model.layers[0], torch.device("cpu"))
        assert model.model.layers[0].mlp.up_proj.weight.is_meta
        if seed == 0:
            QAdACache.load(saved, model)
        else:
            with pytest.raises(ValueError, match="its config is this model's, and its weights are not"):
                QAdACache.load(saved, model)


def test_layers_of_another_version(saved: Path) -> None:
    """Versions of transformers make caches of other numbers of layers for one model (Gemma 4)."""
    tensors, state = tensor_file.read(saved, KIND)
    tensor_file.write(saved, KIND, tensors, {**state, "layers": state["layers"] * 2})
    with pytest.raises(ValueError, match=f"{saved} cannot be loaded: it has 4 layers, and .* makes 2: save it again"):
        QAdACache.load(saved, tiny())
