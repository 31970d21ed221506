"""Energies of the channels of a model's queries; the sketch weighs keys by them (`sketch/codec.py`).

Energies are a property of the model, not of a prompt: random tokens give the same ones as prose. Positions turn a pair
of channels, so over many positions both have the same energy.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .rotation import Rotation

_observing = threading.Lock()  # two at once would restore each other's entry in the one table


def own_attention(module: torch.nn.Module, name: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The function that `module` calls under the attention implementation `name`."""
    # Eager attention is not registered anywhere, each modeling file defines or imports its own; and a file may have a
    # table of its own. A class derived elsewhere uses those of the file it derives from.
    wanted = "eager_attention_forward" if name == "eager" else "ALL_ATTENTION_FUNCTIONS"
    for kind in type(module).__mro__:
        if (found := getattr(sys.modules.get(kind.__module__), wanted, None)) is not None:
            return found if name == "eager" else found[name]
    return ALL_ATTENTION_FUNCTIONS[name]


@contextmanager
def observed(model: PreTrainedModel, observe: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Inside, `observe(layer, query)` sees the queries `[batch, heads, tokens, dim]` of each of the model's layers.

    Models that do not take their attention function from transformers' table are not seen.
    """
    with _observing:
        yield from _observed(model, observe)


def _observed(model: PreTrainedModel, observe: Callable[[int, Tensor], None]) -> Iterator[None]:
    ours = set(model.modules())
    name = model.config.get_text_config(decoder=True)._attn_implementation
    table = ALL_ATTENTION_FUNCTIONS
    original = table.get(name)  # none for eager attention

    def attention(module: torch.nn.Module, query: Tensor, *args: object, **kwargs: object) -> tuple:
        if module in ours and isinstance(index := getattr(module, "layer_idx", None), int):
            observe(index, query)
        return (original or own_attention(module, name))(module, query, *args, **kwargs)

    table[name] = attention
    try:
        yield
    finally:
        del table[name]
        if original is not None and table.get(name) is not original:  # the table had an entry of its own
            table[name] = original


class QueryEnergies:
    """The mean square of every channel of a model's queries, gathered while it reads; an observer of `observed`."""

    def __init__(self) -> None:
        self.sums: dict[int, Tensor] = {}
        self.tokens: dict[int, int] = {}

    def __call__(self, layer: int, query: Tensor) -> None:
        """Take in a layer's queries `[batch, heads, tokens, dim]`."""
        squares = query.detach().float().square().sum(dim=(0, 2)).double().cpu()  # [heads, dim]
        self.sums[layer] = squares + self.sums[layer] if layer in self.sums else squares
        self.tokens[layer] = self.tokens.get(layer, 0) + query.shape[0] * query.shape[2]

    def by_head(self, layer: int, kv_heads: int, rotation: Rotation | None) -> Tensor | None:
        """Energies float32 `[kv_heads, dim]` of a layer: means over its query heads and over each rotary pair.

        None if its queries were not seen, or are not of that many KV heads. Channels without a rotation keep their own.
        """
        if layer not in self.sums or len(self.sums[layer]) % kv_heads:
            return None
        found = (self.sums[layer] / self.tokens[layer]).unflatten(0, (kv_heads, -1)).mean(dim=1)
        if rotation is not None and rotation.dim == found.shape[-1]:
            found = (found + found[:, rotation.partners]) / 2
        return found.float()
