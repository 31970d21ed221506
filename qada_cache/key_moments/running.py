"""Statistics that are gathered while a model reads: mean and covariance of its keys, energies of its queries."""

import torch
from torch import Tensor

from ..kernels.autocast import without_autocast
from .rotation import Rotation

BLOCK_TOKENS = 4096  # bounds the float32 copy of new keys


class RunningMoments:
    """Count, mean and covariance of the keys of one layer, row by row, in float32.

    Updated by Chan's pairwise merge of centred blocks: stable for keys with large means, and independent of the split
    into blocks, to rounding.

    Attributes:
        count: tokens taken in, one int a row; and `known`, the same as int64 `[batch]` beside the other tensors.
        mean: `[batch, kv_heads, dim]` float32.
        covariance: `[batch, kv_heads, dim, dim]` float32, of the population; zeros for a row without tokens.
    """

    def __init__(self, batch: int, kv_heads: int, dim: int, device: torch.device) -> None:
        self.count = [0] * batch
        self.known = torch.zeros(batch, dtype=torch.int64, device=device)
        self.mean = torch.zeros(batch, kv_heads, dim, dtype=torch.float32, device=device)
        self.covariance = torch.zeros(batch, kv_heads, dim, dim, dtype=torch.float32, device=device)

    def update(self, rows: slice, keys: Tensor) -> None:
        """Take in `keys` `[rows, kv_heads, tokens, dim]`, any dtype; the rows must have equal counts."""
        for block in keys.split(BLOCK_TOKENS, dim=-2):
            if block.shape[-2]:
                with without_autocast(keys.device):
                    self._merge(rows, block.float())

    def _merge(self, rows: slice, block: Tensor) -> None:
        """Take in one float32 block that is not empty."""
        old, new = self.count[rows.start], block.shape[-2]
        mean, share = block.mean(dim=-2), new / (old + new)
        centred = block - mean.unsqueeze(-2)
        covariance = torch.matmul(centred.transpose(-1, -2), centred) / new
        delta = mean - self.mean[rows]
        self.mean[rows] += delta * share
        self.covariance[rows] += (covariance - self.covariance[rows]) * share
        self.covariance[rows] += delta.unsqueeze(-1) * delta.unsqueeze(-2) * (share * (1 - share))
        self._counted(rows, old + new)

    def _counted(self, rows: slice, tokens: int) -> None:
        self.count[rows] = [tokens] * len(self.count[rows])
        self.known[rows] = tokens

    def clear(self, rows: slice) -> None:
        """Forget everything about these rows."""
        self._counted(rows, 0)
        self.mean[rows] = 0.0
        self.covariance[rows] = 0.0

    def select(self, index: list[int]) -> None:
        """Keep, repeat or reorder rows: row `i` becomes the old row `index[i]`."""
        self.count = [self.count[row] for row in index]
        self.known, self.mean, self.covariance = self.known[index], self.mean[index], self.covariance[index]

    def move(self, device: torch.device) -> None:
        """Move to another device."""
        self.known, self.mean, self.covariance = (t.to(device) for t in (self.known, self.mean, self.covariance))

    def restore(self, count: list[int], mean: Tensor, covariance: Tensor) -> None:
        """Take over another one's moments."""
        self.count, self.mean, self.covariance = count, mean, covariance
        self.known = torch.tensor(count, device=mean.device)


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
