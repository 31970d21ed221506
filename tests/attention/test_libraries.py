"""The C++ libraries that a cache needs: which they are, and that a prompt starts to build them."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from compilers import needs_compiler
from models import prompt, tiny
from transformers import DynamicCache

from qada_cache import QAdACache
from qada_cache.attention import call, libraries
from qada_cache.kernels import cpu
from qada_cache.kernels.cpu import building, latent, quantizing, recording
from qada_cache.kernels.cpu import prompt as prompt_kernel
from qada_cache.kernels.operands import Query
from qada_cache.versions import pass_cache

FEWEST = 1024 + 128  # tokens of a prompt behind which the kernel decodes
SECONDS = 20  # the most that anything here waits


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts start builds, as they do outside of tests."""
    monkeypatch.setattr(building, "_builds", building._Builds())
    monkeypatch.setattr(call, "build_for_prompt", libraries.build_for_prompt)


@pytest.fixture
def begun(ahead: None, monkeypatch: pytest.MonkeyPatch) -> list[list[Path]]:
    """The sources of what each prompt would start to build."""
    found: list[list[Path]] = []
    monkeypatch.setattr(libraries, "build_ahead", lambda wanted: found.append([each.source for each in wanted]))
    return found


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Path, tuple[str, ...]]]]:
    """The libraries that a test loads, as in a process that has loaded none before."""
    found: list[tuple[Path, tuple[str, ...]]] = []
    load = building._load
    monkeypatch.setattr(building, "_load", lambda *library: found.append(library) or load(*library))
    monkeypatch.setattr(building, "_builds", building._Builds())
    built = cpu.build, cpu.build_partial, prompt_kernel._build_once, recording.build_coder, quantizing.build_quantizer
    for build in built:
        build.cache_clear()
    yield found
    for build in built:
        build.cache_clear()


def read(cache: Any, tokens: int, **options: Any) -> Any:
    model = options.pop("model", None) or tiny(max_position_embeddings=4096, **options)
    with torch.no_grad():
        model(prompt(tokens)[0], **pass_cache(cache(model)))
    return model


def make(**options: Any) -> Callable[[Any], QAdACache]:
    return lambda model: QAdACache(model, moments="current", **options)


