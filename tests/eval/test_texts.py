"""Texts that are read: prose and code to be continued, and documents with facts, put to a model as a chat."""

from __future__ import annotations

import inspect
import itertools
import json
import re
from pathlib import Path
from types import SimpleNamespace

import needle
import pytest
import torch
from byte_tokenizer import tokenizer

pytest.importorskip("lm_eval", reason="trials take documents from lm-eval")
from eval import trials
from eval.shared import conversation, texts
from eval.shared.conversation import WITH_FACTS, Form, fit
from eval.shared.texts import Turn, draw_facts, make_question_dense, plant, read_reference


def test_pieces_of_prose_do_not_overlap(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(needle.make_prompt(tokens=1000, seed=1).context)
    tokenizer = needle.load_tokenizer()
    pieces = list(texts.read_prose(tokenizer, length=200, following=20, text=text))
    assert [piece.index for piece in pieces] == [0, 1, 2, 3]
    whole = tokenizer(text.read_text(), return_tensors="pt").input_ids  # begun by one token, as every piece is
    assert all(piece.prompt[0, 0] == tokenizer.bos_token_id for piece in pieces)
    joined = torch.cat([part for piece in pieces for part in (piece.prompt[:, 1:], piece.answer)], dim=1)
    assert torch.equal(joined, whole[:, 1:877])
    assert all(piece.prompt.shape == (1, 200) and piece.answer.shape == (1, 20) for piece in pieces)
    assert {piece.task for piece in pieces} == {"prose:text"}


class PerByte:
    """One token a byte."""

    bos_token_id = None

    def __call__(self, text: str, **_: object) -> SimpleNamespace:
        return SimpleNamespace(input_ids=list(text.encode()))


def test_code_follows_what_it_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole modules of this Python: what is continued stands last, what it imports first stands nearest."""
    monkeypatch.setattr(texts, "MODULES", ("no_such_module", "sys", "json.decoder", "this"))  # the last is too short
    options = SimpleNamespace(following=30, documents=2, text=None)
    (piece,) = trials.read_documents(options, PerByte(), "code", 40000)  # type: ignore[arg-type]
    assert (piece.index, piece.prompt.shape, piece.answer.shape) == (2, (1, 40000), (1, 30))
    text, after = (bytes(part[0].tolist()).decode() for part in (piece.prompt, piece.answer))
    own = inspect.getsource(json.decoder)
    front, name, given = text.rpartition("# json/decoder.py\n")
    assert name
    assert own.startswith(given + after)
    assert len(given) == pytest.approx(len(own) / 2, abs=20)
    scanner, regular = (inspect.getsource(module) for module in (json.scanner, re))
    assert front.endswith(f"# json/scanner.py\n{scanner}\n\n# re/__init__.py\n{regular}\n\n")


def test_chat_is_what_the_template_makes() -> None:
    form, turns = Form(tokenizer(), "Read this."), [Turn("One?", begun="It is"), Turn("Two?")]
    end = form.tokenizer.convert_tokens_to_ids("<|end|>")
    assert form.stop == [end]
    answer = form.tokenizer(" a. ").input_ids
    parts = form.make_opening("A text.") + form.make_turn(turns[0], after=None) + answer
    messages = [
        {"role": "user", "content": "Read this.\n\nA text.\n\nOne?"},
        {"role": "assistant", "content": "It is a. "},
        {"role": "user", "content": "Two?"},
    ]
    whole = form.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert form.tokenizer.decode(parts + form.make_turn(turns[1], after=answer[-1])) == whole
    assert (
        form.tokenizer.decode([*parts, end, *form.make_turn(turns[1], after=end)]) == whole
    )  # ended by the model itself


def test_chats_as_documents() -> None:
    """The template of a whole chat that was right so far, asked every fact once; the last question is read alone."""
    words = tokenizer()
    chats = list(conversation.read_chats(words, length=3000, count=7))
    for index, chat in enumerate(chats):
        turns = draw_facts(index)
        asked = [*turns[index % 6 + 1 :], *turns[: index % 6 + 1]]
        introduced, _, document = words.decode(chat.prompt[0]).partition("<|start|>user\n")[2].partition("\n\n")
        assert introduced == WITH_FACTS
        document = document.partition(f"\n\n{asked[0].question}<|end|>")[0]
        assert all(turn.fact in document for turn in turns)
        messages = [{"role": "user", "content": f"{introduced}\n\n{document}\n\n{asked[0].question}"}]
        for before, turn in itertools.pairwise(asked):
            messages.append({"role": "assistant", "content": before.fact})
            messages.append({"role": "user", "content": turn.question})
        whole = words.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) + asked[-1].begun
        assert words.decode(chat.prompt[0]) == whole
        assert (chat.task, chat.index, chat.expected) == ("chat, sparse question", index, asked[-1].expected)
        assert words.decode(chat.answer[0]) == f" {chat.expected}"
        assert words.decode(chat.prompt[0, -chat.question :]).startswith(
            f"<|end|>\n<|start|>user\n{asked[-1].question}"
        )
        assert make_question_dense(chat).task == "chat"
        assert 2900 < chat.prompt.shape[1] <= 3000


def test_without_a_template_questions_are_plain() -> None:
    form, turns = Form(tokenizer(template=None), "Read this."), [Turn("One?", begun="It is"), Turn("Two?")]
    ids = form.make_opening("A text.") + form.make_turn(turns[0], after=None) + form.make_turn(turns[1], after=7)
    assert form.tokenizer.decode(ids) == (
        "Read this.\n\nA text.\n\nQuestion: One?\nAnswer: It is\n\nQuestion: Two?\nAnswer:"
    )


@pytest.mark.parametrize("tokens", [1500, 4000])
def test_facts_are_in_the_text_and_the_text_fits(tokens: int) -> None:
    form, turns = Form(tokenizer(), WITH_FACTS), draw_facts(3)
    opening, text, cut = fit(form, read_reference(), turns, tokens=tokens)
    assert cut
    assert tokens - 120 < len(opening)  # words are cut whole, and lines of dashes are long ones
    assert len(opening) <= tokens
    assert text in form.tokenizer.decode(opening)
    places = [text.index(turn.fact) for turn in turns]
    assert places == sorted(places)
    assert text.replace("\n", " ")[:100] == read_reference().replace("\n", " ")[:100]
    assert draw_facts(3) == turns != draw_facts(4)
    assert all(turn.is_right(turn.fact) for turn in turns)


def test_a_text_that_fits_is_not_cut() -> None:
    opening, text, cut = fit(Form(tokenizer(), ""), "All of it, every word.", [Turn("Why?")], tokens=300)
    assert text == "All of it, every word."
    assert not cut
    assert len(opening) < 300
    with pytest.raises(ValueError, match="leave no room for a document"):
        fit(Form(tokenizer(), ""), "All of it, every word.", [Turn("Why?")], tokens=10)


def test_facts_go_between_paragraphs_sentences_or_words() -> None:
    assert plant("a b\n\nc d\n\ne f\n\ng h", ["X."]) == "a b\n\nc d\n\nX.\n\ne f\n\ng h"
    assert plant("A b.\nC d. E f. G h.", ["X."]) == "A b.\nC d.\n\nX.\n\nE f. G h."
    assert plant("a b c d", ["X."]) == "a b\n\nX.\n\nc d"
    assert plant("a b c", ["X.", "Y.", "Z.", "W."]).split() == ["a", "X.", "b", "Y.", "c", "Z.", "W."]
    assert plant("All of it.", []) == "All of it."


def test_right_is_what_says_the_expected() -> None:
    turn = Turn("When?", expected="14 March 1897")
    assert turn.is_right("It was on 14\nmarch 1897.")
    assert not turn.is_right("14 March 18975")
    assert not turn.is_right("4 March 1897")
    assert not Turn("Why?").is_right("Because.")
