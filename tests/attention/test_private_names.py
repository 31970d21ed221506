"""What of transformers is used that is private there: named here, and there in every version tested."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from models import tiny
from transformers import AutoModelForCausalLM
from transformers.utils.logging import warning_once

import qada_cache
from qada_cache import QAdACache
from qada_cache.attention import support

PACKAGE = Path(qada_cache.__file__).parent
PRIVATE = {
    "_attn_implementation": "config",  # the name of a model's attention
    "_can_set_attn_implementation": "model",  # whether a model goes by that name
    "_name_or_path": "config",  # where it was loaded from
    "_tp_size": "model",  # how many processes tensor parallelism splits it over
    "_prefill": "model",  # whose frame says that a chunk of a prompt is being read
    "_prepare_generation_config": "model",  # what a call asks of generation, all told
}

MISSED_BY_NOBODY = {"_commit_hash"}  # of older versions: which commit of a repository a model was loaded from


def names_used() -> set[str]:
    """Private names that the package asks of others than itself and torch."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    own = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    own |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    own |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    own |= {node.target.id for node in nodes if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    asked = {node for node in nodes if isinstance(node, ast.Attribute) and re.match("_[^_]", node.attr)}
    own |= {node.attr for node in asked if isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"}
    named = {node.attr for node in asked if not ast.unparse(node.value).startswith("torch.")}
    for node in nodes:  # getattr(config, "_name", None)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            named |= {str(arg.value) for arg in node.args[1:2] if isinstance(arg, ast.Constant)}
    return {name for name in named if re.match("_[^_]", name)} - own


def test_what_is_private_is_named() -> None:
    tags = {"_qada_layer", "_qada_own", "_reports_caches"}  # ours
    # Of torch, accelerate and lm-eval, and public of named tuples.
    others = {"_version", "_C", "_orig_mod", "_hf_hook", "_detect_batch_size", "_replace", "_asdict"}
    others |= {"_foreach_add_", "_foreach_copy_", "_forward_hooks", "_forward_pre_hooks", "_modules", "_parameters"}
    others |= {"_global_forward_hooks", "_global_forward_pre_hooks"}
    assert names_used() - tags - others - MISSED_BY_NOBODY == PRIVATE.keys()


@pytest.mark.parametrize("name", PRIVATE)
def test_what_is_private_is_there(name: str, tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert hasattr({"model": model, "config": model.config}[PRIVATE[name]], name)


@pytest.mark.parametrize(("version", "warns"), [("5.24.0", False), ("5.25.0.dev0", True), ("6.0.0", True)])
def test_a_newer_transformers_is_a_warning(version: str, warns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    warning_once.cache_clear()
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
