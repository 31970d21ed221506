"""Key moments of the current prompt as layers hold them: running."""

import torch
from torch import Tensor

from ..kernels.reference import suspend_autocast

BLOCK_TOKENS = 4096  # bounds the float32 copy of new keys
Pair = tuple[Tensor, Tensor]  # mean and covariance


def flatten(mean: Tensor, covariance: Tensor) -> Pair:
    """Views of `[rows, kv_heads, dim]` and `[rows, kv_heads, dim, dim]` as batched products take them, `[rows *
    kv_heads, 1, dim]` and `[rows * kv_heads, dim, dim]`. Whoever makes moments makes these too: at every token of every
    layer they would take as long as a product."""
    dim = mean.shape[-1]
    return mean.view(-1, 1, dim), covariance.view(-1, dim, dim)


def take_in(count: int, means: tuple[Tensor, Tensor], covariance: Tensor, left: Tensor, right: Tensor) -> None:
    """Take tokens' vectors `left` `[..., tokens, n]` and `right` (`m`), any dtype, into the `means` of `count` others,
    float32 `[..., n]` and `[..., m]`, and into their covariance `[..., n, m]`, contiguous, in place.

    Chan's merge of centred blocks is stable for large means, and independent of the split, to rounding. Of 0 others,
    nothing is read. `left` may be `right`, and its mean then as well.
    """
    alike, tokens = left is right, left.shape[-2]
    total = count + tokens
    wide = [left.float()] if alike else [left.float(), right.float()]
    found = [part.mean(dim=-2) for part in wide]
    centred = [part - mean.unsqueeze(-2) for part, mean in zip(wide, found, strict=True)]
    product = covariance.flatten(0, -3)
    product.baddbmm_(centred[0].mT.flatten(0, -3), centred[-1].flatten(0, -3), beta=count / total, alpha=1 / total)
    held = means[: len(found)]
    if not count:
        for mean, new in zip(held, found, strict=True):
            mean.copy_(new)
        return
    off = [(new - mean).flatten(0, -2) for mean, new in zip(held, found, strict=True)]
    product.baddbmm_(off[0].unsqueeze(-1), off[-1].unsqueeze(-2), alpha=count / total * (tokens / total))
    for mean, new in zip(held, found, strict=True):
        mean.lerp_(new, tokens / total)


class RunningMoments:
    """Count, mean and covariance of the keys of one layer, row by row, in float32."""

    def __init__(self, batch: int, kv_heads: int, dim: int, device: torch.device) -> None:
        self.count = [0] * batch  # tokens taken in
        # Of the population; zeros for a row without tokens.
        mean = torch.zeros(batch, kv_heads, dim, dtype=torch.float32, device=device)
        self._hold(mean, mean.new_zeros(batch, kv_heads, dim, dim))

    def _hold(self, mean: Tensor, covariance: Tensor) -> None:
        self.mean, self.covariance = mean, covariance
        self.flat = flatten(mean, covariance)

    def update(self, rows: slice, keys: Tensor) -> None:
        """Take in `keys` `[rows, kv_heads, tokens, dim]`, any dtype; the rows must have equal counts."""
        for block in keys.split(BLOCK_TOKENS, dim=-2):
            old, new = self.count[rows.start], block.shape[-2]
            if not new:
                continue
            with suspend_autocast(keys.device):
                take_in(old, (self.mean[rows], self.mean[rows]), self.covariance[rows], block, block)
            self.count[rows] = [old + new] * len(self.count[rows])

    def clear(self, rows: slice) -> None:
        """Forget everything about these rows."""
        self.count[rows] = [0] * len(self.count[rows])
        self.mean[rows].zero_()
        self.covariance[rows].zero_()

    def select_rows(self, index: list[int]) -> None:
        """Row `i` becomes the old row `index[i]`."""
        self.count = [self.count[row] for row in index]
        self._hold(self.mean[index], self.covariance[index])

    def move(self, device: torch.device) -> None:
        """Move to another device."""
        self._hold(self.mean.to(device), self.covariance.to(device))

    def restore(self, count: list[int], mean: Tensor, covariance: Tensor) -> None:
        """Take over another one's moments."""
        self.count = count
        self._hold(mean, covariance)
