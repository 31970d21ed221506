"""The tokens that each KV head reads of the long context, by pass, from a cache's observer; packed for a page."""

import base64
from dataclasses import dataclass

from ..cache import QAdACache
from ..state.observation import Observation

MOST_BYTES = 8 << 20  # of packed reads on a page: further passes are left out
LOCAL, WHOLE, LISTED = 0, 1, 2  # how a head's record begins: nothing, all, or so many tokens more than LISTED


@dataclass(frozen=True)
class Pass:
    """The reads of one pass, in which one token of the answer was computed. Positions are those of the cache's tokens.

    Heads that need the long context select from the stored bulk, the tokens from the sinks to `stored`, or read all of
    it. They also read the tokens from there to the window. Every head reads the sinks and the window.
    """

    queries: int  # tokens of the pass
    stored: int  # position at which the stored bulk ends
    needing: int  # KV heads that need the long context
    packed: str  # base64, see `pack`: what these read of the stored bulk


class Recorder:
    """An observer of a cache of one row, to be asked for a `Pass` after each pass of the model.

    Attributes:
        layers: indices of the observed layers, in the order of their records.
        heads: KV heads of each.
    """

    def __init__(self, cache: QAdACache) -> None:
        self._sinks, self._seen = cache.options.sink_tokens, dict[int, Observation]()
        self.layers, self.heads = list[int](), 0

    def __call__(self, seen: Observation) -> None:
        """Note one layer's call."""
        self._seen[seen.layer] = seen

    def finish(self) -> Pass | None:
        """The reads of all layers since the last call; None after an exact pass, which reads all, unobserved."""
        if not self._seen:
            return None
        self.layers = sorted(self._seen)
        calls = [self._seen.pop(layer) for layer in self.layers]
        self.heads = max(seen.flags.shape[1] for seen in calls)
        return Pass(  # the first two are alike in all layers
            queries=calls[0].rows.bulk_tokens.shape[2],
            stored=self._sinks + calls[0].bulk_lengths[0],
            needing=sum(int(seen.flags[0].flatten(1).any(dim=1).sum()) for seen in calls),
            packed=base64.b64encode(pack([head for seen in calls for head in self._list_heads(seen)])).decode("ascii"),
        )

    def _list_heads(self, seen: Observation) -> list[list[int] | None]:
        """Positions that each KV head of one layer read of the stored bulk, ascending; None for all. Heads that other
        layers have more of read nothing."""
        chosen: list[set[int]] = [set() for _ in seen.flags[0]]
        for each in seen.chosen:
            chosen[each.head].update(each.tokens.tolist())
        whole = seen.whole[0] or [False] * len(chosen)
        read = [
            None if all_read else [self._sinks + token for token in sorted(tokens)]
            for all_read, tokens in zip(whole, chosen, strict=True)
        ]
        return [*read, *([] for _ in range(self.heads - len(read)))]


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
