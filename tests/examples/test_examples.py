"""Every script of `examples` runs as it stands, on the tests' models; and the notebook, whose outputs are committed."""

from __future__ import annotations

import functools
import io
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import needle
import pytest
import torch
from readable import readable_model

import qada_cache
from qada_cache.__main__ import main
from qada_cache.key_moments.prompts import ARTICLE
from qada_cache.versions import CACHE

EXAMPLES = Path(qada_cache.__file__).parent.parent / "examples"
TEMPLATE = "{% for message in messages %}{{ message.content + ' ' }}{% endfor %}"  # for a model of words
PROMPT = needle.make_prompt(tokens=1500, facts=8, questions=2)


@pytest.fixture
def model(tmp_path: Path) -> str:
    """The needle model's folder, with a chat template."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in needle.FOLDER.glob("*.*"):
        if file.suffix != ".py":
            (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return str(folder)


@pytest.fixture
def document(tmp_path: Path) -> str:
    path = tmp_path / "document.txt"
    path.write_text(PROMPT.context, encoding="utf-8")
    return str(path)


def run(source: str, name: str, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> dict[str, Any]:
    """Run a script; return its global names. Before transformers 5.24 its `cache=` has another name, as README says."""
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    left: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(re.sub(r"\bcache=(own|cache|watched)\b", rf"{CACHE}=\1", source), name, "exec"), left)
    return left


def example(name: str, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> dict[str, Any]:
    return run((EXAMPLES / name).read_text(encoding="utf-8"), name, monkeypatch, *arguments)


def test_a_chat_answers_and_reads_what_is_new(
    model: str, document: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(PROMPT.questions)))
    example("chat.py", monkeypatch, "--model", model, "--document", document, "--new-tokens", "1")
    said = capsys.readouterr().out.splitlines()
    assert [said[0], said[2]] == PROMPT.answers
    assert said[1] == "[1501 of 1501 tokens were new]"  # without `<s>`: the template adds none
    assert said[3] == "[3 of 1504 tokens were new]"  # the answer and the next question


@pytest.mark.usefixtures("builds_of_others")
def test_many_questions_read_the_document_once(
    model: str, document: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QADA_HOME", str(tmp_path / "home"))
    asked = ["--model", model, "--document", document, "--new-tokens", "1", *PROMPT.questions]
    answers = [f"{question} {answer}" for question, answer in zip(PROMPT.questions, PROMPT.answers, strict=True)]
    for found in (0, 1499):
        example("many_questions.py", monkeypatch, *asked)
        assert capsys.readouterr().out.splitlines() == [f"{found} of 1500 tokens were stored", *answers]


def find_port() -> str:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return str(free.getsockname()[1])


def test_a_server_answers(
    model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("openai", reason="needs what `pip install 'transformers[serving]'` brings")
    port = find_port()
    monkeypatch.setenv("PATH", os.defpath)  # the environment need not be active
    monkeypatch.setenv("PYTHONPATH", f"{EXAMPLES.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("QADA_KERNELS", "torch")  # which need not be built
    for name in ("HF_HOME", "QADA_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    questions = [f"{PROMPT.context} {PROMPT.questions[0]}", PROMPT.questions[1]]
    example("server.py", monkeypatch, "--model", model, "--port", port, "--new-tokens", "1", *questions)
    printed = capfd.readouterr()
    assert re.findall(r"^(\w+)\n\[", printed.out, re.MULTILINE) == PROMPT.answers
    assert "1501 of 1504 prompt tokens were kept" in printed.out + printed.err


def test_a_server_that_cannot_serve(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else's server is asked in its place, and nobody waits for one that has ended."""
    pytest.importorskip("openai", reason="needs what `pip install 'transformers[serving]'` brings")
    with socket.create_server(("localhost", 0)) as taken, pytest.raises(OSError, match="in use"):
        example("server.py", monkeypatch, "--model", model, "--port", str(taken.getsockname()[1]), "Where?")
    ended = functools.partial(subprocess.Popen, [sys.executable, "-c", "raise SystemExit(3)"])
    monkeypatch.setattr(subprocess, "Popen", lambda command: ended())
    with pytest.raises(SystemExit, match="the server has ended"):
        example("server.py", monkeypatch, "--model", model, "--port", find_port(), "Where?")


def test_scores_of_both_caches(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed (pip install qada-cache[eval])")
    from lm_eval import evaluator

    from qada_cache.lm_eval import startup

    startup.install()  # for an environment in which the package is not installed
    # To index all of lm-eval's own tasks, too, takes seconds, twice.
    tasks = {"include_path": Path(qada_cache.__file__).parent / "lm_eval" / "tasks", "include_defaults": False}
    monkeypatch.setattr(evaluator, "TaskManager", functools.partial(evaluator.TaskManager, **tasks))
    example("scores.py", monkeypatch, "--model", str(needle.FOLDER), "--tokens", "1024", "--documents", "1")
    said = re.findall(r"^(\w+): prose_niah [\d.]+, (\d+)% of", capsys.readouterr().out, re.MULTILINE)
    assert [cache for cache, _ in said] == ["DynamicCache", "qada"]
    assert said[0][1] == "100"


@pytest.mark.usefixtures("default_bits", "builds_of_others")
def test_a_tuned_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command is run here, where kernels are known: `test_cli.py` has it as a process."""
    readable_model(tmp_path / "model", max_position_embeddings=2048)
    (tmp_path / "text.txt").write_text(ARTICLE.read_text() * 12)
    monkeypatch.setenv("QADA_HOME", str(tmp_path / "home"))
    asked: list[list[str]] = []

    def run_here(command: list[str], check: bool) -> subprocess.CompletedProcess[bytes]:
        asked.append(command[:4])
        return subprocess.CompletedProcess(command, main(command[3:]))

    monkeypatch.setattr(subprocess, "run", run_here)
    given = ["--model", str(tmp_path / "model"), "--text", str(tmp_path / "text.txt"), "--kl", "50"]
    left = example("tune.py", monkeypatch, *given, "--tokens", "1400")
    assert asked == [[sys.executable, "-m", "qada_cache", "tune"]]
    assert left["cache"].options.tuned
    assert re.search(r"^threshold=[\d.]+, token_threshold=[\d.]+$", capsys.readouterr().out, re.MULTILINE)


def test_every_script_is_tested() -> None:
    tests = Path(__file__).read_text(encoding="utf-8")
    assert [path.name for path in EXAMPLES.glob("*.py") if f'example("{path.name}"' not in tests] == []


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda path: path.name)
def test_a_notebook(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells run in their order, with a tiny model in the place of theirs; it was run so before it was committed."""
    pytest.importorskip("matplotlib", reason="the notebook draws")
    from eval.shared import language_model

    cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} <= {"stream", "display_data", "execute_result"}
    assert [output for output in outputs if output.get("name") == "stderr"] == []
    monkeypatch.setattr(language_model, "load", lambda name: (needle.load_model(), needle.load_tokenizer()))
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", __import__("unittest.mock").mock.MagicMock())
    with torch.no_grad():
        run("\n".join("".join(cell["source"]) for cell in cells), path.name, monkeypatch)
