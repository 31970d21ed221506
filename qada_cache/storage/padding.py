"""Attention masks: real tokens, padding, and refusal of masks that this cache cannot follow."""

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

COMPARED = 256  # queries whose masks are compared at once
HIDDEN = -1e4  # what hides a token if it, or less, is added to its score
# Results of `find_real_tokens` by its `valid`, row and device, for layers after the first: the host waits for copies to
# the device. An entry lives as long as its `valid`.
_real_tokens: Any = WeakIdKeyDictionary()


class Padding:
    """Which of a cache's logical tokens are padding. Immutable. Each layer in turn asks for the same change: the first
    one's result is stored, and all layers share it."""

    def __init__(self, known: Tensor) -> None:
        padded = (~known).any(dim=0).nonzero().squeeze(-1).tolist()
        # Bool [batch, tokens] on the host, False at padding. It ends at the last padding: later tokens are all real.
        # [1, 0] without padding. A copy, as a view would keep the whole mask alive: on a CPU model [batch, 1, tokens,
        # tokens].
        self.known = (known[:, : padded[-1] + 1] if padded else known[:1, :0]).clone()
        self._known_on_device = self.known  # the same on the device of masks
        self._next: tuple[Any, Padding] | None = None

    def extend(
        self,
        mask: Tensor | None,  # as for `read_mask`
        *,
        batch: int,  # rows of the call
        seen: int,  # logical tokens, padding included, up to and including this call's
        queries: int,  # tokens of this call
    ) -> "tuple[Padding, Tensor | None, Tensor | None]":
        """The padding after a call, from the mask that the attention function got.

        Returns the padding; which of the call's tokens are real, bool `[batch, queries]` on the host, None if all are;
        and which of the call's tokens each of them sees, bool `[batch or 1, queries, queries]` on the mask's device,
        None if causal. A token is padding if no query sees it, itself included. ValueError, if a real token does not
        see all real ones of earlier calls, or sees padding, or sees nothing; if the mask adds other numbers to scores;
        or as by `read_mask`.
        """
        width = self.known.shape[1]
        agrees, new, visible = not width, None, None
        if mask is not None:
            agrees, new, visible = self._compare(mask, batch, seen, queries)
        if not agrees:
            raise ValueError(
                "the attention mask of this call does not agree with the tokens already cached: it hides some that "
                "were cached as real, or shows padding, which is not cached. Pass the whole mask [batch, cached + new "
                "tokens], with the same padding as before. To hide cached tokens (drafts, padding behind a row's end), "
                "crop the cache to where they begin, by cache.crop(-n), and give the text from there on again"
            )
        if new is None or new.all():
            return self, None, visible
        known = torch.ones(batch, seen, dtype=torch.bool, device="cpu")
        known[:, seen - queries :] = new
        known[:, :width] = self.known
        return Padding(known), new, visible

    def _compare(self, mask: Tensor, batch: int, seen: int, queries: int) -> tuple[bool, Tensor, Tensor | None]:
        """Whether a mask agrees with this padding; which new tokens are real, and what each sees, as `extend` returns
        them. Computed on the mask's device, with one transfer to the host."""
        past, width = seen - queries, self.known.shape[1]
        visible, biased = read_mask(mask, batch=batch, seen=seen, queries=queries)
        known = self._find_on(mask.device)
        visible_new = visible[..., past:]
        real = visible_new.any(dim=1)
        agrees = visible[..., width:past].all(dim=-1) & (visible[..., :width] == known[:, None]).all(dim=-1)
        blind = differs = torch.zeros_like(biased)
        if past and mask.dim() == 4:  # else the model's attention follows it, or it is one row for all queries
            # A padding query may see anything, as nobody reads its output; the last one is taken to see the row's real
            # tokens. Only in a row without real queries its mask has to agree with the past, too; a query that sees
            # nothing, or all (libraries let those that would see nothing see all), says nothing of the past.
            says_past = visible[:, -1].any(dim=-1) & ~visible[:, -1].all(dim=-1) & ~real.any(dim=-1)
            agrees = agrees | (~real & ~says_past[:, None])
            blind = (real & ~visible.any(dim=-1)).any()
        if mask.dim() == 4:
            differs = _differs_from_causal(visible_new, real)
        flags = torch.stack([agrees.all(), differs, biased, blind])
        on_host = torch.cat([flags, real.expand(batch, queries).flatten()]).cpu()
        refuse_bias(on_host[2])
        if on_host[3]:
            raise ValueError(
                "by this attention mask a new token sees nothing, but is seen: let it see itself, or hide it from all"
            )
        return bool(on_host[0]), on_host[4:].view(batch, queries), visible_new.clone() if on_host[1] else None

    def is_all_that_hides(self, mask: Tensor) -> bool:
        """Whether a mask `[batch, tokens]` hides this padding, and no token else. The host waits for the device once,
        and for few launches: a decode step of a graph asks each time."""
        if not (width := self.known.shape[1]):
            return bool(mask.all())
        agrees = (mask[:, :width].bool() == self._find_on(mask.device)).all()
        return bool(agrees & mask[:, width:].all())

    def _find_on(self, device: torch.device) -> Tensor:
        if self._known_on_device.device != device:
            self._known_on_device = self.known.to(device)
        return self._known_on_device

    def crop(self, seen: int) -> "Padding":
        """The padding of the first `seen` tokens."""
        return self if seen >= self.known.shape[1] else self._take((slice(None), slice(seen)))

    def count_by_row(self, batch: int) -> list[int]:
        """The number of padding tokens in each of `batch` rows."""
        return (~self.known).sum(dim=-1).expand(batch).tolist()

    def select_rows(self, index: list[int]) -> "Padding":
        """Row `i` becomes the old row `index[i]`."""
        return self._take(index) if self.known.numel() else self

    def equals(self, other: "Padding") -> bool:
        """Whether both have the same padding."""
        return torch.equal(self.known, other.known)

    def _take(self, index: Any) -> "Padding":
        if self._next is None or self._next[0] != index:
            self._next = index, Padding(self.known[index])
        return self._next[1]


