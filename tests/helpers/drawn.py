"""Random numbers that are the same in every run."""

import torch
from torch import Tensor


def random(*shape: int, seed: int = 0) -> Tensor:
    """Normal random numbers, float32 of this shape."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_moments(rows: int, kv_heads: int, dim: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Key moments of `rows` rows, float64: mean `[rows, kv_heads, dim]`, covariance `[rows, kv_heads, dim, dim]`, and
    numbers of tokens `[rows, 1, 1, 1]`."""
    mean = random(rows, kv_heads, dim, seed=seed).double()
    spread = random(rows, kv_heads, dim, dim, seed=seed + 1).double()
    return mean, spread @ spread.mT / dim, torch.arange(rows).double().view(-1, 1, 1, 1) * 90 + 100
