"""Moments by name need a model's tokenizer, found or given, and `prepare` does all slow work ahead."""

import socket
import subprocess
from pathlib import Path
from typing import Any

import needle
import pytest
import torch
from compilers import needs_compiler
from models import prompt, tiny
from readable import english_tokenizer, readable_model
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedModel
from transformers.utils.quantization_config import GgufConfig

from qada_cache import QAdACache, prepare, preparing
from qada_cache.kernels import choice, cpu
from qada_cache.kernels.operands import Operands, Query, Rows
from qada_cache.key_moments import defaults
from qada_cache.models import identity
from qada_cache.models.identity import find_tokenizer
from qada_cache.said_once import warn_once
from qada_cache.sketch import MIN_TOKENS, Layout
from qada_cache.state import Shared
from qada_cache.versions import pass_cache

LONG = 1400  # tokens, of which enough are bulk for the CPU's kernel
KERNELS = cpu.build, cpu.build_partial


pytestmark = pytest.mark.usefixtures("builds_of_others")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and no memory of what earlier tests collected and built."""
    monkeypatch.setenv("QADA_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(defaults, "_remembered", {})
    warn_once.cache_clear()
    for build in KERNELS:
        build.cache_clear()
    return tmp_path / "home"


def used(cache: QAdACache) -> str:
    moments = cache.options.other_moments
    return "current" if moments is None else moments.prompt


def forbid(monkeypatch: pytest.MonkeyPatch, target: Any, name: str) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError(f"{name} was called")

    monkeypatch.setattr(target, name, refuse)


def without_tokenizer(folder: Path, family: str = "llama") -> PreTrainedModel:
    model = tiny(family)
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder, local_files_only=True).eval()


# -- the tokenizer beside the model ----------------------------------------------------------------------------------


def test_found_in_the_models_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """The tokenizer is found in the model's folder for every prompt by name, offline, and knows the article's words."""
    model = readable_model(tmp_path / "model")
    forbid(monkeypatch, socket, "getaddrinfo")
    for name in ("wiki", "random-words", "single-word"):
        assert used(QAdACache(model, moments=name)) == name
    assert sorted(path.name.split("-", 2)[2][:4] for path in (folder / "moments").iterdir()) == ["rand", "sing", "wiki"]
    assert used(QAdACache(config=model.config, moments="random-words")) == "random-words"
    assert len(find_tokenizer(needle.load_model())) == len(needle.load_tokenizer())


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
def test_none_in_the_folder(family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without a tokenizer in the model's folder a text is refused, and "random-words" become "random-tokens". For some
    families transformers makes an empty tokenizer, which does not count."""
    model = without_tokenizer(tmp_path, family)
    with pytest.raises(
        ValueError, match=rf"'wiki'.* none was found at {tmp_path} .*prepare\(model, tokenizer, moments="
    ):
        QAdACache(model, moments="wiki")
    for _ in range(2):
        assert used(QAdACache(model, moments="random-words")) == "random-tokens"
    assert caplog.text.count("moments='random-tokens': none was found at") == 1


