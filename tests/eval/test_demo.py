"""The demo: what it reads, how it asks, and when it fails. On tiny models, with stubbed answers where they count."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import needle
import pytest
import torch
from byte_tokenizer import TEMPLATE, tokenizer
from models import tiny
from torch import Tensor
from transformers import DynamicCache

from eval import demo
from eval.shared import conversation, tables
from eval.shared.conversation import WITH_FACTS, Form, Told, converse, fit
from eval.shared.texts import Turn, draw_facts, read_reference
from qada_cache import QAdACache

NEEDLE = str(needle.FOLDER)


class Watched:
    """A tiny model's token embedding, watched: every token id that the model was given."""

    def __init__(self, family: str) -> None:
        self.model = tiny(family, vocab_size=260, max_position_embeddings=4096)
        self.read: list[int] = []
        self.model.get_input_embeddings().register_forward_pre_hook(self._note)

    def _note(self, _: torch.nn.Module, inputs: tuple[Tensor]) -> None:
        self.read += inputs[0][0].tolist()


@pytest.mark.parametrize("template", [TEMPLATE, None])
@pytest.mark.parametrize("kind", ["dynamic", "qada"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_nothing_is_read_twice(template: str | None, kind: str, family: str) -> None:
    """The tokens that the model was given are the whole chat, each once, in order; all but the last one generated."""
    watched = Watched(family)
    form, turns = Form(tokenizer(template=template), WITH_FACTS), [*draw_facts(0)[:3], Turn("And this?")]
    opening, _, _ = fit(form, read_reference(), turns, tokens=700)
    cache = QAdACache(watched.model, moments="current") if kind == "qada" else DynamicCache(config=watched.model.config)
    told = converse(watched.model, form, opening, turns, cache, new_tokens=5)
    assert len(watched.read) == told.read == cache.get_seq_length()
    assert watched.read[: len(opening)] == opening
    text = form.tokenizer.decode(watched.read)
    places = [text.index(turn.question + form._closing) for turn in turns]
    assert places == sorted(places)
    assert all(turn.begun in text[place:] for turn, place in zip(turns, places, strict=True))
    assert len(told.answers) == 4
    assert told.decoded == told.generated - 4
    assert (told.stats is not None) == (kind == "qada")
    assert told.device_bytes > 0


def stub(monkeypatch: pytest.MonkeyPatch, wrong: dict[str, set[int]]) -> None:
    """Every planted question is answered right, but for those whose number stands under the method's name."""

    def answered(model: object, form: object, opening: object, turns: list[Turn], cache: Any, **_: Any) -> Told:
        criterion = cache.options.criterion if isinstance(cache, QAdACache) else ""
        method = {"": demo.FULL, "local": demo.WINDOW, "gaussian": demo.OURS}[criterion]
        if method == demo.OURS and not cache.options.token_threshold:
            method = demo.WHOLE
        answers = [
            "no idea" if index in wrong.get(method, ()) else f"{turn.expected}." for index, turn in enumerate(turns)
        ]
        return Told(answers, generated=len(turns), stats=cache.stats() if criterion else None)

    monkeypatch.setattr(demo, "converse", answered)


@pytest.mark.parametrize(
    ("wrong", "status"),
    [
        ({}, 0),
        ({demo.OURS: {2}}, 1),
        ({demo.OURS: {2}, demo.FULL: {2}}, 0),
        ({demo.OURS: {1, 2}, demo.FULL: {2, 3}}, 1),
        ({demo.WINDOW: set(range(9)), demo.FULL: {1}}, 0),
        ({demo.OURS: {7}}, 0),  # a question about the document itself
    ],
)
def test_status_says_whether_answers_were_lost(
    wrong: dict[str, set[int]],
    status: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stub(monkeypatch, wrong)
    out = tmp_path / "demo.csv"
    assert demo.main(["--model", NEEDLE, "--tokens", "900", "--seed", "2", "--out", str(out)]) == status
    printed = capsys.readouterr().out
    assert ("FAILED: QAdACache missed 1 that DynamicCache answers:" in printed) == bool(status)
    assert max(map(len, printed.splitlines())) <= 120
    facts = len(draw_facts(2))
    rows = {row["method"]: row for row in tables.read(out)}
    for method, row in rows.items():
        missed = {index for index in wrong.get(method, ()) if index < facts}
        assert row["right"] == f"{facts - len(missed)}/{facts}"
    assert str(needle.FOLDER.parent) not in printed + out.read_text()  # no paths of the machine
    for turn in draw_facts(2):
        assert turn.question in printed
        assert turn.fact in " ".join(printed.split())


def test_asked_questions_never_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stub(monkeypatch, {demo.OURS: {0, 1}})
    (tmp_path / "mine.txt").write_text("Some words of mine.")
    mine = ["--model", NEEDLE, "--document", str(tmp_path / "mine.txt")]
    assert demo.main([*mine, "--ask", "What is mine?", "--ask", "And yours?"]) == 0
    printed = capsys.readouterr().out
    assert "1. What is mine?" in printed
    assert "2. And yours?" in printed
    assert "Planted" not in printed
    assert "mine.txt" in printed
    assert "was cut" not in printed
    assert demo.main([*mine, "--ask", "What is mine?", "--facts"]) == 1
    (tmp_path / "mine.txt").write_text("Some words of mine. " * 9000)
    assert demo.main([*mine, "--ask", "What is mine?"]) == 0
    assert "The document was cut" in capsys.readouterr().out
    assert demo.main([*mine, "--ask", "What is mine?", "--tokens", "500"]) == 0
    assert "The document was cut: 500 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "/nowhere"], "--model: "),
        (["--dtype", "int8"], "--dtype: invalid choice"),
        (["--threshold", "1.5"], "--threshold: invalid share .a number in .0, 1.. value: '1.5'"),
        (["--threshold", "nan"], "--threshold: invalid share"),
        (["--tokens", "0"], "--tokens: invalid count"),
        (["--tokens", "1000000"], "--tokens: 1000000 and .* for the chat are more than the model's "),
        (["--tokens", "20"], "--tokens: 20 tokens leave no room for a document with 6 facts"),
        (["--new-tokens", "1000000"], "the questions and answers alone take"),
        (["--document", "{}/none", "--ask", "What?"], "--document: {}/none: No such file"),
        (["--document", "{}", "--ask", "What?"], "--document: {}: Is a directory"),
        (["--document", "{}/empty", "--ask", "What?"], "--document: {}/empty is empty"),
        (["--document", "{}/bytes", "--ask", "What?"], "--document: {}/bytes is not a text file"),
        (["--document", "{}/words"], "--document needs questions"),
        (["--ask", " "], "--ask: a question is empty"),
        (["--out", "{}/no/x.csv"], "--out: there is no folder {}/no"),
    ],
)
def test_wrong_arguments_are_one_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "words").write_text("Some words.")
    filled = [argument.replace("{}", str(tmp_path)) for argument in arguments]
    with pytest.raises(SystemExit, match="2"):
        demo.main(["--model", NEEDLE, *filled])
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    assert re.search(message.replace("{}", str(tmp_path)), line)


def test_a_document_leaves_room_for_the_chat(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The tokens that every method reads, with the longest answers, are no more than the model's positions."""
    model, words = tiny(vocab_size=260, max_position_embeddings=1200), tokenizer()
    monkeypatch.setattr(demo.language_model, "load", lambda *_, **__: (model, words))
    (tmp_path / "long.txt").write_text("Some words of mine. " * 900)
    read = []

    def watched(*arguments: Any, **options: Any) -> Told:
        read.append(conversation.converse(*arguments, **options).read)
        return Told(["", ""], stats=None)

    monkeypatch.setattr(demo, "converse", watched)
    asked = ["--ask", "What is mine?", "--ask", "And what is yours?"]
    assert demo.main(["--document", str(tmp_path / "long.txt"), "--new-tokens", "9", *asked]) == 0
    assert 1150 < max(read) <= 1200


@pytest.mark.slow
def test_pretrained_model(capsys: pytest.CaptureFixture[str]) -> None:
    """The shortened run that CI does."""
    pytest.importorskip("gguf")
    assert demo.main(["--tokens", "2048"]) == 0
    assert "SmolLM2-135M" in capsys.readouterr().out
