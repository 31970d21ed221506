"""Saved, loaded, continued equals continued; and a file that is not what it should be says so."""

from __future__ import annotations

import copy
import errno
import io
import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import SMALL, exact, generate, limited_file_size, logits_of, prompt, tiny
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from qada_cache import KeyMoments, QAdACache, StaticHeads
from qada_cache.files import private, tensor_file

FAMILIES = ["llama", "gemma3", "qwen3_next", "mistral_sliding"]
LENGTHS = {"one row": (150,), "padded": (150, 61, 9), "no bulk": (10,)}
TABLES = ("local_share", "kv_local_share")
COUNTERS = ("layers", "steps", "decisions", "tokens", "pulled_bytes", "streamed_bytes")


def adaptive(model: PreTrainedModel, **options: Any) -> QAdACache:
    return QAdACache(model, **{"threshold": 0.12, "moments": "current", **SMALL, **options})


def assert_continues_alike(
    model: PreTrainedModel, cache: QAdACache, loaded: QAdACache, ids: Tensor, mask: Tensor
) -> None:
    """Two turns on, one short, one long: the same bits, and the same counts from the beginning."""
    texts, masks = [ids, ids], mask
    for length in (6, 40):
        turn = prompt(*[length] * len(ids), seed=length)[0]
        texts = [torch.cat([text, turn], dim=1) for text in texts]
        masks = torch.cat([masks, torch.ones(len(ids), texts[0].shape[1] - masks.shape[1], dtype=torch.long)], dim=1)
        outputs = [
            generate(model, text, used, tokens=8, attention_mask=masks)
            for text, used in zip(texts, (cache, loaded), strict=True)
        ]
        texts = [output.sequences for output in outputs]
        assert torch.equal(texts[0], texts[1])
        assert torch.equal(logits_of(outputs[0]), logits_of(outputs[1]))
        ours, theirs = cache.stats(), loaded.stats()
        for name in COUNTERS:
            assert getattr(ours, name) == getattr(theirs, name), name
        for name in TABLES:
            assert torch.equal(getattr(ours, name).nan_to_num(-1), getattr(theirs, name).nan_to_num(-1)), name


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("family", FAMILIES)
def test_continue(family: str, lengths: str, tmp_path: Path) -> None:
    model, (ids, mask) = tiny(family), prompt(*LENGTHS[lengths])
    cache = adaptive(model)
    text = generate(model, ids, cache, tokens=12, attention_mask=mask).sequences
    cache.save(tmp_path / "cache.safetensors")
    loaded = QAdACache.load(tmp_path / "cache.safetensors", model)
    assert repr(loaded) == repr(cache)
    assert [type(layer) for layer in loaded.layers] == [type(layer) for layer in cache.layers]
    assert_continues_alike(model, cache, loaded, text, mask)