@needs_compiler
def test_decoding_waits_for_the_build_that_its_prompt_started(
    ahead: None, loads: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    load, started, gate, threads = building._load, threading.Event(), threading.Event(), []

    def wait(source: Path, macros: tuple[str, ...]) -> Any:
        if source != cpu.SOURCE:  # which the prompt itself waits for
            return load(source, macros)
        threads.append(threading.current_thread())
        loaded = load(source, macros)
        started.set()
        assert gate.wait(SECONDS)
        return loaded

    monkeypatch.setattr(building, "_load", wait)
    model, ids = tiny(max_position_embeddings=4096), prompt(FEWEST + 1)[0]
    cache = QAdACache(model, moments="current")
    with torch.no_grad():
        model(ids[:, :-1], **pass_cache(cache))
        assert started.wait(SECONDS)  # while nobody has asked for it
        threading.Timer(0.1, gate.set).start()
        got = model(ids[:, -1:], **pass_cache(cache)).logits
        full = cache.fork(threshold=1.0)
        full.crop(-1)
        exact = model(ids[:, -1:], **pass_cache(full)).logits
        wanted = model(ids).logits[:, -1:]
    assert sorted(source for source, _ in loads) == [cpu.SOURCE, quantizing.SOURCE]
    assert len(threads) == 1
    assert threads[0].daemon
    assert cpu.build.cache_info().currsize == 1
    assert got.isfinite().all()
    torch.testing.assert_close(exact, wanted, rtol=1e-4, atol=1e-4)


@needs_compiler
@pytest.mark.parametrize(
    ("options", "model"),
    [
        *(({}, {"head_dim": 16}), ({}, {"dtype": torch.float16})),
        *(({"bulk_bits": 8, "audit_every": 2}, {}), ({"criterion": "oracle"}, {})),
    ],
    ids=str,
)
def test_what_is_listed_is_what_is_used(options: dict[str, Any], model: dict[str, Any], loads: list[Any]) -> None:
    """A prompt, and decoding behind it, load exactly the libraries that are listed."""
    small = tiny(num_attention_heads=6, hidden_size=48, max_position_embeddings=4096, **model)
    dim = model.get("head_dim", 8)
    cache = QAdACache(small, moments="current", **options)
    small.generate(prompt(1400)[0], **pass_cache(cache), max_new_tokens=5, do_sample=False)
    listed = libraries.list_libraries(cache.options, small.dtype, group=3, dim=dim, value_dim=dim)
    assert {each[:2] for each in listed} == set(loads)
    assert [each.build() for each in listed] == [each.build() for each in listed]
    assert len(loads) == len(listed)  # they are the very same


@needs_compiler
def test_the_fewest_tokens(begun: list[list[Path]]) -> None:
    read(make(), FEWEST - 1)
    assert not begun
    read(make(), FEWEST)
    assert begun == [[cpu.SOURCE, quantizing.SOURCE]]
    read(make(local_tokens=256), FEWEST)
    assert len(begun) == 1


@needs_compiler
@pytest.mark.parametrize(("bits", "coders"), [(16, []), (8, [recording.SOURCE, quantizing.SOURCE])])
def test_latents(bits: int, coders: list[Path], begun: list[list[Path]]) -> None:
    model = tiny("deepseek_v3", max_position_embeddings=4096)
    read(lambda model: QAdACache(model, bulk_bits=bits), FEWEST, model=model)
    read(lambda model: QAdACache(model, bulk_bits=bits, kernels="torch"), FEWEST, model=model)
    assert begun == [[latent.SOURCE, *coders], []]
    options = {"criterion": "gaussian", "moments": "current", "bulk_bits": bits}
    read(lambda model: QAdACache(model, **options), FEWEST, model=model)
    assert begun[2] == [latent.SOURCE, cpu.SOURCE, *(coders or [quantizing.SOURCE])]


@needs_compiler
def test_a_prompt_in_chunks_and_a_text_that_grows(begun: list[list[Path]]) -> None:
    """With the first chunk, as `generate` knows the rest; with the turn that makes a text long, before its tokens are
    held."""
    model, ids = tiny(max_position_embeddings=4096), prompt(1400)[0]
    kept = make()(model)
    model.generate(ids, **pass_cache(kept), max_new_tokens=1, prefill_chunk_size=200)
    assert len(begun) == 7
    begun.clear()
    cache = make()(model)
    with torch.no_grad():
        model(ids[:, :900], **pass_cache(cache))
        assert not begun
        model(ids[:, 900:], **pass_cache(cache))
    assert len(begun) == 1


@needs_compiler
def test_padding_is_not_counted(begun: list[list[Path]]) -> None:
    model, ids = tiny(max_position_embeddings=4096), prompt(1400)[0]
    mask = torch.ones_like(ids)
    mask[:, :700] = 0
    with torch.no_grad():
        model(ids, attention_mask=mask, **pass_cache(make()(model)))
    assert not begun


@needs_compiler
@pytest.mark.parametrize(
    ("cache", "model"),
    [
        (make(kernels="torch"), {}),
        (make(), {"dtype": torch.float64}),
        (make(), {"num_attention_heads": 17, "num_key_value_heads": 1, "hidden_size": 17 * 8}),
        (lambda model: DynamicCache(config=model.config), {}),
    ],
    ids=["torch", "float64", "group of 17", "DynamicCache"],
)
def test_no_kernel_will_serve(cache: Any, model: dict[str, Any], begun: list[list[Path]]) -> None:
    """No kernel is built ahead if none will serve, except the one for sketches, from which torch selects, too."""
    read(cache, 1300, **model)
    assert {source for sources in begun for source in sources} <= {quantizing.SOURCE}


def test_not_on_a_gpu(begun: list[list[Path]]) -> None:
    layer = make()(tiny()).layers[0]
    query, key = torch.empty(1, 4, 2000, 8, device="meta"), torch.empty(1, 2, 2000, 8, device="meta")
    libraries.build_for_prompt(layer, Query(query, 1.0), key, key, 2000)
    assert not begun
    libraries.build_for_prompt(layer, Query(query.new_empty(query.shape, device="cpu"), 1.0), key, key, 2000)
    assert len(begun) == 1


def test_no_thread_without_a_compiler(ahead: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    read(make(), FEWEST)  # what a prompt itself waits for is there: no thread of another test's would build it
    monkeypatch.setattr(building, "_builds", building._Builds())
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    started = []
    monkeypatch.setattr(threading.Thread, "start", lambda thread: started.append(thread))
    read(make(), FEWEST)
    assert not started
