"""A document and a question as token ids, and which characters of the document each token is of."""

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

_DOCUMENT, _QUESTION = "THE-DOCUMENT-GOES-HERE", "THE-QUESTION-GOES-HERE"


@dataclass(frozen=True)
class Asked:
    """What a model reads before it answers."""

    opening: list[int]  # token ids up to the document's end, and what a chat template puts around it
    question: list[int]  # token ids from the question on
    first: int  # which token of `opening` begins the document
    words: list[str]  # the document's text, a piece for each of its tokens; some are empty
    left_out: int  # tokens of the document that did not fit
    chat: bool  # whether the tokenizer has a chat template


def ask(tokenizer: PreTrainedTokenizerBase, document: str, question: str, *, most: int, positions: int | None) -> Asked:
    """A document of at most `most` tokens and a question about it, in at most `positions` tokens: a longer document is
    cut. By the tokenizer's chat template, else plainly.

    Raises:
        ValueError: one of them is empty, the question leaves no room for a document, or the tokenizer cannot serve.
    """
    for part, text in (("document", document), ("question", question)):
        if not text.strip():
            raise ValueError(f"the {part} is empty: give a text")
    if not tokenizer.is_fast:
        raise ValueError(
            f"{type(tokenizer).__name__} does not say which characters a token is of: give a fast tokenizer"
        )
    chat = bool(tokenizer.chat_template)
    before, after, closing = _surroundings(tokenizer, chat)
    question_ids = tokenizer(question + closing, add_special_tokens=False).input_ids

    def encode(text: str) -> tuple[list[int], list[tuple[int, int]], int]:
        """Ids of all before the question, the document's characters of each of its tokens, the first of these."""
        made = tokenizer(before + text + after, add_special_tokens=not chat, return_offsets_mapping=True)
        start, end = len(before), len(before) + len(text)
        own = [place for place, (low, high) in enumerate(made.offset_mapping) if low < end and high > max(low, start)]
        spans = [(max(low, start) - start, min(high, end) - start) for low, high in made.offset_mapping]
        first = own[0] if own else 0
        return made.input_ids, spans[first : own[-1] + 1] if own else [], first

    ids, spans, first = encode(document)
    whole = len(spans)
    if positions is not None:
        most = min(most, positions - len(question_ids) - (len(ids) - whole))
    if most < 1:
        raise ValueError(f"the question alone takes {len(question_ids)} tokens of the model's {positions}: ask less")
    while len(spans) > most:
        document = document[: spans[most - 1][1]]  # cut there, the last words may be others in the tokenizer's eyes
        ids, spans, first = encode(document)
        most -= len(spans) > most
    return Asked(ids, question_ids, first, _cut(document, spans), whole - len(spans), chat)


def _surroundings(tokenizer: PreTrainedTokenizerBase, chat: bool) -> tuple[str, str, str]:
    """Text before a document, between it and a question, and after that."""
    text: Any = f"{_DOCUMENT}\n\nQuestion: {_QUESTION}\nAnswer:"
    if chat:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": f"{_DOCUMENT}\n\n{_QUESTION}"}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=False,  # known to templates that can think first, no matter to others
        )
    before, _, rest = str(text).partition(_DOCUMENT)
    between, found, closing = rest.rpartition(_QUESTION)
    if not found:
        raise ValueError("the tokenizer's chat template leaves out what a user says: use a model with another one")
    return before, between, closing


def _cut(text: str, spans: list[tuple[int, int]]) -> list[str]:
    """A text in as many pieces as there are tokens: characters between two tokens begin the second's piece."""
    ends, end = [], 0
    for _, high in spans:
        ends.append(end := max(end, high))
    starts = [0, *ends[:-1]]
    pieces = [text[start:end] for start, end in zip(starts, ends, strict=True)]
    return [*pieces[:-1], pieces[-1] + text[end:]] if pieces else []
