"""Reading attention masks: which tokens are real, and whether the mask is one this cache understands."""

import torch
from torch import Tensor


def token_validity(mask: Tensor | None, *, batch: int, seen: int, queries: int) -> Tensor | None:
    """Which of the tokens seen so far are real, from the mask a model hands to its attention function.

    Args:
        mask: None (all real, causal), bool `[batch, seen]`, bool `[batch or 1, 1, queries, seen]` (True: attend) or
            the same shape in floating point, added to the scores (0: attend).
        batch: rows of the call.
        seen: logical tokens, padding included, up to and including this call's.
        queries: tokens of this call.

    Returns:
        bool `[batch, seen]` on the host, or None when every token is real.

    Raises:
        ValueError: the mask has another shape, differs between heads, or (in a call that continues a sequence)
            is not causal attention over the real tokens.
    """
    if mask is None:
        return None
    shape = list(mask.shape)
    if shape[0] not in (1, batch):
        raise ValueError(f"an attention mask of shape {shape} does not fit a batch of {batch}")
    if mask.dim() == 2 and shape[1] == seen:
        valid = mask.bool()
    elif mask.dim() == 4 and shape[1] == 1 and shape[2] == queries and shape[3] == seen:
        visible = mask if mask.dtype == torch.bool else mask == 0
        valid = visible[:, 0, -1]
        if 1 < queries < seen:
            causal = torch.ones(queries, seen, dtype=torch.bool, device=mask.device).tril(seen - queries)
            # A padding query may see anything (transformers lets it see itself or all): only real ones count.
            wrong = (visible[:, 0] != (causal & valid[:, None, :])) & valid[:, seen - queries :, None]
            if wrong.any():
                raise ValueError(
                    "this attention mask is not causal attention over the real tokens (a custom 4-D mask?); "
                    "QAdACache supports None and 2-D attention masks: pass one of those, or use DynamicCache"
                )
    else:
        raise ValueError(
            f"cannot read an attention mask of shape {shape} in a call of {queries} tokens with {seen} seen so far; "
            "QAdACache supports None and 2-D attention masks [batch, tokens]"
        )
    valid = valid.expand(batch, seen).cpu()
    return None if valid.all() else valid


def real_tokens(valid: Tensor, device: torch.device) -> slice | Tensor:
    """Which tokens of a row are real, from bool `[tokens]` on the host, as an index for a tensor on `device`.

    A slice if they are neighbours, as they are where padding is on one side: what it selects is no copy.
    """
    real = valid.nonzero().squeeze(-1)
    if not len(real):
        return slice(0, 0)
    first, last = int(real[0]), int(real[-1]) + 1
    return slice(first, last) if last - first == len(real) else real.to(device)
