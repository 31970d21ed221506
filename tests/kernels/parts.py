"""Small parts of attention, and what a kernel makes of one against float64."""

import torch
from rounding import deviation, error_budget, naive_attention
from torch import Tensor

SCALING = 0.3  # not 1/sqrt(dim), what a kernel would take by itself
LSE_BUDGET = {torch.float32: 2e-6, torch.bfloat16: 2e-4, torch.float16: 2e-4}
DTYPES = list(LSE_BUDGET)


def tensors(
    queries: int, tokens: int, *, group: int = 1, value_dim: int = 16, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """A group's query heads packed along the queries, as the cache calls the kernels."""
    generator = torch.Generator().manual_seed(1000 * queries + tokens)
    made = (
        torch.randn(2, 3, count, dim, generator=generator)
        for count, dim in ((queries * group, 16), (tokens, 16), (tokens, value_dim))
    )
    query, key, value = (tensor.to(dtype) for tensor in made)
    return 2 * query, key, value


def check(found: tuple[Tensor, Tensor], query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> None:
    """`(out, lse)` against float64; the budget comes from the error of plain attention in the same dtype."""
    out, lse = found
    options = {"query": query, "keys": key, "values": value, "scaling": SCALING, "mask": mask}
    expected = naive_attention(**{**options, "query": query.double()}, dtype=torch.float64)
    scores = (query.double() @ key.double().transpose(-1, -2) * SCALING).masked_fill(~mask, -torch.inf)
    assert out.dtype == lse.dtype == torch.float32
    assert out.shape == (*query.shape[:-1], value.shape[-1])
    assert lse.shape == query.shape[:-1]
    lowp = naive_attention(**options, dtype=query.dtype)
    budget = error_budget(reference64=expected, lowp=lowp, deviations=deviation(**options))
    assert float((out.double() - expected).abs().max()) <= budget
    # Scores are summed in float32 whatever the dtype, but torch's fused kernel has a faster exp for half precision.
    true = torch.logsumexp(scores, dim=-1)
    torch.testing.assert_close(lse.double(), true, rtol=2e-6, atol=LSE_BUDGET[query.dtype])
