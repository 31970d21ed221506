"""Random numbers that are the same in every run."""

import torch
from torch import Tensor


def random(*shape: int, seed: int = 0) -> Tensor:
    """Normal ones, float32."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_moments(rows: int, kv_heads: int, dim: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, covariance and tokens of so many rows, float64."""
    mean = random(rows, kv_heads, dim, seed=seed).double()
    spread = random(rows, kv_heads, dim, dim, seed=seed + 1).double()
    return mean, spread @ spread.mT / dim, torch.arange(rows).double().view(-1, 1, 1, 1) * 90 + 100
