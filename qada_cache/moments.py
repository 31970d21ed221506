"""Mean and covariance of keys: running over the current prompt, or kept from another one."""

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import files

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BLOCK_TOKENS = 4096  # bounds the float32 copy of the keys whose moments are taken


class RunningMoments:
    """Count, mean and scatter of the keys of one layer, row by row, in float32.

    Updated by Chan's pairwise merge of centred blocks: stable for keys with large means, and the same whatever
    the split into blocks, to rounding.

    Attributes:
        count: tokens taken in, one int a row.
        mean: `[batch, kv_heads, dim]` float32.
        scatter: `[batch, kv_heads, dim, dim]` float32, the sum of outer products of the centred keys.
    """

    def __init__(self, batch: int, kv_heads: int, dim: int, device: torch.device) -> None:
        self.count = [0] * batch
        self.mean = torch.zeros(batch, kv_heads, dim, dtype=torch.float32, device=device)
        self.scatter = torch.zeros(batch, kv_heads, dim, dim, dtype=torch.float32, device=device)

    @property
    def covariance(self) -> Tensor:
        """Population covariance `[batch, kv_heads, dim, dim]` float32; zeros for a row without tokens."""
        count = torch.tensor(self.count, dtype=torch.float32).clamp_min(1).to(self.scatter.device)
        return self.scatter / count[:, None, None, None]

    def update(self, rows: slice, keys: Tensor) -> None:
        """Take in `keys` `[rows, kv_heads, tokens, dim]`, any dtype; the rows must have equal counts."""
        for block in keys.split(BLOCK_TOKENS, dim=-2):
            old, new = self.count[rows.start], block.shape[-2]
            if new == 0:
                continue
            block = block.float()
            mean = block.mean(dim=-2)
            centred = block - mean.unsqueeze(-2)
            delta = mean - self.mean[rows]
            self.mean[rows] += delta * (new / (old + new))
            self.scatter[rows] += torch.matmul(centred.transpose(-1, -2), centred)
            self.scatter[rows] += delta.unsqueeze(-1) * delta.unsqueeze(-2) * (old * new / (old + new))
            self.count[rows] = [old + new] * len(self.count[rows])

    def clear(self, rows: slice) -> None:
        """Forget everything about these rows."""
        self.count[rows] = [0] * len(self.count[rows])
        self.mean[rows] = 0.0
        self.scatter[rows] = 0.0

    def select(self, index: list[int]) -> None:
        """Keep, repeat or reorder rows: row `i` becomes the old row `index[i]`."""
        self.count = [self.count[row] for row in index]
        self.mean, self.scatter = self.mean[index], self.scatter[index]


@dataclass(frozen=True, eq=False)
class KeyMoments:
    """Key moments of a whole model, taken from a prompt other than the one being read (the paper's option 2).

    Args:
        mean: `[layers, kv_heads, dim]` float32.
        covariance: `[layers, kv_heads, dim, dim]` float32, population covariance.
        tokens: how many tokens they were taken from.
        model_type: the `model_type` of the config, checked against the cache's.
        prompt: a word for what the prompt was, e.g. "random-words".
    """

    mean: Tensor
    covariance: Tensor
    tokens: int
    model_type: str
    prompt: str = "unknown"
    _placed: dict = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        layers_heads_dim = tuple(self.mean.shape)
        if len(layers_heads_dim) != 3 or self.covariance.shape != (*layers_heads_dim, layers_heads_dim[-1]):
            raise ValueError(
                "KeyMoments takes mean [layers, kv_heads, dim] and covariance [layers, kv_heads, dim, dim], "
                f"got {list(self.mean.shape)} and {list(self.covariance.shape)}"
            )
        if not (torch.isfinite(self.mean).all() and torch.isfinite(self.covariance).all()):
            raise ValueError("KeyMoments: mean or covariance holds nan or infinity")

    def layer(self, layer: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Mean `[1, kv_heads, dim]` and covariance `[1, kv_heads, dim, dim]` of one layer on `device`, float32."""
        where = (layer, device)
        if where not in self._placed:
            placed = self.mean[layer].float().to(device), self.covariance[layer].float().to(device)
            self._placed[where] = (placed[0].unsqueeze(0), placed[1].unsqueeze(0))
        return self._placed[where]

    def tensors(self) -> dict[str, Tensor]:
        """What a file keeps of these moments, under the names `from_file` reads."""
        return {"moments.mean": self.mean, "moments.covariance": self.covariance}

    def header(self) -> dict[str, Any]:
        """Everything else a file keeps."""
        return {"tokens": self.tokens, "model_type": self.model_type, "prompt": self.prompt}

    @classmethod
    def from_file(cls, tensors: dict[str, Tensor], header: dict[str, Any]) -> "KeyMoments":
        """The inverse of `tensors` and `header`."""
        return cls(mean=tensors["moments.mean"], covariance=tensors["moments.covariance"], **header)

    def save(self, path: str | os.PathLike) -> None:
        """Write to one safetensors file."""
        files.write(path, "qada-moments", self.tensors(), self.header())

    @classmethod
    def load(cls, path: str | os.PathLike) -> "KeyMoments":
        """Read what `save` wrote.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is truncated, altered, not a moments file, or of a newer format.
        """
        return cls.from_file(*files.read(path, "qada-moments"))

    @classmethod
    @torch.no_grad()
    def collect(
        cls, model: "PreTrainedModel", input_ids: Tensor, *, sink_tokens: int = 16, prompt: str = "custom"
    ) -> "KeyMoments":
        """Moments of the keys of one forward pass over `input_ids` `[1, tokens]` (the paper's own scheme).

        Give it about as many tokens as the prompts it will serve: moments carry position, so a prompt much
        longer than yours describes keys yours does not have. The keys of the first `sink_tokens` tokens are left
        out: they are never part of a bulk, and a sink's key is unlike all others.

        Raises:
            ValueError: `input_ids` is not one row of more than `sink_tokens` tokens, or a layer's keys cannot be
                read from a `DynamicCache`.
        """
        from transformers import DynamicCache

        if input_ids.dim() != 2 or input_ids.shape[0] != 1 or input_ids.shape[1] <= sink_tokens:
            raise ValueError(
                f"input_ids must be [1, tokens] with more than sink_tokens = {sink_tokens} tokens, "
                f"got {list(input_ids.shape)}"
            )
        cache = DynamicCache()  # without a config every layer keeps every key, sliding ones included
        model(input_ids=input_ids.to(model.device), past_key_values=cache, use_cache=True, logits_to_keep=1)
        means, covariances = [], []
        for index, layer in enumerate(cache.layers):
            keys = getattr(layer, "keys", None)
            if keys is None or keys.dim() != 4:
                raise ValueError(
                    f"layer {index} of {model.config.model_type} keeps no [batch, heads, tokens, dim] keys"
                )
            running = RunningMoments(1, keys.shape[1], keys.shape[3], keys.device)
            running.update(slice(0, 1), keys[:, :, sink_tokens:])
            means.append(running.mean[0].cpu())
            covariances.append(running.covariance[0].cpu())
        return cls(
            mean=torch.stack(means),
            covariance=torch.stack(covariances),
            tokens=input_ids.shape[1],
            model_type=model.config.get_text_config(decoder=True).model_type,
            prompt=prompt,
        )
