"""The queries that evicting methods score keys by: the last of a text, and what is to be expected of later ones."""

import sys

import torch
from torch import Tensor
from transformers import PreTrainedModel

WINDOW = 64  # queries at the end that vote in SnapKV, as in its authors' code
SINKS = 4  # first tokens that Expected Attention leaves out of its statistics, and keeps
AHEAD = 512  # positions after a text that Expected Attention averages over
SERVED = ("llama", "qwen2")  # every layer turns queries, all in the same way, and divides scores by sqrt(dim)


class Queries:
    """An observer of `observed` for one call that reads a whole text.

    Attributes:
        last: of each layer, the last `WINDOW` queries `[1, heads, queries, dim]`, turned as attention has them.
        mean, covariance: float32 `[1, heads, dim]` and `[1, heads, dim, dim]`, of each layer's queries after the first
            `SINKS`, each turned by the mean of the rotations of the next `AHEAD` positions instead of by its own.

    Raises:
        NotImplementedError: a model of another kind than `SERVED`.
    """

    def __init__(self, model: PreTrainedModel, tokens: int) -> None:
        if (kind := model.config.model_type) not in SERVED:
            raise NotImplementedError(f"other methods are tried on models of type {', '.join(SERVED)}, not {kind}")
        rotary = model.get_decoder().rotary_emb
        like = torch.zeros(1, device=model.device)  # float32, the dtype that is answered in
        places = torch.arange(tokens + AHEAD, device=model.device).unsqueeze(0)
        self.cos, self.sin = (found.float() for found in rotary(like, places))
        self.tokens = tokens
        self.turn = sys.modules[type(model).__module__].apply_rotary_pos_emb
        self.last: dict[int, Tensor] = {}
        self.mean: dict[int, Tensor] = {}
        self.covariance: dict[int, Tensor] = {}

    def __call__(self, layer: int, query: Tensor) -> None:
        """Take in a layer's queries `[1, heads, tokens, dim]`."""
        self.last[layer] = query[:, :, -WINDOW:]
        expected = self._as_later(query)[:, :, SINKS:]
        self.mean[layer] = expected.mean(dim=2)
        centred = expected - expected.mean(dim=2, keepdim=True)
        self.covariance[layer] = centred.mT @ centred / centred.shape[2]

    def _as_later(self, query: Tensor) -> Tensor:
        """Queries `[1, heads, tokens, dim]`, turned back and then by the mean of later rotations; float32."""
        cos, sin = self.cos[:, : self.tokens], self.sin[:, : self.tokens]
        square = cos.square() + sin.square()  # some kinds of rotary positions scale as well
        back = self._turned(query.float(), cos / square, -sin / square)
        later = (part[:, self.tokens :].mean(dim=1, keepdim=True) for part in (self.cos, self.sin))
        return self._turned(back, *later)

    def _turned(self, query: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self.turn(query, query, cos, sin)[0]
