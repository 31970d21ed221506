"""Running key moments of the current prompt, as layers hold them."""

import torch
from torch import Tensor

from ..kernels.correlating import take_in
from ..kernels.reference import suspend_autocast
from ..selected_rows import SelectedRows

BLOCK_TOKENS = 4096  # bounds the float32 copy of new keys
Pair = tuple[Tensor, Tensor]  # mean and covariance


def flatten(mean: Tensor, covariance: Tensor) -> Pair:
    """Views of `[rows, kv_heads, dim]` and `[rows, kv_heads, dim, dim]` as batched products take them, `[rows *
    kv_heads, 1, dim]` and `[rows * kv_heads, dim, dim]`. They are made with the moments, once: at every token of every
    layer they would take as long as a product."""
    dim = mean.shape[-1]
    return mean.view(-1, 1, dim), covariance.view(-1, dim, dim)


class RunningMoments:
    """Count, mean and covariance of the keys of one layer, row by row, in float32."""

    def __init__(self, batch: int, kv_heads: int, dim: int, device: torch.device) -> None:
        self.count = [0] * batch  # tokens taken in
        self.kernels = "auto"  # one of `choice.KINDS`
        # Mean and covariance of the population; zeros for a row without tokens.
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
                take_in(old, (self.mean[rows], self.mean[rows]), self.covariance[rows], block, block, self.kernels)
            self.count[rows] = [old + new] * len(self.count[rows])

    def clear(self, rows: slice) -> None:
        """Forget everything about these rows."""
        self.count[rows] = [0] * len(self.count[rows])
        self.mean[rows].zero_()
        self.covariance[rows].zero_()

    def select_rows(self, index: SelectedRows) -> None:
        """Row `i` becomes the old row `index[i]`."""
        self.count = [self.count[row] for row in index]
        self._hold(index.apply(self.mean), index.apply(self.covariance))

    def move(self, device: torch.device) -> None:
        """Move to another device."""
        self._hold(self.mean.to(device), self.covariance.to(device))

    def restore(self, count: list[int], mean: Tensor, covariance: Tensor) -> None:
        """Replace all moments by these: per row the number of tokens, `mean` `[rows, kv_heads, dim]` and `covariance`
        `[rows, kv_heads, dim, dim]`, both float32."""
        self.count = count
        self._hold(mean, covariance)
