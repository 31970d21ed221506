"""Mean and covariance of keys, running over the prompt being read."""

import torch
from torch import Tensor

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