def test_none_of_a_model_made_in_memory(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid(monkeypatch, AutoTokenizer, "from_pretrained")
    with pytest.raises(ValueError, match=r"the model was not loaded from anywhere: call qada_cache\.prepare"):
        QAdACache(tiny(), moments="wiki")
    assert used(QAdACache(tiny(), moments="single-word")) == "single-token"
    assert "not loaded from anywhere" in caplog.text
    caplog.clear()
    assert used(QAdACache(tiny(), moments="random-tokens")) == "random-tokens"  # asked for: nothing to say
    assert caplog.text == ""


def test_one_that_does_not_know_the_article() -> None:
    model = needle.load_model()
    assert used(QAdACache(model, moments="random-words")) == "random-tokens"
    with pytest.raises(ValueError, match=r"does not know the words of the prompt \(wiki\)"):
        QAdACache(model, moments="wiki")


@pytest.mark.parametrize("form", [GgufConfig, dict])
def test_where_it_is_looked_for(form: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a GGUF file if the model is from one; on the Hub only if its name is no folder, and then of its commit."""
    asked: list[dict[str, Any]] = []

    def look(name: str, **where: Any) -> Any:
        asked.append({"name": name, **where})
        raise OSError("nothing there\nand more")

    monkeypatch.setattr(identity.AutoTokenizer, "from_pretrained", look)
    model = without_tokenizer(tmp_path)
    model.config.quantization_config = form(gguf_file="model.gguf")
    with pytest.raises(LookupError, match=rf"none was found at {tmp_path} \(nothing there\)$"):
        find_tokenizer(model)
    model.config._name_or_path, model.config._commit_hash = "owner/model", "c0ffee"
    del model.config.quantization_config
    with pytest.raises(LookupError, match="none was found at owner/model"):
        find_tokenizer(model)
    assert asked == [
        {"name": str(tmp_path), "trust_remote_code": False, "gguf_file": "model.gguf", "local_files_only": True},
        {"name": "owner/model", "trust_remote_code": False, "revision": "c0ffee"},
    ]


def test_words_once_they_can_be_had(tmp_path: Path) -> None:
    """A tokenizer that is given after tokens were used in the place of words: words from then on, the tokens stay."""
    english = english_tokenizer()
    tiny(vocab_size=len(english)).save_pretrained(tmp_path)
    model = LlamaForCausalLM.from_pretrained(tmp_path, local_files_only=True).eval()
    tokens = QAdACache(model, moments="random-words").options.other_moments
    assert used(QAdACache(config=model.config, moments="random-words")) == "random-tokens"
    prepare(model, english, moments="random-words")
    assert used(QAdACache(model, moments="random-words")) == "random-words"
    assert used(QAdACache(config=model.config, moments="random-words")) == "random-words"
    assert QAdACache(model, moments="random-tokens").options.other_moments is tokens


# -- ahead -----------------------------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize("options", [{}, {"audit_every": 2}, {"criterion": "oracle"}], ids=str)
def test_nothing_is_left_to_do(options: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No forward pass, no look-up, no file, no compiler: neither for the next cache nor for its first long steps."""
    english = english_tokenizer()
    model = tiny(vocab_size=len(english), num_attention_heads=6, hidden_size=48, max_position_embeddings=4096)
    prepare(model, english, moments="wiki", **options)
    before = sorted(folder.rglob("*"))
    assert any(path.suffix == ".so" for path in before)
    with monkeypatch.context() as patched:
        forbid(patched, LlamaForCausalLM, "forward")
        forbid(patched, AutoTokenizer, "from_pretrained")
        cache = QAdACache(model, moments="wiki", **options)
    assert used(cache) == ("current" if options.get("criterion") == "oracle" else "wiki")
    forbid(monkeypatch, subprocess, "Popen")
    built = [build.cache_info() for build in KERNELS]
    model.generate(prompt(LONG)[0], **pass_cache(cache), max_new_tokens=4, do_sample=False)
    found = [build.cache_info() for build in KERNELS]
    assert [each.misses for each in found] == [each.misses for each in built]
    assert sum(each.hits for each in found) > sum(each.hits for each in built)  # a kernel did serve
    assert sorted(folder.rglob("*")) == before


def test_gpus_are_prepared_for_the_models_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every device of the model, as caches will lie there."""
    built: dict[str, dict[str, Any]] = {}
    monkeypatch.setattr(preparing, "find_inputs_device", lambda _: torch.device("cuda", 1))

    def build(device: torch.device, dtype: torch.dtype, shared: Shared, **sizes: Any) -> None:
        options = shared.options
        built[str(device)] = {"sketch_bits": options.sketch_bits if options.selects_tokens else None, **sizes}

    monkeypatch.setattr(preparing, "_build_kernels", build)
    model = tiny(num_attention_heads=6, num_key_value_heads=2, hidden_size=48)
    prepare(model, moments="current", sketch_bits=4)
    assert built.keys() == {"cuda:1", "cpu"}
    wanted = {"kv_heads": 2, "group": 3, "dim": 8, "value_dim": 8, "sketch_bits": 4}
    assert built["cuda:1"] == built["cpu"] == wanted
    prepare(model, moments="current", offloading=False, token_threshold=0)
    assert built["cuda:1"] == {**wanted, "sketch_bits": None}


def test_a_config_that_does_not_say_how_wide_keys_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moments do, of the keys that there were."""
    model = tiny(num_hidden_layers=1)
    monkeypatch.setattr(preparing, "read_sizes", lambda config: (1, 4, 4, 5))
    seen = QAdACache(model, moments="random-tokens").options.other_moments.shape
    built: list[dict[str, Any]] = []
    monkeypatch.setattr(preparing, "_build_kernels", lambda *_, **sizes: built.append(sizes))
    prepare(model, moments="random-tokens")
    assert [(1, sizes["kv_heads"], sizes["dim"]) for sizes in built] == [seen]


@pytest.mark.parametrize("compiles", [True, False])
def test_latents_are_attended_to_ahead(compiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`prepare` attends to latents from tokens and short turns, unless a kernel for latents does, and from prompts,
    whose keys are expanded. It collects no moments, as all tokens are read."""
    calls: list[tuple[int, ...]] = []
    builds: list[tuple[int, ...]] = []
    kernels: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        preparing, "attend_to_latents", lambda *given, **_: calls.extend(part.shape for part in given[:2])
    )
    monkeypatch.setattr(preparing.prompt, "build", lambda *given: builds.append(given))
    monkeypatch.setattr(preparing.latent, "build_latent", lambda *given: kernels.append(given) or compiles)
    prepare(tiny("deepseek_v3"))
    assert not builds  # whose values have 8 channels, no whole vector
    calls.clear()
    prepare(tiny("deepseek_v3", v_head_dim=16))
    latents = (1, 1, MIN_TOKENS, 24)
    assert calls == ([] if compiles else [(1, 1, 4, 24), latents, (1, 1, 8, 24), latents])
    assert builds == [(16, 16, torch.float32)]
    assert kernels == 2 * [(torch.float32, 24, 16, None)]


@pytest.mark.skipif(not choice._is_installed(), reason="needs triton")
def test_triton_is_tried_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """`prepare` makes the trials that first steps would make, without a sketch and with one. The kernels are idle."""
    from qada_cache.kernels import triton
    from qada_cache.kernels.triton import kernels, turn

    def idle(query: Query, rows: Rows, layer: Operands) -> tuple[Tensor, Tensor]:
        batch, heads, queries, _ = query.states.shape
        flags = torch.ones(batch, layer.kv_heads, heads // layer.kv_heads, queries, dtype=torch.bool)
        return query.states.new_zeros(batch, heads, queries, layer.near_values.shape[3]), flags

    tried: list[dict[str, Any]] = []
    monkeypatch.setattr(triton, "fused_decode", idle)
    monkeypatch.setattr(turn, "fused_turn", idle)
    monkeypatch.setattr(kernels, "INTERPRETED", True)
    monkeypatch.setattr(choice, "AUTO_DEVICES", ("cpu",))
    monkeypatch.setattr(choice.compiled_decode, "supports", lambda *_: False)
    monkeypatch.setattr(choice.decode_trial, "find_decode_fault", lambda *_, **kwargs: tried.append(kwargs))
    prepare(tiny(num_attention_heads=6, num_key_value_heads=2, hidden_size=48), moments="current")
    kinds = {(wanted.pop("layout"), wanted.pop("queries", 1)) for wanted in tried}
    assert all(wanted == {"group": 3, "dim": 8, "value_dim": 8, "records": None, "pinned": False} for wanted in tried)
    assert kinds == {(layout, queries) for layout in (None, Layout.from_bits(8, 1.5)) for queries in (1, 2)}


def test_what_it_refuses(folder: Path) -> None:
    """`prepare` refuses what `QAdACache` refuses, before it reads anything."""
    for options, error in (
        ({"threshold": 7}, ValueError),
        ({"lenght": 1}, TypeError),
        ({"criterion": "x"}, ValueError),
    ):
        with pytest.raises(error):
            prepare(tiny(), english_tokenizer(), moments="wiki", **options)
    with pytest.raises(FileNotFoundError):
        prepare(tiny(), moments="nowhere.safetensors")
    with pytest.raises(NotImplementedError):
        prepare(tiny("deepseek_v3"), threshold=0.5)
    assert not folder.exists()


def test_only_what_is_needed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No moments for a criterion without them, no kernel where there is nothing to decode, or none is wanted."""
    prepare(tiny("mistral_sliding"), moments="wiki")
    monkeypatch.setenv("QADA_KERNELS", "torch")
    prepare(tiny(), moments="wiki", criterion="local")
    prepare(tiny(dtype=torch.float64), moments="current")
    assert not folder.exists()


def test_lm_eval_hands_its_tokenizer_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed (pip install qada-cache[eval])")
    from qada_cache.lm_eval import QAdALM

    lm = QAdALM(readable_model(tmp_path).config._name_or_path, device="cpu", cache_moments="wiki")
    assert used(lm._make_cache()) == "wiki"
    forbid(monkeypatch, defaults, "find_tokenizer")
    english = english_tokenizer()
    lm = QAdALM(tiny(vocab_size=len(english)), tokenizer=english, cache_moments="random-words")
    assert used(lm._make_cache()) == "random-words"