OPTIONS: dict[str, dict[str, Any]] = {
    "oracle": {"criterion": "oracle"},
    "dense": {"criterion": "dense", "offloading": False},
    "frozen moments": {"update_moments": False},
    "other sizes": {"threshold": 0.3, "sink_tokens": 0, "local_tokens": 33},
    "group rule": {"group_rule": "head"},
    "two prompts": {"moments": "current+random-tokens"},
    "query heads": {"criterion": StaticHeads(torch.tensor([[True, False, False, True], [False, True, False, False]]))},
    "kv heads": {"criterion": StaticHeads(torch.tensor([[True, False], [False, True]]))},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_continue_with_options(options: str, tmp_path: Path) -> None:
    model, (ids, mask) = tiny(), prompt(150, 61)
    cache = adaptive(model, **OPTIONS[options])
    text = generate(model, ids, cache, tokens=12, attention_mask=mask).sequences
    cache.save(str(tmp_path / "cache"))  # a str, and no suffix
    loaded = QAdACache.load(str(tmp_path / "cache"), config=model.config)
    assert repr(loaded) == repr(cache)
    assert_continues_alike(model, cache, loaded, text, mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_continue_with_key_moments(dtype: torch.dtype, tmp_path: Path) -> None:
    model, ids = tiny(dtype=dtype), prompt(150)[0]
    KeyMoments.collect(model, prompt=prompt(180, seed=8)[0]).save(tmp_path / "moments.safetensors")
    cache = adaptive(model, moments=tmp_path / "moments.safetensors")
    text = generate(model, ids, cache, tokens=12).sequences
    cache.save(tmp_path / "cache.safetensors")
    (tmp_path / "moments.safetensors").unlink()  # the cache's file holds them
    loaded = QAdACache.load(tmp_path / "cache.safetensors", model)
    assert "moments of custom" in repr(loaded)
    assert 0.0 < cache.stats().sparsity < 1.0
    assert_continues_alike(model, cache, loaded, text, torch.ones_like(ids))


@pytest.mark.parametrize("saving", [True, False])
@pytest.mark.parametrize("loading", [True, False])
def test_inference_mode(saving: bool, loading: bool, tmp_path: Path) -> None:
    model, ids = tiny(), prompt(150)[0]
    cache = adaptive(model)
    with torch.inference_mode(saving):
        text = generate(model, ids, cache, tokens=12).sequences.clone()
        cache.save(tmp_path / "cache.safetensors")
    with torch.inference_mode(loading):
        loaded = QAdACache.load(tmp_path / "cache.safetensors", model)
    assert_continues_alike(model, cache, loaded, text.clone(), torch.ones_like(ids))


def test_empty_cache(tmp_path: Path) -> None:
    model, ids = tiny(), prompt(150)[0]
    adaptive(model).save(tmp_path / "cache.safetensors")
    loaded = QAdACache.load(tmp_path / "cache.safetensors", model)
    assert loaded.get_seq_length() == 0
    assert torch.equal(logits_of(generate(model, ids, loaded)), logits_of(generate(model, ids, adaptive(model))))


def test_loading_switches_a_fresh_model_on(tmp_path: Path) -> None:
    """Another process: the same weights, and no cache built for them before."""
    model, ids = tiny(), prompt(150)[0]
    cache, fresh = adaptive(model), tiny()
    text = generate(model, ids, cache).sequences
    cache.save(tmp_path / "cache.safetensors")
    loaded = QAdACache.load(tmp_path / "cache.safetensors", fresh)
    outputs = [generate(*pair) for pair in ((model, text, cache), (fresh, text, loaded))]
    assert torch.equal(logits_of(outputs[0]), logits_of(outputs[1]))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model = tiny()
    cache = adaptive(model)
    generate(model, prompt(150)[0], cache)
    cache.save(tmp_path / "cache.safetensors")
    return tmp_path / "cache.safetensors"


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


def edit_state(path: Path) -> None:
    header, data = split(path)
    header["__metadata__"]["state"] = header["__metadata__"]["state"].replace('"threshold": 0.12', '"threshold": 0.13')
    join(path, header, data)


def swap_tensors(path: Path) -> None:
    header, data = split(path)
    first, second = [name for name in sorted(header) if header[name].get("shape") == [1, 2, 8]][:2]
    header[first], header[second] = header[second], header[first]
    join(path, header, data)


def drop_checksum(path: Path) -> None:
    header, data = split(path)
    del header["__metadata__"]["sha256"]
    join(path, header, data)


def drop_state(path: Path) -> None:
    header, data = split(path)
    del header["__metadata__"]["state"]
    join(path, header, data)


def newer_version(path: Path) -> None:
    header, data = split(path)
    header["__metadata__"]["version"] = str(tensor_file.FORMAT_VERSION + 1)
    join(path, header, data)


def cut(keep: float) -> Callable[[Path], Any]:
    return lambda path: path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (cut(0.9), "not a safetensors file, or is truncated"),
    "truncated in the header": (cut(0.001), "not a safetensors file, or is truncated"),
    "empty": (lambda path: path.write_bytes(b""), "not a safetensors file, or is truncated"),
    "text": (lambda path: path.write_text("hello " * 50), "not a safetensors file, or is truncated"),
    "extra bytes": (lambda path: path.write_bytes(path.read_bytes() + b"\0" * 8), "not a safetensors file"),
    "a byte": (flip_a_byte, r"was altered after it was written \(checksum mismatch\)"),
    "the last byte": (flip_the_last_byte, r"was altered after it was written \(checksum mismatch\)"),
    "the header": (edit_state, r"was altered after it was written \(checksum mismatch\)"),
    "names swapped": (swap_tensors, r"was altered after it was written \(checksum mismatch\)"),
    "no checksum": (drop_checksum, r"was altered after it was written \(checksum mismatch\)"),
    "no state": (drop_state, r"was altered after it was written \(checksum mismatch\)"),
    "newer": (newer_version, "has format version '3', this qada-cache reads 2: upgrade"),
    "foreign": (lambda path: save_file({"x": torch.ones(2)}, path), "is not a qada-cache file .*nothing about what it"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files(damage: str, saved: Path) -> None:
    act, message = DAMAGE[damage]
    act(saved)
    model = tiny()
    with pytest.raises(ValueError, match=f"{saved.name} .*{message}"):
        QAdACache.load(saved, model)
    assert model.config._attn_implementation == "sdpa"


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
    """As accelerate keeps them, of a model that is greater than the memory."""
    for seed in (0, 1):
        model = tiny(seed=seed)
        model.model.layers[0].to("meta")
        if seed == 0:
            QAdACache.load(saved, model)
        else:
            with pytest.raises(ValueError, match="its config is this model's, and its weights are not"):
                QAdACache.load(saved, model)


def test_pickling_is_refused_in_words() -> None:
    cache = adaptive(tiny())
    for attempt in (pickle.dumps, lambda cache: torch.save(cache, io.BytesIO())):
        with pytest.raises(TypeError, match=r"cannot be pickled, .*: use save\(\) and QAdACache\.load"):
            attempt(cache)
    assert copy.copy(cache).layers is cache.layers


@pytest.mark.parametrize("failing", ["files.tensor_file._content", "files.private.os.replace"])
def test_an_interrupted_save_leaves_the_old_file(failing: str, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, model = saved.read_bytes(), tiny()
    cache = exact(model)
    generate(model, prompt(90)[0], cache)

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(f"qada_cache.{failing}", interrupt)
        with pytest.raises(KeyboardInterrupt):
            cache.save(saved)
    assert saved.read_bytes() == before
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]  # and nothing half-written beside it
    cache.save(saved)
    assert QAdACache.load(saved, model).get_seq_length() == cache.get_seq_length()


def test_a_full_disk_says_which_file(saved: Path) -> None:
    before, model = saved.read_bytes(), tiny()
    cache = QAdACache.load(saved, model)
    with limited_file_size(len(before) // 2), pytest.raises(OSError, match=f"File too large: '{saved}'") as caught:
        cache.save(saved)
    assert caught.value.errno == errno.EFBIG
    with pytest.raises(FileNotFoundError, match=f"'{saved.parent}/missing/cache'"):
        cache.save(saved.parent / "missing" / "cache")
    assert saved.read_bytes() == before
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


def test_what_killed_processes_left_is_removed_by_the_next_save(saved: Path) -> None:
    cache = QAdACache.load(saved, tiny())
    script = (
        "import os, sys\nsys.path.insert(0, 'tests/helpers')\n"
        "from models import tiny\nfrom qada_cache import QAdACache\nfrom qada_cache.files import tensor_file\n"
        f"cache = QAdACache.load({str(saved)!r}, tiny())\n"
        f"tensor_file._content = lambda tensor: os.kill(os.getpid(), 9)\ncache.save({str(saved)!r})"
    )
    assert subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[2]).returncode == -9
    left = set(saved.parent.iterdir()) - {saved}
    assert len(left) == 1
    cache.save(saved)
    assert set(saved.parent.iterdir()) - {saved} == left  # its process might be at work yet
    for path in left:
        os.utime(path, times=(time.time() - 2 * private.STALE_SECONDS,) * 2)
    cache.save(saved)
    assert list(saved.parent.iterdir()) == [saved]


def test_links_are_written_through(saved: Path) -> None:
    cache, link = QAdACache.load(saved, tiny()), saved.with_name("link")
    for target in (saved.name, "new"):  # the second of them leads nowhere yet
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        cache.save(link)
        assert link.is_symlink()
        assert QAdACache.load(saved.with_name(target), tiny()).get_seq_length() == cache.get_seq_length()


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
@pytest.mark.parametrize("linked", [False, True])
def test_what_is_no_file_is_not_replaced(linked: bool, make: Callable[[Path], None], saved: Path) -> None:
    cache, path = QAdACache.load(saved, tiny()), saved.with_name("taken")
    make(path)
    before = path.stat()
    if linked:
        path = saved.with_name("link")
        path.symlink_to("taken")
    with pytest.raises(OSError, match=f"not a regular file: '{path}'"):
        cache.save(path)
    assert path.stat() == before


def test_permissions_are_those_of_any_new_file(saved: Path) -> None:
    cache, path = QAdACache.load(saved, tiny()), saved.with_name("other")
    umask = os.umask(0o027)
    try:
        cache.save(path)
        assert path.stat().st_mode & 0o777 == 0o640
        path.chmod(0o604)
        cache.save(path)
    finally:
        os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o604  # an old one keeps its own


def test_every_dtype_that_is_written_can_be_read(tmp_path: Path) -> None:
    tensors = {str(dtype): torch.tensor([0, 1, 0]).to(dtype) for dtype in tensor_file._DTYPES}
    tensors |= {"empty": torch.zeros(0, 3), "scalar": torch.tensor(2.0), "a view": torch.arange(6).view(2, 3).T}
    tensor_file.write(tmp_path / "file", "qada-test", tensors, {})
    found, _ = tensor_file.read(tmp_path / "file", "qada-test")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    with pytest.raises(NotImplementedError, match=r"complex is of torch\.complex64"):
        tensor_file.write(tmp_path / "file", "qada-test", {"complex": torch.zeros(2, dtype=torch.complex64)}, {})
