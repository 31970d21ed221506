"""`qada serve-folder`: a model's files, none of its code, and everything done ahead."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import needle
import pytest
import torch
from models import prompt, tiny
from transformers import AutoModelForCausalLM

from qada_cache import QAdACache, commands
from qada_cache.__main__ import main
from qada_cache.key_moments import defaults
from qada_cache.serving import counters, make_folder

EVIL = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\nraise RuntimeError('code of the model')\n"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model's folder that would have code run, its own and another repository's."""
    folder = tmp_path / "model"
    tiny().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    code = {"AutoModelForCausalLM": "evil.Model", "AutoConfig": "somebody/else--evil.Config"}
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": code, "nested": [{"auto_map": code}]}))
    spelt = json.dumps({"auto_map": code, "eos_token_id": 2}).replace("auto_map", "auto\\u005fmap")
    (folder / "generation_config.json").write_text(spelt)
    (folder / "lines.json").write_text('{"word": "\\u00e9"}\n{}\n')  # no config
    (folder / "evil.py").write_text(EVIL, encoding="utf-8")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/tool_use.jinja").write_text("TOOLS", encoding="utf-8")
    (folder / "additional_chat_templates/evil.py").write_text(EVIL, encoding="utf-8")
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate/generate.py").write_text(EVIL, encoding="utf-8")
    return folder


def test_none_of_the_models_code_is_there(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "served"
    make_folder(model, out)
    assert [str(path.relative_to(out)) for path in out.rglob("*.py")] == ["custom_generate/generate.py"]
    assert "auto_map" not in (out / "config.json").read_text(encoding="utf-8")
    assert json.loads((out / "generation_config.json").read_text(encoding="utf-8")) == {"eos_token_id": 2}
    for name in ("model.safetensors", "lines.json", "additional_chat_templates/tool_use.jinja"):
        assert (out / name).resolve() == model / name
    served, ids = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True), prompt(60)[0]
    settings = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 4}
    wanted = tiny().generate(ids, **settings)
    assert torch.equal(served.generate(ids, **settings)[:, :61], wanted[:, :61])
    assert counters(served)["conversations"] == 1
    assert not list(tmp_path.rglob("ran"))


def test_what_cannot_be_made(model: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no model's folder at .*missing: of a model of the Hub"):
        make_folder(tmp_path / "missing", tmp_path / "served")
    (tmp_path / "model.gguf").touch()
    with pytest.raises(FileNotFoundError, match=r"of a GGUF file, `python -m eval\.convert` makes one"):
        make_folder(tmp_path / "model.gguf", tmp_path / "served")
    make_folder(model, tmp_path / "served")
    with pytest.raises(FileExistsError):
        make_folder(model, tmp_path / "served")
    (tmp_path / "empty").mkdir()  # the next one may hold code
    with pytest.raises(FileExistsError):
        make_folder(model, tmp_path / "empty")
    (model / "config.json").write_text('{"auto_map"')
    with pytest.raises(ValueError, match=r"config\.json is no JSON"):
        make_folder(model, tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.usefixtures("builds_of_others")
def test_the_first_request_finds_everything_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("QADA_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(defaults, "_remembered", {})
    source, out = tmp_path / "model", tmp_path / "to serve"
    shutil.copytree(needle.FOLDER, source, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    assert main(["serve-folder", "--model", str(source), "--out", str(out)]) == 0
    assert f"transformers serve '{out}' --trust-remote-code" in capsys.readouterr().out
    monkeypatch.setattr(defaults, "_remembered", {})  # as in another process

    def collect(*_: object) -> None:
        raise AssertionError("the first request collects moments")

    monkeypatch.setattr(defaults, "_collect", collect)
    QAdACache(AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True))
    assert main(["serve-folder", "--model", str(source), "--out", str(out)]) == 1
    assert "qada serve-folder: " in capsys.readouterr().err


@pytest.mark.parametrize(("error", "status"), [(ValueError, 1), (KeyboardInterrupt, 130)])
def test_a_failure_leaves_no_folder(
    error: type[BaseException], status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: object) -> None:
        raise error

    monkeypatch.setattr(commands, "prepare", fail)
    out = tmp_path / "served"
    assert main(["serve-folder", str(needle.FOLDER), "--out", str(out)]) == status
    assert not out.exists()
    assert needle.FOLDER.exists()
