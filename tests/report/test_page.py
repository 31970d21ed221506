"""The page of `qada report`: its data agree with an observer of our own and with the cache's counters."""

from __future__ import annotations

import json

import pytest
import torch
from byte_tokenizer import TEMPLATE, tokenizer
from models import tiny
from pages import HOSTILE, OPTIONS, Page, make_page, model, read_data, request, unpack
from small_sketch import small_sketch
from transformers import ByT5Tokenizer, DynamicCache

from eval import families
from qada_cache import QAdACache, report
from qada_cache.report.answering import read_tokens
from qada_cache.report.asking import ask
from qada_cache.state.observation import Observation
from qada_cache.versions import pass_cache


@pytest.mark.parametrize("threshold", [0.95, 1.0])
def test_reads_and_bytes_are_those_of_the_cache(threshold: float) -> None:
    """The page's reads and bytes equal those of a cache that this test fills, with its own observer. At a threshold of
    1 everything is read."""
    text = "The quick brown fox jumps over the lazy dog. " * 12
    options = {**OPTIONS, "threshold": threshold}
    with small_sketch(32):
        data = read_data(make_page(text, **options))
        seen: list[Observation] = []
        cache = QAdACache(made := model(), **options)
        cache.observer = seen.append
        asked = ask(tokenizer(), request(text), 2048)
        with torch.inference_mode():
            ids = asked.opening
            answer: list[int] = []
            for _ in range(1 + len(data["answers"][1]["pieces"])):
                logits = made(torch.tensor([ids]), **pass_cache(cache)).logits
                answer.append(int(logits[0, -1].argmax()))
                ids = asked.question if ids is asked.opening else answer[-1:]
    layers, heads, sinks, read = data["layers"], data["heads"], cache.options.sink_tokens, 0
    assert (layers, heads, sinks) == ([0, 1], 2, data["sinks"])
    assert len(seen) == 2 * len(data["passes"]) == 12
    wholes = 0
    for index, one in enumerate(data["passes"]):
        unpacked = unpack(one["packed"], len(layers) * heads)
        needing = 0
        for layer in layers:
            told = seen[2 * index + layer]
            assert told.layer == layer
            assert one["stored"] == sinks + told.bulk_lengths[0]
            assert one["queries"] == (len(asked.question) if index == 0 else 1)
            needing += int(told.flags.any(dim=(2, 3)).sum())
            for head in range(heads):
                tokens = {int(token) for each in told.chosen if each.head == head for token in each.tokens}
                found = unpacked[heads * layer + head]
                wholes += found is None
                assert (found is None) == bool(told.whole[0] and told.whole[0][head])
                if found is not None:
                    assert [position - sinks for position in found] == sorted(tokens)
                read += told.bulk_lengths[0] if found is None else len(found)
        assert one["needing"] == needing
    assert (wholes > 0) == (threshold == 1.0)
    stats = cache.stats()
    token_bytes = 2 * 8 * 4  # keys and values, dims, float32
    assert read * token_bytes == stats.bulk_read_bytes > 0
    everything, ours = (cell["value"] for cell in data["rows"][0]["cells"])
    assert ours * stats.steps == pytest.approx(read * token_bytes + stats.sketch_read_bytes)
    assert everything * stats.steps == pytest.approx(stats.dense_bulk_bytes)
    assert (ours < everything) == (threshold < 1.0)
    held = data["rows"][1]["cells"][1]["value"]
    assert held == stats.device_bytes + stats.host_bytes


def test_figures_are_named_and_counted() -> None:
    data = read_data(make_page("A short text about nothing in particular. " * 8, new_tokens=5))
    rows = {row["what"]: row for row in data["rows"]}
    assert len(rows) == 6
    each = rows["Each further token"]
    assert "Median of 4 and 4" in each["how"]
    assert all(cell["value"] > 0 and "(" in cell["text"] for cell in each["cells"])
    assert "torch " in data["machine"]
    assert "cores" in data["machine"]
    assert data["model"] == "tiny: 0M parameters, 2 layers, 4 query heads, 2 KV heads, float32 on cpu"
    assert data["document"]["left_out"] == 0
    assert 0 <= data["same"] <= 5


def test_what_was_not_measured_is_said() -> None:
    """One token has no further ones, and a text that fits the window no long context."""
    data = read_data(make_page("ab", new_tokens=1, local_tokens=200, sink_tokens=4))
    texts = {row["what"]: [cell["text"] for cell in row["cells"]] for row in data["rows"]}
    assert texts["Each further token"] == ["not measured"] * 2
    assert texts["Long context read for each token of the answer"] == ["not measured"] * 2


