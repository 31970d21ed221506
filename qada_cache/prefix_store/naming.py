"""Names of stored tokens: a chain of hashes over their segments, which begins with the model.

Keys and values of a token depend on all tokens before it, on the model, and on how the tokens were read. So a segment's
name is a hash of its own tokens, of how these were read, and of the name of the segment before it.
"""

import hashlib
import json
import re
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..criterion import StaticHeads
from ..models import identity
from ..state import Options

FILE_TOKENS = 256  # of a whole segment's file; the rest of a text is one shorter file
VERSION = 1  # of names and files: those of another version are not found
STATES = "states "  # prefix of `Header.reading` in a file that holds states of sliding and linear layers
EXACT = ""  # `Header.reading` of tokens that were read exactly, under whatever options
_FORMAT = re.compile(r"([0-9a-f]{16})-(\d{6})-([0-9a-f]{32})-([0-9a-f]{32})\.safetensors")


class Name(NamedTuple):
    """The name of a segment's file."""

    root: str  # the first characters of `name_root`
    number: int  # segments before it
    parent: str  # name of the segment before it; `name_root` for the first one
    own: str

    def __str__(self) -> str:
        return f"{self.root}-{self.number:06}-{self.parent}-{self.own}.safetensors"

    @staticmethod
    def parse(text: str) -> "Name | None":
        """The inverse of `str`; None for other files' names."""
        found = _FORMAT.fullmatch(text)
        return None if found is None else Name(found[1], int(found[2]), found[3], found[4])


def name_root(model: PreTrainedModel, key: str | None) -> str:
    """The parent of a first segment: a hash of the model's weights, dtype, config and active adapters, and of the
    owner's key."""
    parts = [VERSION, FILE_TOKENS, identity.digest(model), identity.list_adapters(model), key]
    return _digest(json.dumps(parts).encode())


def name_states(chain: Sequence[str], starts: Sequence[int], tokens: Sequence[int], reading: str) -> list[Name]:
    """Names that the file of states after all `tokens` of a text may have. The first name puts it after the last
    segment that ends before the text does. The other names put it after one of the two segments before that: the last
    one that was stored when the file was written.

    `chain` begins with the root and goes on with the names of segments. `starts[i]` is the number of tokens up to the
    end of `chain[i]`.
    """
    last = bisect_left(starts, len(tokens)) - 1
    return [
        Name(
            chain[0][:16],
            number,
            chain[number],
            name_segment(chain[number], tokens[starts[number] :], STATES + reading),
        )
        for number in range(last, max(last - 3, -1), -1)
    ]


def name_segment(parent: str, tokens: Sequence[int], reading: str) -> str:
    """The name of the segment that has `tokens` and follows the segment `parent`."""
    return _digest(
        json.dumps([parent, reading]).encode(), torch.tensor(tokens, dtype=torch.int64, device="cpu").numpy().tobytes()
    )


def describe_reading(options: Options) -> str:
    """How a cache with these options reads tokens in query-adaptive calls: `EXACT` if it reads its whole bulk, else a
    digest of all that decides what it reads."""
    criterion, other, energies = options.criterion, options.other_moments, options.query_energies
    if criterion == "dense" or (criterion == "gaussian" and options.threshold == 1):
        return EXACT
    names = ("threshold", "sink_tokens", "local_tokens", "group_rule", "token_threshold", "sketch_bits")
    parts = [getattr(options, name) for name in (*names, "update_moments", "current_moments")]
    if isinstance(criterion, str):
        parts.append(criterion)
    if other is not None:
        parts += [other.prompt, other.tokens, other.sink_tokens, list(other.lengths)]
    tensors = [criterion.long_context if isinstance(criterion, StaticHeads) else None, energies]
    tensors += [None, None] if other is None else [other.mean, other.covariance]
    return make_digest(parts, *tensors)


def make_digest(parts: list, *tensors: Tensor | None) -> str:
    """A digest of `parts`, as JSON writes them, and of tensors."""
    return _digest(json.dumps(parts).encode(), *map(_copy_bytes, tensors))


def _copy_bytes(tensor: Tensor | None) -> bytes:
    return b"" if tensor is None else tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _digest(*parts: bytes) -> str:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(len(part).to_bytes(8, "little"))
        whole.update(part)
    return whole.hexdigest()[:32]
