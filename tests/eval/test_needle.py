"""The needle model and its prompts."""

from collections.abc import Callable
from typing import Any

import needle
import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from qada_cache import QAdACache
from qada_cache.versions import pass_cache

TOKENS = 4096


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return needle.load_model()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return needle.load_tokenizer()


@pytest.mark.parametrize("tokens", [300, 1024, TOKENS])
def test_prompts_are_text_of_the_asked_length(tokenizer: PreTrainedTokenizerFast, tokens: int) -> None:
    prompt = needle.make_prompt(tokens=tokens, seed=3)
    assert prompt == needle.make_prompt(tokens=tokens, seed=3)
    assert prompt != needle.make_prompt(tokens=tokens, seed=4)
    for text in (prompt.context, needle.random_words(tokens=tokens), needle.haystack(tokens=tokens)):
        ids = tokenizer(text).input_ids
        assert len(ids) == tokens
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids, skip_special_tokens=True).split() == text.split()
    for question, answer in zip(prompt.questions, prompt.answers, strict=True):
        assert f"note {question.split()[1]} {answer} ." in prompt.context


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"facts": 0}, "facts"), ({"questions": 49}, "questions"), ({"tokens": 100}, "at least 193 tokens")],
)
def test_impossible_prompts_are_refused(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        needle.make_prompt(**arguments)


@pytest.fixture(scope="module")
def read(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> list[tuple[needle.NeedlePrompt, QAdACache]]:
    """Two prompts, and caches that have read them, exactly."""
    found = []
    for seed in range(2):
        prompt, cache = needle.make_prompt(tokens=TOKENS, seed=seed), QAdACache(model, moments="current")
        with torch.no_grad():
            context = tokenizer(prompt.context, return_tensors="pt").input_ids
            model(context, **pass_cache(cache), logits_to_keep=1)
        found.append((prompt, cache))
    return found


Measured = Callable[..., tuple[float, float]]


@pytest.fixture
def recall_and_sparsity(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    read: list[tuple[needle.NeedlePrompt, QAdACache]],
) -> Measured:
    """The share of right answers to 32 questions, asked one after the other, and the sparsity of caches so forked."""

    @torch.no_grad()
    def measured(**options: Any) -> tuple[float, float]:
        right, sparsity = [], 0.0
        for prompt, cache in read:
            twin, last = cache.fork(**options), torch.empty(1, 0, dtype=torch.long)
            for question, answer in zip(prompt.questions, prompt.answers, strict=True):
                ids = tokenizer(question, return_tensors="pt", add_special_tokens=False).input_ids
                last = model(torch.cat([last, ids], dim=1), **pass_cache(twin)).logits[:, -1:].argmax(-1)
                right.append(tokenizer.decode(last[0]) == answer)
            sparsity += twin.stats().sparsity / len(read)
        return sum(right) / len(right), sparsity

    return measured


def test_recall_needs_the_long_context(recall_and_sparsity: Measured) -> None:
    assert recall_and_sparsity(criterion="dense")[0] >= 0.98
    assert recall_and_sparsity(criterion="local")[0] < 0.15


def test_few_heads_need_it(recall_and_sparsity: Measured) -> None:
    """The method's point: with default moments, recall stays while most heads are local."""
    recall, sparsity = recall_and_sparsity(moments="random-words", threshold=0.3)
    assert recall >= 0.95
    assert sparsity >= 0.58


def test_moments_of_a_repetitive_prompt_miss_the_needle(recall_and_sparsity: Measured) -> None:
    """The paper's finding, which the model was trained to show: one outlying key does not show in its moments."""
    assert recall_and_sparsity(threshold=0.3)[0] < 0.5
