"""The private names of transformers and others that the package uses exist in every version tested."""

from __future__ import annotations

import ast
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from models import generate, prompt, tiny
from transformers import AutoModel, AutoModelForCausalLM, GenerationMixin, PreTrainedModel

import qada_cache
from qada_cache import QAdACache
from qada_cache.attention import generation, support
from qada_cache.said_once import warn_once
from qada_cache.versions import PRIVATE, PRIVATE_ONCE, find_missing

PACKAGE = Path(qada_cache.__file__).parent
LISTED = {name for names in PRIVATE.values() for name in names}
# Ours: a module, and tags on objects of others. Public: those of named tuples.
OURS = {
    "_qada_find",
    "_qada_cache_startup",
    "_qada_layer",
    "_qada_read",
    "_qada_own",
    "_reports_caches",
    "_replace",
    "_asdict",
}


def names_used(sources: list[str]) -> set[str]:
    """Private names that these sources ask of others than themselves."""
    nodes = [node for source in sources for node in ast.walk(ast.parse(source))]
    own = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    own |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    own |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    own |= {node.target.id for node in nodes if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    asked = {node for node in nodes if isinstance(node, ast.Attribute)}
    own |= {node.attr for node in asked if isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"}
    named = {node.attr for node in asked if ast.unparse(node.value) not in ("self", "cls")} | (
        {node.attr for node in asked} - own
    )
    for node in nodes:
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr", "delattr"):
            named |= {str(arg.value) for arg in node.args[1:2] if isinstance(arg, ast.Constant)}
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):  # vars(module)["_name"]
            named |= {str(node.slice.value)}
        if isinstance(node, ast.ImportFrom) and not node.level:
            named |= {*(node.module or "").split("."), *(alias.name for alias in node.names)}
        if isinstance(node, ast.Import):
            named |= {part for alias in node.names for part in alias.name.split(".")}
        if isinstance(node, (ast.For, ast.comprehension)) and isinstance(node.iter, (ast.Tuple, ast.List)):
            named |= {str(each.value) for each in node.iter.elts if isinstance(each, ast.Constant)}
    return {name for name in named if re.fullmatch("_[a-zA-Z]\\w*", name)} - (own - LISTED)


def test_what_is_private_is_named() -> None:
    sources = [path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")]
    assert names_used(sources) - OURS - {*PRIVATE_ONCE} == LISTED


@pytest.mark.parametrize(
    "source",
    [
        "x = model._other",
        "x = torch._other()",
        "x = getattr(model, '_other', None)",
        "hasattr(model, '_other')",
        "from torch._other import x",
        "from transformers.x import _other",
        "import torch._other",
        "x = vars(module)['_other']",
        "for name in ('_other', '_modules'):\n    getattr(module, name)",
        "class Ours(Theirs):\n    def method(self):\n        return self._other",
    ],
)
def test_a_private_name_that_is_not_listed_is_found(source: str) -> None:
    assert names_used([source]) - LISTED == {"_other"}


def hold(kind: str, tmp_path: Path) -> Any:
    """An object that should have the names of `PRIVATE[kind]`."""
    model: Any = tiny()
    if kind == "model of lm-eval":
        return pytest.importorskip("lm_eval.models.huggingface").HFLM
    if kind in ("model", "config"):
        model.save_pretrained(tmp_path)
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
    if kind == "module by accelerate":
        cpu_offload(model, torch.device("cpu"))
    kinds = {"config": model.config, "torch": torch, "all modules": torch.nn.modules.module, "tensor": torch.ones(1)}
    kinds |= {"lock": threading.Lock(), "memory of CUDA": torch.cuda.memory, "table of models": AutoModel}
    kinds |= {"compiled function": torch.compile(lambda: None, backend="eager")}
    return torch.compile(model, backend="eager") if kind == "compiled model" else kinds.get(kind, model)


@pytest.mark.parametrize("kind", PRIVATE)
def test_what_is_private_is_there(kind: str, tmp_path: Path) -> None:
    holder = hold(kind, tmp_path)
    assert [name for name in PRIVATE[kind] if not hasattr(holder, name)] == []
    assert find_missing() == []


@pytest.mark.parametrize("name", ["_prefill", "_tp_size", "_can_set_attn_implementation", "_name_or_path"])
def test_without_one_there_is_the_meant_warning(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a private name there is the warning about it, and prompts are read and tokens generated as before."""
    model, text = tiny(), prompt(60)[0]
    wanted = generate(model, text, None, tokens=6, prefill_chunk_size=None).sequences
    warn_once.cache_clear()
    if name == "_prefill":  # under another name, which its callers know
        monkeypatch.setattr(GenerationMixin, "_renamed", GenerationMixin._prefill, raising=False)
        monkeypatch.setattr(generation, "_PREFILL", None)
    monkeypatch.setattr("qada_cache.attention.support.find_missing", lambda: [name])
    if name == "_can_set_attn_implementation":
        monkeypatch.setattr(type(model), name, None)
    if name == "_tp_size":
        monkeypatch.setattr(type(model), name, None, raising=False)
    if name == "_name_or_path":
        monkeypatch.delattr(model.config, name, raising=False)
    got = generate(model, text, QAdACache(model, threshold=1.0, moments="current"), tokens=6).sequences
    assert torch.equal(got, wanted)
    assert caplog.text.count(f"lacks {name}: look for a newer qada-cache") == 1


def test_what_is_missing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(GenerationMixin, "_prefill")
    monkeypatch.delattr(PreTrainedModel, "_can_set_attn_implementation")
    assert find_missing() == ["_can_set_attn_implementation", "_prefill"]


@pytest.mark.parametrize(("version", "warns"), [("5.24.0", False), ("5.25.0.dev0", True), ("6.0.0", True)])
def test_a_newer_transformers_is_a_warning(version: str, warns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    warn_once.cache_clear()
    monkeypatch.setattr(support.transformers, "__version__", version)
    said: list[str] = []
    monkeypatch.setattr(support.logger, "warning", lambda message, *args, **kwargs: said.append(message))
    for _ in range(2):
        QAdACache(tiny(), moments="current")
    assert sum("was tested with transformers up to 5.24" in message for message in said) == warns


def test_the_newest_is_the_one_that_is_tested() -> None:
    constraints = (PACKAGE.parent / "constraints.txt").read_text(encoding="utf-8")
    assert re.search(r"^transformers==(\d+)\.(\d+)", constraints, re.MULTILINE).groups() == tuple(
        map(str, support.NEWEST)
    )
