"""Ways of deciding tried side by side: those of QAdACache decide as it does."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from compilers import needs_compiler, needs_vectors
from drawn import random
from models import prompt, tiny
from small_sketch import small_sketch
from transformers import DynamicCache, PreTrainedModel

pytest.importorskip("lm_eval", reason="trials take documents from lm-eval")
import needle

from eval import trials
from eval.shared import deciding, texts
from eval.shared.selecting import list_prompt_ways
from eval.shared.tables import read
from eval.shared.texts import Document
from eval.shared.ways import Way
from qada_cache import KeyMoments, QAdACache
from qada_cache.kernels.cpu import selected_prompt
from qada_cache.sketch import Layout
from qada_cache.versions import pass_cache

Known = dict[str, KeyMoments]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny()


@pytest.fixture(scope="module")
def document() -> Document:
    ids = prompt(320)[0]
    return Document("prose", 290, 0, ids[:, :290], ids[:, 290:])


@pytest.fixture(scope="module")
def known(model: PreTrainedModel) -> dict[str, KeyMoments]:
    return {"random-words": KeyMoments.collect(model, None, "random-tokens", tokens=200, progress=False)}


def rows_of(model: PreTrainedModel, document: Document, known: Known, *tried: Way) -> list[dict[str, str]]:
    from tqdm import tqdm

    return list(trials.run_trial(model, needle.load_tokenizer(), document, list(tried), known, tqdm(disable=True)))


@pytest.mark.parametrize("rule", ["any", "head"])
@pytest.mark.parametrize("moments", ["current", "random-words", "current+random-words"])
def test_a_way_is_a_cache_used_token_by_token(
    rule: str, moments: str, model: PreTrainedModel, document: Document, known: Known
) -> None:
    way = Way("qada", moments, rule, 0.4)
    (row,) = rows_of(model, document, known, way)
    options = trials.make_cache_options(way, known)
    cache, full = QAdACache(model, **options), DynamicCache(config=model.config)
    ids = torch.cat([document.prompt, document.answer], dim=1)
    losses, same = [], []
    with torch.no_grad():
        for store in (cache, full):
            model(ids[:, :289], **pass_cache(store))
        for place in range(289, 319):
            found, true = (
                model(ids[:, place : place + 1], **pass_cache(store)).logits[0, -1].double().log_softmax(-1)
                for store in (cache, full)
            )
            losses.append(float((true.exp() * (true - found)).sum()))
            same.append(bool(found.argmax() == true.argmax()))
    assert float(row["kl"]) == pytest.approx(sum(losses) / 30, abs=2e-4)
    assert float(row["top1"]) == pytest.approx(sum(same) / 30, abs=0.034)
    assert 0 < float(row["kv_read"]) < 1
    assert float(row["kv_read"]) == pytest.approx(1 - cache.stats().kv_sparsity, abs=0.02)


def test_full_attention_loses_nothing(model: PreTrainedModel, document: Document, known: Known) -> None:
    exact, local = rows_of(model, document, known, Way("qada", "current", "any", 1.0), Way("local"))
    assert float(exact["kl"]) == pytest.approx(0, abs=1e-6)
    assert (exact["top1"], exact["kv_read"], exact["q_local"]) == ("1.0000", "1.0000", "0.0000")
    assert float(local["kl"]) > 1e-3
    assert (local["kv_read"], local["q_local"]) == ("0.0000", "1.0000")


def test_reading_some_tokens(model: PreTrainedModel, document: Document, known: Known) -> None:
    """All of them are full attention; the best few lose less than none, and less than as many of pages."""
    every, few, paged, local = rows_of(
        model, document, known, Way("dense", read="true, 1"), Way("dense", read="true, 0.05"),
        Way("dense", read="pages of 16, 0.05"), Way("local"),
    )  # fmt: skip
    assert float(every["kl"]) == pytest.approx(0, abs=1e-6)
    assert 0 < float(few["kl"]) < min(float(paged["kl"]), float(local["kl"]))
    assert [row["bytes_read"] for row in (every, few, paged, local)] == ["1.0000", "0.0500", "0.1125", "0.0000"]
    assert few["kv_read"] == "1.0000"


def test_the_product_s_way_of_reading_tokens(model: PreTrainedModel, document: Document, known: Known) -> None:
    """All tokens are full attention, and cost the sketch on top; local heads read neither."""
    with small_sketch(32):
        every, some, gated, whole = rows_of(
            model, document, known, Way("dense", "current", read="sketch of 2 bits, 1e-30"),
            Way("dense", "current", read="sketch of 2 bits, 2.0"),
            Way("qada", "current", "any", 0.4, "sketch of 2 bits, 2.0"), Way("qada", "current", "any", 0.4),
        )  # fmt: skip
    assert float(every["kl"]) == pytest.approx(0, abs=1e-6)
    dim, stored = model.config.head_dim, document.prompt.shape[1] - 1 - 128  # of which nothing is flushed later
    words = Layout.from_bits(dim, 2).count
    sketch_read_bytes = stored * (4 * words + 1) + (5 * dim + 4) + dim * (4 * 4 + dim // 2)  # tokens, one segment, once
    assert float(every["bytes_read"]) == pytest.approx(1 + sketch_read_bytes / (stored * 4 * dim), abs=1e-3)
    assert float(some["bytes_read"]) < 0.5
    assert float(some["kl"]) > 0
    assert float(gated["bytes_read"]) < min(float(some["bytes_read"]), float(whole["bytes_read"]))


def test_pages_are_bounded_by_what_they_hold() -> None:
    query, keys = random(1, 2, 5, 16), random(1, 2, 37, 16, seed=1)
    bound, true = deciding.estimate("pages of 8", query, keys), deciding.estimate("true", query, keys)
    assert bound.shape == true.shape
    assert (bound >= true - 1e-5).all()
    one = deciding.estimate("pages of 1", query, keys)
    torch.testing.assert_close(one, true)


def test_a_group_chooses_together() -> None:
    """Two heads of a group want a token each: with room for two, both are read, by both."""
    scores = torch.zeros(1, 1, 2, 20)  # two heads, a query
    scores[0, 0, 0, 3] = scores[0, 0, 1, 11] = 9.0
    chosen = deciding.choose(scores, 2, 0.1)
    assert chosen.nonzero()[:, 2:].tolist() == [[0, 3], [0, 11], [1, 3], [1, 11]]


def test_bytes_of_ways() -> None:
    assert deciding.find_sketch_share("true") == 0
    assert deciding.find_sketch_share("pages of 16") == 1 / 16
    assert deciding.split("pages of 16, 0.05") == ("pages of 16", 0.05)
    assert deciding.split("") == ("", 1.0)


def test_answers_are_those_of_full_attention(model: PreTrainedModel, document: Document, known: Known) -> None:
    """Its own words, as far as the expected ones; a cache that reads everything says the same."""
    tokenizer = needle.load_tokenizer()
    with torch.no_grad():
        given = model.generate(document.prompt, max_new_tokens=6, do_sample=False)[:, 290:]
    expected = tokenizer.decode(given[0, 2:4])
    asked = Document("task", 290, 0, document.prompt, given[:, 2:4], expected)
    exact, local = rows_of(model, asked, known, Way("qada", "current", "any", 1.0), Way("local"))
    assert (exact["right"], exact["same"], exact["tokens"]) == ("1", "1", "4")
    assert (local["right"], local["same"], local["found"], exact["found"]) == ("1", "0", "0", "1")
    wrong = Document("task", 290, 0, document.prompt, given[:, 2:4], "nothing of the kind")
    (row,) = rows_of(model, wrong, known, Way("qada", "current", "any", 1.0))
    assert (row["right"], row["same"], row["found"], row["tokens"]) == ("0", "1", "0", str(2 + deciding.SPARE))
    place = {"model": "m", "task": "task", "length": "290"} | {k: str(v) for k, v in asdict(Way("local")).items()}
    made = [place | {"document": str(index)} | measured for index, measured in enumerate((exact, local, row))]
    (summed,) = deciding.summarize([line | {"criterion": "local", "moments": "", "threshold": "0"} for line in made])
    state = trials.make_exact_cache(model)
    deciding.prefill(model, asked, state)
    of_local = deciding.generate(model, asked, state.fork(**trials.make_cache_options(Way("local"), known)))
    elsewhere = replace(asked, expected=tokenizer.decode(of_local[0]))
    (row,) = rows_of(model, elsewhere, known, Way("local"))
    assert (row["right"], row["same"], row["found"]) == ("0", "0", "1")  # what full attention does not find
    assert (summed["documents"], summed["found"], summed["also_found"]) == (3, "1/2", "0/1")  # full attention: 2 of 3


@pytest.mark.parametrize("family", ["gemma3", "qwen3_next"])
def test_every_way_on_models_of_other_kinds(family: str, document: Document) -> None:
    """Sliding windows or linear attention beside full attention; nothing about a model is assumed."""
    model = tiny(family)
    collected = KeyMoments.collect(model, None, "random-tokens", tokens=200, progress=False)
    known = dict.fromkeys(trials.PROMPTS, collected)
    named = [Way("qada", "current", "any", 0.9), *trials.list_all_ways(), *trials.list_token_ways()]
    tried = list({replace(way, threshold=0.0): way for way in reversed(named)}.values())  # thresholds are numbers
    rows = rows_of(model, document, known, *tried)
    assert len(rows) == len(tried) == len(set(tried))
    losses = {way: float(row["kl"]) for way, row in zip(tried, rows, strict=True)}
    assert all(0 <= loss < 20 for loss in losses.values())
    assert losses[named[0]] < losses[Way("local")]


@needs_compiler
@needs_vectors
@pytest.mark.parametrize("question", [1, 9])
def test_prompts_read_by_selection(question: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the exactly read prompt: one that reads all of it loses what its prompt lost, and the default more or
    other; 0 is exact. A prompt that is too short to select is no row."""
    monkeypatch.setattr(selected_prompt, "LEAST_FAR", 192)
    model, ids, theta = tiny("llama", head_dim=16), prompt(930)[0], 60.0
    known = {"random-tokens": KeyMoments.collect(model, None, "random-tokens", tokens=200, progress=False)}
    document = Document("task", 900, 0, ids[:, :900], ids[:, 900:], question=question)
    ways = list_prompt_ways([0.0, theta], bits=[16, 8])
    rows = rows_of(model, document, known, *ways)
    assert len({way.read for way in ways}) == len(rows) == 8
    found = {(row["read"], row["criterion"]): float(row["kl"]) for row in rows}
    kind = "sketch of 1.5 bits prefill"
    assert found[f"{kind} 0, 0", "dense"] == pytest.approx(0, abs=1e-6)
    read = 900 - question
    with torch.no_grad():
        told = {"moments": known["random-tokens"], "token_threshold": 0.0, "threshold": 1.0}
        cache = QAdACache(model, **told, prefill_threshold=theta)
        model(ids[:, :read], **pass_cache(cache))
        after = model(ids[:, read:-1], **pass_cache(cache)).logits[0, question - 1 :].double().log_softmax(-1)
        full = model(ids[:, :-1]).logits[0, 899:].double().log_softmax(-1)
    lost = float((full.exp() * (full - after)).sum(-1).mean())
    assert lost > 1e-3
    assert found[f"{kind} 60, 0", "dense"] == pytest.approx(lost, abs=1e-4)
    assert found[f"{kind} 60 over 8, 0", "dense"] == pytest.approx(lost, rel=0.1)
    assert found[f"{kind} 0, 4.4", "qada"] != found[f"{kind} 60, 4.4", "qada"]
    short = replace(document, prompt=ids[:, :300])
    with pytest.raises(ValueError, match="--prefill 60 selected nothing"):
        rows_of(model, short, known, *list_prompt_ways([theta]))


