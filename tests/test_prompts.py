"""The prompts that moments are collected from."""

import pytest
import torch
from models import tiny
from transformers import PreTrainedTokenizerFast

from qada_cache import needle
from qada_cache.prompts import ARTICLE, prompt_ids


@pytest.fixture(scope="module")
def english() -> PreTrainedTokenizerFast:
    """A word-level tokenizer that knows our article."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<unk>": 0, "<s>": 1, **{word: 2 + i for i, word in enumerate(sorted(set(ARTICLE.read_text().split())))}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>")


def ids(prompt: str | torch.Tensor, tokenizer: PreTrainedTokenizerFast | None = None, **options: object) -> list[int]:
    options = {"model": tiny(bos_token_id=1, eos_token_id=2), "tokens": 64, "seed": 0} | options
    return prompt_ids(prompt, tokenizer=tokenizer, **options).tolist()


def test_article_is_long_enough(english: PreTrainedTokenizerFast) -> None:
    """For the 1,024 tokens that are read by default, whatever the tokenizer."""
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
    drawn = ids("single-word")
    assert drawn[0] == 1
    assert len(set(drawn[1:])) == 1


def test_without_a_tokenizer_ordinary_tokens() -> None:
    """After the token that begins prompts, and none that means something to the model, or that was never trained."""
    model = tiny(bos_token_id=1, eos_token_id=2)
    with torch.no_grad():
        model.get_input_embeddings().weight[90:92] *= 1e-3
    drawn = ids("random-words", model=model, tokens=2000)
    assert drawn[0] == 1
    assert not set(drawn[1:]) & {0, 1, 2, 90, 91}  # padding, beginning, end, untrained
    assert len(set(drawn)) > 80
    assert drawn != ids("random-words", model=model, tokens=2000, seed=3)


def test_tokenizer_that_does_not_know_the_article() -> None:
    """The needle model's knows a few hundred words: ordinary tokens of its vocabulary instead, no special ones."""
    tokenizer = needle.load_tokenizer()
    drawn = ids("random-words", tokenizer, model=needle.load_model(), tokens=3000)
    assert not set(drawn[1:]) & set(tokenizer.all_special_ids)
    assert len(set(drawn)) > 400
    with pytest.raises(ValueError, match=r"does not know the words of the prompt \(wiki\)"):
        ids("wiki", tokenizer)


def test_given_text_and_ids(english: PreTrainedTokenizerFast) -> None:
    assert ids("clay river clay", english, tokens=3)[0] == ids("clay river clay", english, tokens=3)[2]
    assert ids(torch.tensor([[5, 6, 7, 8]]), tokens=3) == [5, 6, 7]
    with pytest.raises(ValueError, match=r"the prompt \(clay river\) has 2 tokens and 64 were asked for.* tokens=2"):
        ids("clay river", english)
    with pytest.raises(ValueError, match=r"the prompt \(token ids\) has 3 tokens"):
        ids(torch.tensor([1, 2, 3]))
    with pytest.raises(ValueError, match="needs the model's tokenizer"):
        ids("clay river")
