"""The text that settings are tried on, in pieces."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..key_moments.prompts import knows


@dataclass(frozen=True)
class Piece:
    """A stretch of text and its continuation.

    Attributes:
        prompt: int64 `[1, tokens]`.
        following: int64 `[1, tokens]`.
    """

    prompt: Tensor
    following: Tensor


def default_text() -> str:
    """The topics of Python's own help: real prose that nearly every Python carries.

    Raises:
        ValueError: this Python does not.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ValueError("this Python has no help topics to read: give --text FILE") from error
    return "\n\n".join(topics.values())


def cut(text: str, tokenizer: PreTrainedTokenizerBase, *, count: int, tokens: int, following: int) -> list[Piece]:
    """Pieces spread evenly over the text, without overlap.

    Each begins with the token that begins a text, if the tokenizer puts one there.

    Args:
        count: of pieces.
        tokens: of each prompt.
        following: tokens after each prompt.

    Raises:
        ValueError: the text is too short, or the tokenizer does not know its words.
    """
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False, verbose=False).input_ids[0]
    begin = [index for index in tokenizer("").input_ids[:1] if index == tokenizer.bos_token_id]
    size = tokens - len(begin) + following
    if len(ids) < count * size:
        raise ValueError(
            f"the text has {len(ids)} tokens, and {count} pieces of {tokens} + {following} take {count * size}: give a "
            "longer text, or fewer tokens or pieces"
        )
    if not knows(tokenizer, ids):
        raise ValueError("the tokenizer does not know the words of the text: give another text")
    pieces = []
    for index in range(count):
        start = index * (len(ids) - size) // max(1, count - 1)
        taken = torch.cat([torch.tensor(begin, dtype=torch.long), ids[start : start + size]])[None]
        pieces.append(Piece(taken[:, :tokens], taken[:, tokens:]))
    return pieces


def held_out(pieces: list[Piece], count: int) -> tuple[list[Piece], list[Piece]]:
    """The pieces in two parts: those to choose by, and `count` to confirm by, from all over the text."""
    places = {(index + 1) * len(pieces) // count - 1 for index in range(count)}
    apart = [piece for place, piece in enumerate(pieces) if place in places]
    return [piece for place, piece in enumerate(pieces) if place not in places], apart
