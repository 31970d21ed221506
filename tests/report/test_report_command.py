"""`qada report`: from a model's name, a text and a question to a page, or one line that says what is wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path

import needle
import pytest

from qada_cache import report as report_module
from qada_cache.__main__ import main

MODEL = str(needle.FOLDER)


def run(folder: Path, *arguments: str) -> int:
    return main(["report", MODEL, "--text", str(folder / "text.txt"), "--out", str(folder / "page.html"), *arguments])


def data_of(folder: Path) -> dict:
    page = (folder / "page.html").read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page)
    assert found is not None
    return json.loads(found[1])


def test_a_page_of_two_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both find the word that was hidden; the page names no folder of the machine."""
    prompt = needle.make_prompt(tokens=1500, questions=1)
    (tmp_path / "text.txt").write_text(prompt.context)
    assert run(tmp_path, "--ask", prompt.questions[0], "--new-tokens", "3", "--moments", "current") == 0
    said = capsys.readouterr().out
    assert re.search(rf"wrote {re.escape(str(tmp_path / 'page.html'))}, \d+\.\d MiB", said)
    data = data_of(tmp_path)
    assert [each["cache"] for each in data["answers"]] == ["DynamicCache", "QAdACache"]
    assert data["question"]["text"] == prompt.questions[0]
    assert "".join(data["document"]["words"]) == prompt.context
    assert data["document"]["name"] == "text.txt"
    assert data["cache"].startswith("QAdACache(llama, 4 of 4 layers")
    assert len(data["passes"]) == len(data["answers"][1]["pieces"]) <= 3
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert str(tmp_path) not in page
    assert MODEL not in page


def test_a_long_text_is_cut_and_options_are_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bar comes to its end, although answers end early."""
    monkeypatch.setattr(report_module, "make_end_check", lambda *_: lambda tokens: True)
    (tmp_path / "text.txt").write_text(text := needle.haystack(tokens=900))
    options = ["--tokens", "300", "--new-tokens", "2", "--threshold", "0.5", "--token-threshold", "2"]
    assert run(tmp_path, "--ask", "ask tiger", "--moments", "current", *options) == 0
    data = data_of(tmp_path)
    assert data["document"]["tokens"] == len(data["document"]["words"]) == 300
    assert data["document"]["left_out"] == len(text.split()) - 300
    assert text.startswith("".join(data["document"]["words"]))
    assert "token threshold 2, " in data["cache"]
    assert "8/8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ask", "why", "--tokens", "0"], "--tokens must be at least 1, got 0"),
        (["--ask", "why", "--new-tokens", "0"], "--new-tokens must be at least 1, got 0"),
        (["--ask", "why", "--out", "/nowhere/x.html"], "--out: there is no folder /nowhere"),
        (["--ask", "why", "--out", "{}"], "--out: {} is a folder, name a file in it"),
        (["--ask", "why", "--text", "{}/none.txt"], "--text: there is no file .*none.txt"),
        (["--ask", "why", "--text", "{}/bytes"], "--text: {}/bytes is no text file in UTF-8"),
        (["--ask", "why", "--text", "{}/blank"], "--text: {}/blank is empty"),
        (["--ask", " "], "the question is empty: give a text"),
        (
            ["--ask", "why", "--new-tokens", "99999"],
            r"an answer of 99999 leave no room for a document in the model's 32768 positions",
        ),
        (["--ask", "why", "--threshold", "3"], r"threshold must be in \[0, 1\], got 3.0"),
    ],
)
def test_errors_are_one_line_and_leave_no_page(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("the old farmer walks slowly")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "blank").write_text(" \n")
    assert run(tmp_path, *(argument.format(tmp_path) for argument in arguments)) == 1
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("qada report: ")]
    assert len(error) == 1
    assert re.search(message.format(tmp_path), error[0])
    assert not (tmp_path / "page.html").exists()