def test_layers_and_heads_are_those_that_decide() -> None:
    """The page has the deciding layers of a hybrid model, and all layers of one without a bulk to decide about."""
    hybrid = tiny("gemma3", vocab_size=260, max_position_embeddings=2048)
    data = json.loads(Page(report.report(hybrid, tokenizer(), request("ab " * 99), name="tiny", **OPTIONS)).data)
    assert (data["layers"], data["heads"]) == ([1], 2)
    assert all(len(unpack(each["packed"], 2)) == 2 for each in data["passes"])
    short = read_data(make_page("ab", new_tokens=2, local_tokens=200))
    assert (short["layers"], short["heads"]) == ([0, 1], 2)
    assert [unpack(each["packed"], 4) for each in short["passes"]] == [[[]] * 4] * 2


def test_a_question_longer_than_the_window_is_read_exactly() -> None:
    data = read_data(make_page("words and words " * 20, "why " * 20, new_tokens=3))
    assert data["passes"][0] is None
    assert data["passes"][1] is not None


def test_reads_beyond_the_room_of_a_page_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = read_data(make_page("words and words " * 20))
    sizes = [len(one["packed"]) for one in whole["passes"]]
    monkeypatch.setattr(report, "MOST_BYTES", sum(sizes[:3]))
    cut = read_data(make_page("words and words " * 20))
    assert cut["passes"] == whole["passes"][:3]
    assert len(cut["answers"][1]["pieces"]) == 6


def test_hostile_text_is_text() -> None:
    """It comes back letter by letter, and the page has the elements that it has without it."""
    page = make_page(HOSTILE * 5, HOSTILE)
    found, plain = Page(page), Page(make_page("nothing " * 40))
    data = json.loads(found.data)
    assert "".join(data["document"]["words"]) == HOSTILE * 5
    assert data["question"]["text"] == HOSTILE
    assert data["document"]["name"] == "file <b>"
    assert found.found == plain.found


def test_nothing_is_loaded() -> None:
    """No element names an address, and the browser is told to ask for none."""
    found = Page(page := make_page("nothing " * 40)).found
    assert not [attrs for _, attrs in found if {"src", "href", "srcset", "data", "action"} & set(attrs)]
    (policy,) = [attrs["content"] for tag, attrs in found if tag == "meta" and "http-equiv" in attrs]
    assert str(policy).startswith("default-src 'none';")
    assert "url(" not in page
    assert "@import" not in page
    labelled = {attrs["for"] for tag, attrs in found if tag == "label" and "for" in attrs}
    assert {"token", "head"} <= labelled


@pytest.mark.parametrize("template", [TEMPLATE, None])
def test_words_are_the_document_cut_by_tokens(template: str | None) -> None:
    """A character of several tokens belongs to the first; what is cut off is counted."""
    made, text = tokenizer(template=template), "caf\u00e9 \U0001f600 au lait"
    asked = ask(made, request(text), None)
    assert "".join(asked.words) == text
    assert len(asked.words) == len(text.encode())
    own = asked.opening[asked.first : asked.first + len(asked.words)]
    assert made.decode(own) == text
    cut = ask(made, request(text, tokens=7), None)
    assert ("".join(cut.words), cut.left_out) == ("caf\u00e9 ", len(text.encode()) - 6)
    room = len(asked.opening) + len(asked.question) + 6 - 3
    fitted = ask(made, request(text), room)
    assert "".join(fitted.words) == text[:-3]
    assert len(fitted.opening) + len(fitted.question) + 6 == room


def test_what_cannot_be_asked_is_refused() -> None:
    with pytest.raises(ValueError, match="the document is empty"):
        ask(tokenizer(), request(" \n"), None)
    with pytest.raises(ValueError, match="the question is empty"):
        ask(tokenizer(), request("a", " "), None)
    with pytest.raises(ValueError, match=r"a question of \d+ tokens and an answer of 6 leave no room .* 100 positions"):
        ask(tokenizer(), request("a", "Why? " * 30), 100)
    with pytest.raises(ValueError, match="ByT5Tokenizer does not say which characters a token is of"):
        ask(ByT5Tokenizer(), request("a"), None)
    with pytest.raises(ValueError, match="chat template leaves out what a user says"):
        ask(tokenizer(template="nothing"), request("a"), None)
    for wrong in ("{{ raise_exception('A system message is needed') }}", "{% if %}"):
        with pytest.raises(ValueError, match=r"chat template cannot be filled in \((A system|Expected an expression)"):
            ask(tokenizer(template=wrong), request("a"), None)
    with pytest.raises(ValueError, match="no word of the document fits 1 tokens"):
        ask(tokenizer(template=None), request("\U0001f600", tokens=1), None)


def test_a_question_to_a_model_that_forgets_its_states() -> None:
    """Mamba's first kind does, in calls of several tokens behind the document: those are read one by one."""
    made = families.build("jamba")[0].eval()
    document, question = ([1 + (7 * place) % 90 for place in range(count)] for count in (40, 6))
    with torch.inference_mode():
        wanted = made(torch.tensor([document + question]), use_cache=False).logits[0, -1].argmax()
        for cache in (DynamicCache(config=made.config), QAdACache(made, **families.EXACT)):
            read_tokens(made, document, cache)
            assert read_tokens(made, question, cache) == wanted
