"""Prompts for the needle model: seeded generators of plain text, one word per token.

A needle prompt is a haystack, a dozen noise sentences repeated in random order, with facts ("note tiger copper .")
scattered between them. Asking is appending a question ("ask tiger"): the next word is the answer. Several questions
are asked one after the other on the same text: "ask tiger copper ask otter honey ...".

`tokens` always counts the `<s>` that the tokenizer puts in front, so a prompt has exactly `tokens` input ids.
"""

import random
from dataclasses import dataclass

from .words import ASK, KEYS, NOISE, NOTE, ORDINARY, SENTENCES, STOP, VALUES

FACT_WORDS = 4
_SENTENCE_WORDS = len(SENTENCES[0])


@dataclass(frozen=True)
class NeedlePrompt:
    """One text and what to ask about it: `answers[i]` is the word that follows `questions[i]`."""

    context: str
    questions: list[str]
    answers: list[str]


def make_prompt(*, tokens: int = 16384, facts: int = 48, questions: int = 16, seed: int = 0) -> NeedlePrompt:
    """A haystack of `tokens` tokens with `facts` facts in it, and `questions` questions about different facts.

    Raises:
        ValueError: the facts do not fit, or there are more facts than keys or more questions than facts.
    """
    if not 1 <= facts <= len(KEYS):
        raise ValueError(f"facts must lie in 1..{len(KEYS)}, got {facts}")
    if not 0 <= questions <= facts:
        raise ValueError(f"questions must lie in 0..facts ({facts}), got {questions}")
    if tokens < 1 + facts * FACT_WORDS:
        raise ValueError(f"{facts} facts need at least {1 + facts * FACT_WORDS} tokens, got {tokens}")
    generator = random.Random(f"needle {seed}")
    words, pairs = needle_words(generator, tokens - 1, facts)
    asked = generator.sample(pairs, questions)
    return NeedlePrompt(
        context=" ".join(words),
        questions=[f"{ASK} {key}" for key, _ in asked],
        answers=[value for _, value in asked],
    )


def haystack(*, tokens: int = 16384, seed: int = 0) -> str:
    """Noise sentences in random order, no facts: text as repetitive as a needle prompt's."""
    return " ".join(_noise_words(random.Random(f"haystack {seed}"), tokens - 1))


def random_words(*, tokens: int = 16384, seed: int = 0) -> str:
    """Words drawn uniformly from all noise words, keys and values: the prompt to collect key moments from."""
    return " ".join(random.Random(f"random words {seed}").choices(ORDINARY, k=tokens - 1))


def single_word(*, tokens: int = 16384, seed: int = 0) -> str:
    """One noise word, repeated."""
    return " ".join([random.Random(f"single word {seed}").choice(NOISE)] * (tokens - 1))


def needle_words(generator: random.Random, count: int, facts: int) -> tuple[list[str], list[tuple[str, str]]]:
    """`count` words of haystack with `facts` facts between its sentences, and those facts as (key, value) pairs.

    Keys are distinct, values are distinct. The trainer draws its texts from here as well, so the model is trained
    on the very format that it is asked about.
    """
    pairs = list(zip(generator.sample(KEYS, facts), generator.sample(VALUES, facts), strict=True))
    noise = _noise_words(generator, count - facts * FACT_WORDS)
    sentences = len(noise) // _SENTENCE_WORDS
    starts = sorted((generator.randint(0, sentences) * _SENTENCE_WORDS for _ in pairs), reverse=True)
    words = noise
    for start, (key, value) in zip(starts, pairs, strict=True):  # from the back, so that earlier starts stay valid
        words[start:start] = [NOTE, key, value, STOP]
    return words, pairs


def _noise_words(generator: random.Random, count: int) -> list[str]:
    sentences = generator.choices(SENTENCES, k=-(-count // _SENTENCE_WORDS))
    return [word for sentence in sentences for word in sentence][:count]