def test_question_read_after_the_text(model: PreTrainedModel, known: Known) -> None:
    """The last line of a prompt, whose tokens are fed to what holds the text; only the answer's tokens count."""
    tokenizer = needle.load_tokenizer()
    context = needle.make_prompt(tokens=300, seed=1).context
    words = context.split()[:5]
    instance = SimpleNamespace(args=(f"{context}\n{' '.join(words)}",), doc={})
    made = SimpleNamespace(
        instances=[instance], build_all_requests=lambda limit: None, doc_to_target=lambda doc: [" ".join(words)]
    )
    manager = SimpleNamespace(load=lambda names: {"tasks": {names[0]: made}})
    (asked,) = texts.read_task_documents("asked", tokenizer, length=300, count=1, manager=manager)  # type: ignore[arg-type]
    parted, whole = texts.ask_as(asked, ["dense", "sparse"])
    (alone,) = texts.ask_as(asked, ["dense"])
    assert (alone.task, alone.question, alone.prompt) == (whole.task, whole.question, whole.prompt)  # the same tensor
    assert (whole.task, whole.question, parted.task) == ("asked", 1, "asked, sparse question")
    assert tokenizer.decode(parted.prompt[0, -parted.question :]).split() == words
    assert torch.equal(whole.prompt, parted.prompt)
    size = model.config.vocab_size  # smaller than that of the words
    parted = replace(parted, prompt=parted.prompt % size, answer=torch.tensor([[5, 6, 7, 8]]))
    cache = trials.make_exact_cache(model)
    trials.prefill(model, parted, cache)
    assert cache.get_seq_length() == parted.prompt.shape[1] - parted.question
    ids = torch.cat([parted.prompt, parted.answer[:, :-1]], dim=1)
    with torch.no_grad():
        plain = model(ids).logits[0, -parted.answer.shape[1] :].log_softmax(dim=-1)
    whole = texts.make_question_dense(parted)
    for at_once in (True, False):
        for document in (parted, whole):
            trials.prefill(model, document, twin := cache.fork())
            assert twin.get_seq_length() == document.prompt.shape[1] - document.question
            found = trials.follow(model, document, twin, at_once=at_once)
            torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-4)
    exact, local = rows_of(model, parted, known, Way("dense", "current", read="sketch of 2 bits, 1e-30"), Way("local"))
    assert float(exact["kl"]) == pytest.approx(0, abs=1e-6)
    assert float(local["kl"]) > 1e-4


def test_table_is_widened_and_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the needle model, whose text is short: interrupted, and run again with another way."""
    text, out = tmp_path / "text.txt", tmp_path / "trials.csv"
    text.write_text(needle.make_prompt(tokens=1500, seed=1).context)
    arguments = ["--model", str(needle.FOLDER), "--text", str(text), "--lengths", "300", "--documents", "2"]
    arguments += ["--following", "8", "--out", str(out)]
    monkeypatch.setattr(trials, "list_all_ways", lambda: [Way("local")])
    monkeypatch.setattr(trials, "know", lambda *_: {})
    assert trials.main(arguments) == 0
    monkeypatch.setattr(trials, "list_all_ways", lambda: [Way("local"), Way("dense")])
    assert trials.main(arguments) == 0
    assert trials.main(arguments) == 0
    rows = read(out)
    assert [(row["document"], row["criterion"]) for row in rows] == [
        ("0", "local"), ("1", "local"), ("0", "dense"), ("1", "dense")
    ]  # fmt: skip
    assert "±" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        trials.main(["--model", str(tmp_path / "nothing"), "--out", str(out)])
    assert "--model:" in capsys.readouterr().err
