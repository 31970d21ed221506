"""Copies, files, forks and crops of caches that store tokens in few bits."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import prompt, tiny
from test_coded_cache import DENSE, PROMPT, SELECTING, TOKENS, filled, follow, told_of
from torch import Tensor
from transformers import DynamicCache

from qada_cache import QAdACache
from qada_cache.cache_file import KIND
from qada_cache.files import private_map, tensor_file
from qada_cache.kernels import choice, coding, cpu
from qada_cache.kernels.cpu import prompt as prompt_kernel
from qada_cache.kernels.cpu import recording
from qada_cache.versions import pass_cache


def test_copies_share_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_map, "WORTH", 0)
    model, ids = tiny(), prompt(PROMPT + TOKENS)[0]
    cache = filled(model, ids[:, :PROMPT], bulk_bits=8, **DENSE)
    twin = copy.deepcopy(cache)
    records, beside = 2 * 2 * 1536 * 16 * private_map.AVAILABLE, 2 * 2 * 352 * (64 + 16)
    assert twin.stats().shared_bytes == cache.stats().shared_bytes == records + beside
    other = prompt(400, seed=5)[0]
    follow(model, cache, other)
    assert cache.stats().shared_bytes <= records == twin.stats().shared_bytes  # what follows is each one's own
    given = ids[:, PROMPT:]
    wanted = follow(model, filled(model, ids[:, :PROMPT], bulk_bits=8, **DENSE), given)
    assert torch.equal(follow(model, twin, given), wanted)


def test_what_was_shared_is_ones_own_again() -> None:
    model, ids = tiny(), prompt(PROMPT)[0]
    cache = filled(model, ids, bulk_bits=8, **DENSE)
    bulk = cache.layers[0].store.bulk
    beside, twin = bulk.beside, copy.deepcopy(cache)
    assert bulk.lent_bytes == twin.layers[0].store.bulk.lent_bytes > 0
    del twin
    gc.collect()
    assert bulk.lent_bytes == 0
    follow(model, cache, prompt(150, seed=5)[0])
    assert bulk.beside is not beside


@pytest.mark.parametrize("mmap", [True, False])
def test_files(mmap: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Far smaller, and go on as if they had never left."""
    monkeypatch.setattr(private_map, "WORTH", 0)
    model, ids = tiny(), prompt(3500 + TOKENS)[0]
    given, sizes = ids[:, 3500:], {}
    for bits in (16, 8, 4):
        cache = filled(model, ids[:, :3500], bulk_bits=bits, **SELECTING)
        cache.save(tmp_path / str(bits))
        sizes[bits] = (tmp_path / str(bits)).stat().st_size
        again = QAdACache.load(tmp_path / str(bits), model, mmap=mmap)
        assert again.options.bulk_bits == bits
        assert torch.equal(follow(model, again, given), follow(model, cache, given))
    assert sizes[8] < 0.37 * sizes[16]  # a token's record has a fourth of its bytes, its codes a tenth
    assert sizes[4] < 0.33 * sizes[16]


