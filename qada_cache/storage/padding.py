"""Attention masks: real tokens, padding, and refusal of masks that this cache cannot follow."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_READ: Any = WeakTensorKeyDictionary()  # what `Padding.after` found for masks


class Padding:
    """Which of the tokens seen are padding. Immutable. Each layer asks for the same changes in turn: the first one's
    result is kept, and all layers share it."""

    def __init__(self, known: Tensor) -> None:
        padded = (~known).any(dim=0).nonzero().squeeze(-1).tolist()
        # Bool [batch, tokens] on the host, False at padding, up to the last of it; later tokens are all real. [1, 0]
        # without padding. A copy: a view would keep the whole mask alive, [batch, 1, tokens, tokens] on a CPU model.
        self.known = (known[:, : padded[-1] + 1] if padded else known[:1, :0]).clone()
        self._there = self.known  # on the device of masks
        self._next: tuple[Any, Padding] | None = None

    def after(
        self,
        mask: Tensor | None,  # as for `newest_row`
        *,
        batch: int,  # rows of the call
        seen: int,  # logical tokens, padding included, up to and including this call's
        queries: int,  # tokens of this call
        first: bool = True,  # whether no layer of this pass has asked; the mask may have been written to since the last
    ) -> "tuple[Padding, Tensor | None]":
        """The padding known after a call, from the mask handed to the attention function; and which of the call's
        tokens are real, bool `[batch, queries]` on the host, None if all are.

        The mask is compared with known padding on its device; only the call's own tokens come to the host. Every layer
        of a pass is handed the same mask: the first one reads it for all. ValueError, if it hides a token that was
        real, or shows one that was padding; or as `newest_row`.
        """
        past, width = seen - queries, self.known.shape[1]
        call = self, batch, seen, queries
        found = {} if first or mask is None else _READ.get(mask, {})
        if call in found:
            return found[call]
        agrees, new = not width, None
        if mask is not None:
            _READ[mask] = found
            valid = newest_row(mask, batch=batch, seen=seen, queries=queries)
            if (there := self._there).device != mask.device:
                self._there = there = self.known.to(mask.device)
            alike = valid[:, width:past].all() & (valid[:, :width] == there).all()
            told = torch.cat([alike[None], valid[:, past:].expand(batch, queries).flatten()]).cpu()  # one transfer
            agrees, new = bool(told[0]), told[1:].view(batch, queries)
        if not agrees:
            raise ValueError(
                "the attention mask of this call does not agree with the tokens already cached: pass the whole mask "
                "[batch, cached + new tokens], with the same padding as before"
            )
        found[call] = self, None
        if new is not None and not new.all():
            known = torch.ones(batch, seen, dtype=torch.bool, device="cpu")
            known[:, past:] = new
            known[:, :width] = self.known
            found[call] = Padding(known), new
        return found[call]

    def crop(self, seen: int) -> "Padding":
        """The padding of the first `seen` tokens."""
        return self if seen >= self.known.shape[1] else self._once((slice(None), slice(seen)))

    def counts(self, batch: int) -> list[int]:
        """The number of padding tokens in each of `batch` rows."""
        return (~self.known).sum(dim=-1).expand(batch).tolist()

    def select(self, index: list[int]) -> "Padding":
        """Row `i` becomes the old row `index[i]`."""
        return self._once(index) if self.known.numel() else self

    def equals(self, other: "Padding") -> bool:
        """Whether both say the same."""
        return torch.equal(self.known, other.known)

    def _once(self, index: Any) -> "Padding":
        if self._next is None or self._next[0] != index:
            self._next = index, Padding(self.known[index])
        return self._next[1]


NONE = Padding(torch.ones(1, 0, dtype=torch.bool, device="cpu"))  # one for all caches and layers


def newest_row(mask: Tensor, *, batch: int, seen: int, queries: int) -> Tensor:
    """Which of the tokens seen so far are real, bool `[batch or 1, seen]` on the mask's device.

    A mask is bool `[batch, seen]`, bool `[batch or 1, 1, queries, seen]` (True: attend) or the same shape in floating
    point, added to the scores (0: attend). ValueError, if it has another shape, differs between heads, or (in a call
    that continues a sequence) is not causal attention over the real tokens. Other arguments are as for `Padding.after`.
    """
    shape = list(mask.shape)
    if shape[0] not in (1, batch):
        raise ValueError(f"an attention mask of shape {shape} does not fit a batch of {batch}")
    if mask.dim() == 2 and shape[1] == seen:
        return mask.bool()
    if mask.dim() != 4 or shape[1:] != [1, queries, seen]:
        raise ValueError(
            f"cannot read an attention mask of shape {shape} in a call of {queries} tokens with {seen} seen so far; "
            "QAdACache supports None and 2-D attention masks [batch, tokens]"
        )
    continues = 1 < queries < seen
    visible = mask[:, 0] if continues else mask[:, 0, -1:]
    visible = visible if mask.dtype == torch.bool else visible == 0
    valid = visible[:, -1]
    if continues:
        causal = torch.ones(queries, seen, dtype=torch.bool, device=mask.device).tril(seen - queries)
        # A padding query may see anything (transformers lets it see itself or all): only real ones count.
        wrong = (visible != (causal & valid[:, None, :])) & valid[:, seen - queries :, None]
        if wrong.any():
            raise ValueError(
                "this attention mask is not causal attention over the real tokens (a custom 4-D mask?); "
                "QAdACache supports None and 2-D attention masks: pass one of those, or use DynamicCache"
            )
    return valid


def real_tokens(valid: Tensor, row: int, device: torch.device) -> slice | Tensor:
    """Which tokens of a row are real, from bool `[batch, tokens]` on the host, as an index for a tensor on `device`; a
    slice, which selects a view, if they are neighbours."""
    # Kept for the layers behind the first, as a copy to the device is waited for.
    known = vars(valid).setdefault("real_tokens", {})
    if (row, device) not in known:
        real = valid[row].nonzero().squeeze(-1)
        first, last = (int(real[0]), int(real[-1]) + 1) if len(real) else (0, 0)
        known[row, device] = slice(first, last) if last - first == len(real) else real.to(device)
    return known[row, device]
