"""The prompts that moments are collected from."""

import json
from pathlib import Path
from typing import Any

import needle
import pytest
import torch
from models import tiny
from readable import english_tokenizer
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from qada_cache import KeyMoments
from qada_cache.__main__ import main
from qada_cache.key_moments.prompts import ARTICLE, PROMPTS, choose_prompt, make_ids


@pytest.fixture(scope="module")
def english() -> PreTrainedTokenizerFast:
    return english_tokenizer()


def ids(prompt: str | torch.Tensor, tokenizer: PreTrainedTokenizerFast | None = None, **options: object) -> list[int]:
    options = {"model": tiny(bos_token_id=1, eos_token_id=2), "tokens": 64, "seed": 0} | options
    return make_ids(prompt, tokenizer=tokenizer, **options).tolist()


def test_article_is_long_enough(english: PreTrainedTokenizerFast) -> None:
    """The article has enough words for the 1,024 tokens that are read by default, whatever the tokenizer."""
    assert len(ARTICLE.read_text(encoding="utf-8").split()) > 1024
    assert len(ids("wiki", english, tokens=1024)) == 1024


def test_random_words_are_the_articles(english: PreTrainedTokenizerFast) -> None:
    drawn = ids("random-words", english, tokens=500)
    assert len(set(drawn)) > 150
    assert 0 not in drawn
    assert drawn != ids("wiki", english, tokens=500)
    assert drawn == ids("random-words", english, tokens=500)
    assert drawn != ids("random-words", english, tokens=500, seed=1)
    own = ids("random-words", english, text="clay river hard", tokens=50)
    assert {english.convert_ids_to_tokens(index) for index in own} == {"clay", "river", "hard"}
    with pytest.raises(ValueError, match=r"does not know the words of the prompt \(random-words\)"):
        ids("random-words", english, text="argile fleuve dur")  # never silently other words than those given


def test_single_word(english: PreTrainedTokenizerFast) -> None:
    assert len(set(ids("single-word", english))) == 1
    drawn = ids("single-token")
    assert drawn[0] == 1
    assert len(set(drawn[1:])) == 1


def test_ordinary_tokens() -> None:
    """Random tokens follow the one that begins prompts, and contain no special or untrained token."""
    model = tiny(bos_token_id=1, eos_token_id=2)
    with torch.no_grad():
        model.get_input_embeddings().weight[90:92] *= 1e-3
    drawn = ids("random-tokens", model=model, tokens=2000)
    assert drawn[0] == 1
    assert not set(drawn[1:]) & {0, 1, 2, 90, 91}  # padding, beginning, end, untrained
    assert len(set(drawn)) > 80
    assert drawn != ids("random-tokens", model=model, tokens=2000, seed=3)
    tokenizer = needle.load_tokenizer()
    assert not set(ids("random-tokens", tokenizer, model=needle.load_model())[1:]) & set(tokenizer.all_special_ids)


def test_words_that_cannot_be_had(english: PreTrainedTokenizerFast) -> None:
    """They become tokens by that name for those who ask, and an error for those who insist."""
    for tokenizer, words, token in (
        (english, "random-words", "single-word"),
        (needle.load_tokenizer(), "random-tokens", "single-token"),  # which knows a few hundred other words
        (None, "random-tokens", "single-token"),
    ):
        found = [choose_prompt(prompt, tokenizer) for prompt in PROMPTS]
        assert found == [words, "wiki", token, "random-tokens", "single-token"]
    assert choose_prompt("random-words", None, text="clay river") == "random-words"
    for prompt in ("random-words", "single-word", "wiki"):
        with pytest.raises(ValueError, match=rf"\({prompt}\) needs the model's tokenizer"):
            ids(prompt)
        with pytest.raises(ValueError, match=rf"does not know the words of the prompt \({prompt}\)"):
            ids(prompt, needle.load_tokenizer())
    made = KeyMoments.collect(tiny(), tokens=64)
    assert made.prompt == "random-tokens"
    assert torch.equal(made.mean, KeyMoments.collect(tiny(), prompt="random-tokens", tokens=64).mean)
    with pytest.raises(ValueError, match=r"\(random-words\) needs the model's tokenizer"):
        KeyMoments.collect(tiny(), text="clay river", tokens=64)


def test_words_that_a_tokenizer_drops() -> None:
    """A tokenizer without a token for what it does not know leaves it out."""
    letters = Tokenizer(BPE({letter: index for index, letter in enumerate("ACDEFGHIKLMNPQRSTVWY")}, []))
    protein = PreTrainedTokenizerFast(tokenizer_object=letters)
    assert len(protein(ARTICLE.read_text(encoding="utf-8")).input_ids) > 20
    assert choose_prompt("random-words", protein) == "random-tokens"
    with pytest.raises(ValueError, match=r"does not know the words of the prompt \(wiki\)"):
        ids("wiki", protein)
    assert len(ids("MKWVTFISLLFLFSSAYSRGVFRR", protein, tokens=24)) == 24


def test_article_too_short_for_a_tokenizer(english: PreTrainedTokenizerFast, monkeypatch: Any, tmp_path: Path) -> None:
    """One that puts several words into a token: all there is of it is read, unless a number was asked for."""
    short = tmp_path / "article.txt"
    short.write_text(" ".join(ARTICLE.read_text().split()[:300]))
    monkeypatch.setattr("qada_cache.key_moments.prompts.ARTICLE", short)
    model = tiny(vocab_size=len(english))
    assert KeyMoments.collect(model, english, "wiki").tokens == 300
    assert KeyMoments.collect(model, english, "random-words").tokens == 1024
    with pytest.raises(ValueError, match=r"\(wiki\) has 300 tokens and 301 were asked for"):
        KeyMoments.collect(model, english, "wiki", tokens=301)
    with pytest.raises(ValueError, match=r"has 300 tokens and 1024 were asked for: give a longer text, or tokens=300"):
        KeyMoments.collect(model, english, "wiki", text=short.read_text())


def test_given_text_and_ids(english: PreTrainedTokenizerFast) -> None:
    assert ids("clay river clay", english, tokens=3)[0] == ids("clay river clay", english, tokens=3)[2]
    assert ids(torch.tensor([[5, 6, 7, 8]]), tokens=3) == [5, 6, 7]
    with pytest.raises(ValueError, match=r"the prompt \(clay river\) has 2 tokens and 64 were asked for.* tokens=2"):
        ids("clay river", english)
    with pytest.raises(ValueError, match=r"the prompt \(token ids\) has 3 tokens"):
        ids(torch.tensor([1, 2, 3]))
    with pytest.raises(ValueError, match="needs the model's tokenizer"):
        ids("clay river")


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ([7, 8], "column 'words' of {} has no text, it has 7"),
        (["", " ", None], "column 'words' of {} has no text in the split 'train'"),
        ([None, "tiger"], "the prompt (wiki) has 2 tokens and 200 were asked for"),
    ],
)
def test_a_dataset_without_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], column: list[Any], message: str
) -> None:
    """Our article is not read in its place; rows without a text are left out."""
    pytest.importorskip("datasets", reason="--dataset needs the package datasets")
    (tmp_path / "words.jsonl").write_text("".join(json.dumps({"words": row}) + "\n" for row in column))
    arguments = ["--prompt", "wiki", "--tokens", "200", "--out", str(tmp_path / "moments.safetensors")]
    dataset = ["--dataset", str(tmp_path), "--column", "words"]
    assert main(["moments", "--model", str(needle.FOLDER), *arguments, *dataset]) == 1
    assert message.format(tmp_path) in capsys.readouterr().err
