"""What each KV head reads of the long context, pass by pass, as a cache's observer is told; packed for a page."""

import base64
from dataclasses import dataclass

import torch

from ..cache import QAdACache
from ..state.observation import Observation

MOST_BYTES = 6 << 20  # of packed reads, base64 left out: further passes are left out
LOCAL, WHOLE, LISTED = 0, 1, 2  # how a head's record begins: nothing, all, or so many tokens more than LISTED


@dataclass(frozen=True)
class Pass:
    """What was read while one token of the answer was computed. Positions are those of the cache's tokens.

    Every head reads the sinks and a window that ends with the query. The long context is what lies between.
    """

    queries: int  # tokens of the pass
    window: int  # position at which the first query's window begins
    end: int  # position at which the last query's begins: what is read whole ends before
    heads: int  # KV heads that read something of the long context
    whole: int  # KV heads that read all of it
    tokens: int  # of the long context that these read, summed over heads
    packed: str  # base64, see `pack`


class Recorder:
    """An observer of one cache with one row, to be asked for a `Pass` after each pass of the model."""

    def __init__(self, cache: QAdACache) -> None:
        self._sinks, self._seen = cache.options.sink_tokens, dict[int, list[list[int] | None]]()
        self._pass: Pass | None = None
        self._spans: tuple[int, int, int] = (0, 0, 0)

    def __call__(self, seen: Observation) -> None:
        """Note one layer's call."""
        tokens = seen.rows.bulk_tokens[0, 0]  # of each query
        self._spans = (len(tokens), self._sinks + int(tokens.min()), self._sinks + int(tokens.max()))
        needing = seen.flags[0].any(dim=1)  # [kv_heads, queries]
        # A head that needs the long context also reads what has left the window and is not stored yet.
        pending = torch.where(needing, tokens, 0).amax(dim=1).tolist()
        stored = seen.bulk_lengths[0]
        heads: list[list[int] | None] = [list(range(stored, end)) for end in pending]
        picked: list[set[int]] = [set() for _ in heads]
        for chosen in seen.chosen:
            picked[chosen.head].update(chosen.tokens.tolist())
        for head, own in enumerate(picked):
            heads[head] = sorted(own | set(heads[head] or []))
        for head, whole in enumerate(seen.whole[0]):
            if whole:
                heads[head] = None
        self._seen[seen.layer] = heads

    def finish(self) -> Pass | None:
        """What the layers read since the last call; None if none was told of: the pass read everything, exactly."""
        if not self._seen:
            return None
        layers, (queries, window, end) = [self._seen[layer] for layer in sorted(self._seen)], self._spans
        heads = [head if head is None else [self._sinks + token for token in head] for own in layers for head in own]
        self._seen = {}
        whole, bulk = heads.count(None), end - self._sinks
        listed = [head for head in heads if head]
        return Pass(
            queries=queries,
            window=window,
            end=end,
            heads=whole + len(listed),
            whole=whole,
            tokens=whole * bulk + sum(map(len, listed)),
            packed=base64.b64encode(pack(heads)).decode("ascii"),
        )


def pack(heads: list[list[int] | None]) -> bytes:
    """Heads' records one after the other: `LOCAL`, `WHOLE`, or `LISTED` and the number of positions, then the steps
    from 0 to each, ascending. A byte has 7 bits of a number, the lowest first; its eighth says that more follow."""
    packed = bytearray()
    for positions in heads:
        if positions is None:
            numbers = [WHOLE]
        elif not positions:
            numbers = [LOCAL]
        else:
            steps = [after - before for before, after in zip([0, *positions], positions, strict=False)]
            numbers = [LISTED + len(positions), *steps]
        for number in numbers:
            while number > 127:
                packed.append(128 | number & 127)
                number >>= 7
            packed.append(number)
    return bytes(packed)