NONE = Padding(torch.ones(1, 0, dtype=torch.bool, device="cpu"))  # one for all caches and layers


def read_mask(mask: Tensor, *, batch: int, seen: int, queries: int) -> tuple[Tensor, Tensor]:
    """Which tokens queries see, bool `[batch or 1, queries, seen]` (`[batch, 1, seen]` of a 2-D mask), and whether the
    mask adds anything else to scores, a bool scalar; both on the mask's device.

    A mask is bool `[batch, seen]`, bool `[batch or 1, 1, queries, seen]` (True: attend) or the same shape in floating
    point, added to the scores (0: attend). ValueError, if it has another shape, or differs between heads. Other
    arguments are as for `Padding.extend`.
    """
    shape = list(mask.shape)
    if shape[0] not in (1, batch):
        raise ValueError(f"an attention mask of shape {shape} does not fit a batch of {batch}")
    unbiased = torch.zeros((), dtype=torch.bool, device=mask.device)
    if mask.dim() == 2 and shape[1] == seen:
        return mask.bool()[:, None], unbiased
    if mask.dim() != 4 or shape[1:] != [1, queries, seen]:
        refuse_shape(shape, seen=seen, queries=queries)
    if mask.dtype == torch.bool:
        return mask[:, 0], unbiased
    rows = mask[:, 0] == 0
    return rows, (~rows & ~(mask[:, 0] <= HIDDEN)).any()  # nan is neither


def refuse_shape(shape: Sequence[int], *, seen: int, queries: int) -> NoReturn:
    """Raise ValueError for a mask of this shape. Other arguments are as for `Padding.extend`."""
    raise ValueError(
        f"cannot read an attention mask of shape {[*shape]} in a call of {queries} tokens with {seen} seen so far: "
        f"pass None, [batch, {seen}], or [batch, 1, {queries}, {seen}], one for all heads"
    )


def refuse_bias(biased: Any) -> None:
    """Raise ValueError, if a mask adds to scores; `biased` is a bool, or a bool scalar on any device."""
    if biased:
        raise ValueError(
            "this attention mask adds numbers to scores, which QAdACache does not compute: pass one that shows or "
            "hides tokens, as bool or as 0 and minus infinity, or use DynamicCache"
        )


def _differs_from_causal(visible: Tensor, real: Tensor) -> Tensor:
    """Whether a real token of a call sees other tokens of the call than the real ones up to itself, a bool scalar.
    `visible` is bool `[batch or 1, queries, queries]`, `real` bool `[batch or 1, queries]`. It is compared block by
    block, as `visible` may be the largest tensor of a prompt."""
    tokens = torch.arange(visible.shape[1], dtype=torch.int64, device=visible.device)
    differs = []
    for first in range(0, visible.shape[1], COMPARED):
        block = slice(first, first + COMPARED)
        causal = (tokens <= tokens[block, None]) & real[:, None]
        differs.append(((visible[:, block] != causal) & real[:, block, None]).any())
    return torch.stack(differs).any()


def find_real_tokens(valid: Tensor, row: int, device: torch.device) -> slice | Tensor:
    """The index of a row's real tokens, from bool `valid` `[batch, tokens]` on the host: a slice, which selects a view,
    if they are neighbours, else int64 `[real tokens]` on `device`."""
    by_row = _real_tokens.setdefault(valid, {})
    if (row, device) not in by_row:
        real = valid[row].nonzero().squeeze(-1)
        first, last = (int(real[0]), int(real[-1]) + 1) if len(real) else (0, 0)
        by_row[row, device] = slice(first, last) if last - first == len(real) else real.to(device)
    return by_row[row, device]