@pytest.mark.parametrize("mmap", [True, False])
def test_files_and_copies_of_segments_that_a_crop_has_opened(
    mmap: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They go on as if they had never left, past where the segments close again; old files code what is left anew."""
    monkeypatch.setattr(private_map, "WORTH", 0)
    model, (ids, mask) = tiny(), prompt(1900, 1500)
    cache = filled(model, ids, mask, bulk_bits=8, **SELECTING)
    cache.crop(-800)
    bulks = [layer.store.bulk for layer in cache.layers]
    assert [[each.tokens for each in row] for row in bulks[0].reopened] == [[512, 72], [512, 184]]
    kept = sum(each.nbytes for bulk in bulks for row in bulk.reopened for each in row)
    cache.save(tmp_path / "file")
    again, twin = QAdACache.load(tmp_path / "file", model, mmap=mmap), copy.deepcopy(cache)
    assert again.stats().device_bytes == cache.stats().device_bytes > kept > 0
    tensors, state = tensor_file.read(tmp_path / "file", KIND)
    for layer in state["layers"]:
        layer["dict"] = [field for field in layer["dict"] if field[0] != "reopened"]
    old = {name: tensor for name, tensor in tensors.items() if "reopened" not in name}
    tensor_file.write(tmp_path / "old", KIND, old, state)
    rest, whole = prompt(700, 700, seed=7)[0], torch.cat([mask[:, :1100], torch.ones(2, 700, dtype=mask.dtype)], dim=1)
    found = []
    for each in (cache, again, twin, QAdACache.load(tmp_path / "old", model, mmap=mmap)):
        with torch.no_grad():
            found.append(model(rest, **told_of(whole, 700), **pass_cache(each)).logits)
            more = torch.cat([whole, torch.ones(2, 1, dtype=mask.dtype)], dim=1)
            found[-1] = torch.cat([found[-1], follow(model, each, rest[:, :1], more)], dim=1)
        assert not any(each.layers[0].store.bulk.reopened)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[3])
    torch.testing.assert_close(found[0], found[3], rtol=0.5, atol=0.5)


@pytest.mark.parametrize(
    ("name", "forge"),
    [
        ("order", lambda part: part.zero_()),
        ("order", lambda part: part.long()),
        ("centres", lambda part: part[:, :-1]),
        ("scales", lambda part: part[:, :1]),
        ("scales", lambda part: part.flatten()),
        ("records", lambda part: torch.cat([part, part], dim=1)),
        ("records", None),
    ],
)
def test_a_forged_segment_that_a_crop_has_opened(
    name: str, forge: Callable[[Tensor], Tensor] | None, tmp_path: Path
) -> None:
    model, path = tiny(), tmp_path / "file"
    cache = filled(model, prompt(1300)[0], bulk_bits=8, **DENSE)
    cache.crop(-200)
    cache.save(path)
    tensors, state = tensor_file.read(path, KIND)
    layer, place = state["layers"][0]["dict"], f"layer 0.reopened.0.0.{name}"
    ((segment,),) = next(value for field, value in layer if field == "reopened")
    if forge is None:  # the same one twice
        for key in (key for key, value in segment["dict"] if isinstance(value, dict)):
            tensors[f"layer 0.reopened.0.1.{key}"] = tensors[f"layer 0.reopened.0.0.{key}"]
        next(value for field, value in layer if field == "reopened")[0].append(copy.deepcopy(segment))
    else:
        tensors[place] = forge(tensors[place]).contiguous()
        for key, told in segment["dict"]:
            if key == name:
                told |= {"dtype": str(tensors[place].dtype)[6:], "shape": list(tensors[place].shape)}
    tensor_file.write(path, KIND, tensors, state)
    with pytest.raises(ValueError, match=r"cannot be loaded: its? .*reopened segment"):
        QAdACache.load(path, model)


@pytest.mark.skipif(not choice._is_installed(), reason="needs triton")
@pytest.mark.parametrize("options", [DENSE, SELECTING], ids=["dense", "selecting"])
def test_a_fork_for_tritons_kernel_answers_like_torch(options: dict[str, Any]) -> None:
    """A fork with `kernels="triton"`, under the interpreter, reads the same records, and answers as torch."""
    model, ids = tiny(num_hidden_layers=1), prompt(1202)[0]
    given, told = ids[:, 1200:], {"kernels": "torch", **options}
    coded, exact = (filled(model, ids[:, :1200], bulk_bits=bits, **told) for bits in (8, 16))
    found = coded.fork(kernels="triton")
    logits, wanted, plain = (follow(model, cache, given) for cache in (found, coded, exact))
    assert float((logits - wanted).norm()) < 0.01 * float((plain - wanted).norm())
    ours, theirs = found.stats(), coded.stats()
    assert 0 < ours.bulk_read_bytes == pytest.approx(theirs.bulk_read_bytes, rel=0.01)
    assert ours.sketch_read_bytes == theirs.sketch_read_bytes > 0


def test_forks_keep_what_records_lie_behind() -> None:
    model = tiny()
    cache = filled(model, prompt(1200)[0], bulk_bits=8, **SELECTING)
    for name, value in (("bulk_bits", 16), ("sketch_bits", 2.0)):
        with pytest.raises(ValueError, match=f"fork cannot change {name} from"):
            cache.fork(**{name: value})
    assert cache.fork(token_threshold=0.0).layers[0].store.sketch is None
    assert filled(model, prompt(1200)[0], **SELECTING).fork(sketch_bits=2.0).options.sketch_bits == 2.0


def test_a_crop_under_autocast_decodes_alike() -> None:
    """Products are rounded there, but for those that turn what records hold."""
    model, ids = tiny(), prompt(PROMPT)[0]
    cache = filled(model, ids, bulk_bits=8, **DENSE)
    twin = copy.deepcopy(cache)
    cache.crop(-600)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        twin.crop(-600)
    for one, other in zip(cache.layers, twin.layers, strict=True):
        held = [layer.store.bulk.read(slice(0, 1), slice(None), 0, 1100) for layer in (one, other)]
        for part, same in zip(*held, strict=True):
            assert torch.equal(part, same)


def test_torch_codes_for_caches_that_want_no_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither C++ nor Triton is called to code, or to decode, what a cache, a fork or a loaded one with
    `kernels="torch"` stores; a fork that wants them has them again."""
    called: list[str] = []
    for module in (cpu, prompt_kernel, recording):
        monkeypatch.setattr(module, "build_library", lambda *_: called.append("C++"))
    monkeypatch.setattr(coding, "AUTO_DEVICES", ("cpu",))
    monkeypatch.setattr(coding, "_find_coder", lambda *_: called.append("Triton"))
    for cached in (cpu.build, cpu.build_partial, prompt_kernel._build_once, recording.build_coder):
        cached.cache_clear()
    model, ids, path = tiny(), prompt(PROMPT)[0], tmp_path / "cache.safetensors"

    @torch.no_grad()
    def grow(cache: QAdACache) -> set[str]:
        for start, stop in ((0, 40), (40, 41), (41, 700)):  # a long turn reads all that was coded, and a crop too
            model(ids[:, start:stop], **pass_cache(cache))
        cache.crop(-690)
        found = set(called)
        called.clear()
        return found

    monkeypatch.setenv("QADA_KERNELS", "auto")
    cache = filled(model, ids, bulk_bits=8, kernels="torch", **SELECTING)
    cache.save(path)
    with_kernels = cache.fork(kernels="auto")
    assert not called
    for each in (cache, cache.fork(threshold=0.5)):
        assert not grow(each)
    assert grow(with_kernels) == {"C++", "Triton"}
    assert not grow(with_kernels.fork(kernels="torch"))
    monkeypatch.setenv("QADA_KERNELS", "torch")  # of what is asked for nothing, and of what is loaded
    for each in (filled(model, ids, bulk_bits=8, **SELECTING), QAdACache.load(path, model)):
        assert not grow(each)
    for cached in (cpu.build, cpu.build_partial, prompt_kernel._build_once, recording.build_coder):
        cached.cache_clear()


@pytest.mark.parametrize("bits", [8, 4])
def test_forty_crops_lose_what_one_coding_loses(bits: int) -> None:
    """Going back and reading the same text again, forty times, changes the next tokens' divergence from full attention
    little. The divergence is in nats."""
    model, ids = tiny(), prompt(1300 + TOKENS)[0]
    stock = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :1300], **pass_cache(stock))
    wanted = follow(model, stock, ids[:, 1300:]).double().log_softmax(dim=-1)

    def loss(cache: QAdACache) -> float:
        found = follow(model, copy.deepcopy(cache), ids[:, 1300:]).double().log_softmax(dim=-1)
        return float((wanted.exp() * (wanted - found)).sum(dim=-1).mean())

    cache = filled(model, ids[:, :1300], **DENSE, bulk_bits=bits)
    before = loss(cache)
    for count in range(40):
        gone = 150 + 37 * count % 400
        cache.crop(-gone)
        with torch.no_grad():
            model(ids[:, 1300 - gone : 1300], **pass_cache(cache))
    assert 0 < loss(cache) < 1.25 * before
