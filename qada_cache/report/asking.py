"""A document and a question as token ids, and which characters of the document each token is of."""

from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

_DOCUMENT, _QUESTION = "THE-DOCUMENT-GOES-HERE", "THE-QUESTION-GOES-HERE"


@dataclass(frozen=True)
class Request:
    """A question about a document, and the most that is read of it and answered."""

    document: str  # its text
    name: str  # of the document, for the page
    question: str
    tokens: int  # of the document at most; a longer one is cut
    new_tokens: int  # of the answer at most


@dataclass(frozen=True)
class Asked:
    """The tokens that a model reads before it answers."""

    opening: list[int]  # token ids up to the document's end, and what a chat template puts around it
    question: list[int]  # token ids from the question on
    first: int  # which token of `opening` begins the document
    words: list[str]  # the document's text, a piece for each of its tokens; some are empty
    left_out: int  # tokens of the document that did not fit
    chat: bool  # whether the tokenizer has a chat template


def ask(tokenizer: PreTrainedTokenizerBase, request: Request, positions: int | None) -> Asked:
    """A request in token ids, by the tokenizer's chat template, else plainly. With the answer they fit `positions`.

    Raises:
        ValueError: document or question is empty, there is no room for a document, or the tokenizer cannot serve.
    """
    document = request.document
    for part, text in (("document", document), ("question", request.question)):
        if not text.strip():
            raise ValueError(f"the {part} is empty: give a text")
    if not tokenizer.is_fast:
        name = type(tokenizer).__name__
        raise ValueError(f"{name} does not say which characters a token is of: use a model with a fast tokenizer")
    chat = bool(tokenizer.chat_template)
    before, after, closing = _find_surroundings(tokenizer, chat)
    question = tokenizer(request.question + closing, add_special_tokens=False).input_ids

    def encode(text: str) -> tuple[list[int], int, list[tuple[int, int]]]:
        """Ids of all before the question, which of them begins the document, and its characters of each token."""
        encoded = tokenizer(before + text + after, add_special_tokens=not chat, return_offsets_mapping=True)
        start, end = len(before), len(before) + len(text)
        inside = [
            place for place, (low, high) in enumerate(encoded.offset_mapping) if low < end and high > max(low, start)
        ]
        if not inside:
            raise ValueError(f"no word of the document fits {request.tokens} tokens: allow more, or give another text")
        spans = [(max(low, start) - start, min(high, end) - start) for low, high in encoded.offset_mapping]
        return encoded.input_ids, inside[0], spans[inside[0] : inside[-1] + 1]

    ids, first, spans = encode(document)
    whole, most = len(spans), request.tokens
    if positions is not None:
        most = min(most, positions - (len(ids) - whole) - len(question) - request.new_tokens)
    if most < 1:
        raise ValueError(
            f"a question of {len(question)} tokens and an answer of {request.new_tokens} leave no room for a document "
            f"in the model's {positions} positions: ask for less"
        )
    while len(spans) > most:  # once as a rule; the end of a shorter text may have other tokens
        document = document[: min(spans[most - 1][1], spans[most][0])]  # a character may have several tokens
        ids, first, spans = encode(document)
    return Asked(ids, question, first, _cut(document, spans), whole - len(spans), chat)


def _find_surroundings(tokenizer: PreTrainedTokenizerBase, chat: bool) -> tuple[str, str, str]:
    """Text before a document, between it and a question, and after that."""
    text: Any = f"{_DOCUMENT}\n\nQuestion: {_QUESTION}\nAnswer:"
    if chat:
        try:
            text = tokenizer.apply_chat_template(
                [{"role": "user", "content": f"{_DOCUMENT}\n\n{_QUESTION}"}],
                tokenize=False,
                add_generation_prompt=True,
                enable_thinking=False,  # known to templates that can think first, no matter to others
            )
        except TemplateError as error:  # a wrong template, or one that refuses a question without more
            raise ValueError(
                f"the tokenizer's chat template cannot be filled in ({error}): use a model with another one"
            ) from error
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
