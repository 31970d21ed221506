"""Partial attention and its merge: every path against float64, within what the working precision explains."""

import itertools

import pytest
import torch
from parts import DTYPES, LSE_BUDGET, SCALING, check, tensors

from qada_cache import kernels
from qada_cache.kernels import merge_partials, partial_attention, reference, softmax_average


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value_dim", [16, 24])
@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("tokens", [1, 63, 111, 257])
def test_decode(tokens: int, group: int, value_dim: int, dtype: torch.dtype) -> None:
    query, key, value = tensors(1, tokens, group=group, value_dim=value_dim, dtype=dtype)
    everything = torch.ones(1, 1, group, tokens, dtype=torch.bool)
    found = partial_attention(query, key, value, scaling=SCALING)
    check(found, query, key, value, everything)
    check(reference.partial_attention(query, key, value, scaling=SCALING), query, key, value, everything)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value_dim", [16, 24])
@pytest.mark.parametrize("tokens", [1, 63, 111, 257])
def test_causal(tokens: int, value_dim: int, dtype: torch.dtype) -> None:
    query, key, value = tensors(tokens, tokens, value_dim=value_dim, dtype=dtype)
    mask = torch.ones(tokens, tokens, dtype=torch.bool).tril()[None, None]
    for path in (partial_attention, reference.partial_attention):
        check(path(query, key, value, scaling=SCALING, causal=True), query, key, value, mask)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
def test_fused_equals_reference(causal: bool, dtype: torch.dtype) -> None:
    query, key, value = tensors(111, 111, dtype=dtype)
    assert kernels.find_operator(query, key, value) is not None
    out, lse = kernels.partial_attention(query, key, value, scaling=SCALING, causal=causal)
    expected_out, expected_lse = reference.partial_attention(query, key, value, scaling=SCALING, causal=causal)
    ulp = torch.finfo(dtype).eps
    torch.testing.assert_close(out, expected_out, rtol=4 * ulp, atol=4 * ulp)
    torch.testing.assert_close(lse, expected_lse, rtol=2e-6, atol=LSE_BUDGET[dtype])


def test_fused_admits_only_what_it_computes() -> None:
    query, key, value = tensors(4, 4)
    assert kernels.find_operator(query, key, value) is not None
    assert kernels.find_operator(query, key, tensors(4, 4, value_dim=24)[2]) is None
    assert kernels.find_operator(query, key, value.half()) is None
    assert kernels.find_operator(query.double(), key.double(), value.double()) is None
    assert kernels.find_operator(query, key[:, :, :0], value[:, :, :0]) is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_wide_queries_are_multiplied_as_matrices(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of latent attention are: 16 heads of 576 channels, and keys that are values."""
    built: list[bool] = []
    monkeypatch.setattr(kernels.cpu, "compiled_partial_attention", lambda *_, **__: built.append(True))
    made = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, 1, tokens, 576, generator=made).to(dtype) for tokens in (16, 1100))
    query /= 8  # for scores as `SCALING` makes them of 16 channels
    check(partial_attention(query, key, key, scaling=SCALING), query, key, key, torch.ones(1, 1, 16, 1100).bool())
    assert bool(built) == (dtype not in kernels.MULTIPLIED)


@pytest.mark.parametrize("value_dim", [16, 24])
@pytest.mark.parametrize("causal", [False, True])
def test_no_queries(causal: bool, value_dim: int) -> None:
    query, key, value = tensors(0, 0 if causal else 63, value_dim=value_dim)
    out, lse = partial_attention(query, key, value, scaling=SCALING, causal=causal)
    assert (out.shape, lse.shape) == ((2, 3, 0, value_dim), (2, 3, 0))


@pytest.mark.parametrize("part", [0, 1, 2])
def test_other_strides(part: int) -> None:
    """Torch's operator would read them as if a token's values lay side by side."""
    made = list(tensors(5, 63))
    made[part] = made[part].mT.contiguous().mT
    assert made[part].stride(3) != 1
    found = partial_attention(*made, scaling=SCALING)
    check(found, *made, torch.ones(1, 1, 5, 63, dtype=torch.bool))


@pytest.mark.parametrize("causal", [False, True])
def test_blocks_equal_whole(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries and keys in blocks that divide neither: the path without a fused kernel, bounded in memory."""
    monkeypatch.setattr(kernels, "QUERY_BLOCK", 32)
    monkeypatch.setattr(kernels, "KEY_BLOCK", 50)
    monkeypatch.setattr(kernels, "MAX_BLOCK_NUMBERS", 1)
    query, key, value = tensors(111, 111, value_dim=24)
    mask = torch.ones(111, 111, dtype=torch.bool)
    mask = mask.tril() if causal else mask
    check(partial_attention(query, key, value, scaling=SCALING, causal=causal), query, key, value, mask[None, None])


def test_masked_reference_and_queries_that_see_nothing() -> None:
    query, key, value = tensors(9, 63)
    mask = torch.rand(2, 1, 9, 63, generator=torch.Generator().manual_seed(0)) < 0.3
    mask[0, 0, 4] = False
    out, lse = reference.partial_attention(query, key, value, scaling=SCALING, mask=mask)
    assert not out[0, :, 4].any()
    assert (lse[0, :, 4] == -torch.inf).all()
    seen = torch.ones(9, dtype=torch.bool)
    seen[4] = False
    check((out[:, :, seen], lse[:, :, seen]), query[:, :, seen], key, value, mask[:, :, seen])


@pytest.mark.parametrize("value_dim", [16, 24])
@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_part(value_dim: int, dtype: torch.dtype) -> None:
    query, key, value = tensors(5, 0, value_dim=value_dim, dtype=dtype)
    for path in (partial_attention, reference.partial_attention):
        out, lse = path(query, key, value, scaling=SCALING)
        assert out.shape == (2, 3, 5, value_dim)
        assert not out.any()
        assert (lse == -torch.inf).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cuts", [[0], [257], [100], [1, 64, 64, 175], [0, 0, 63, 257]])
def test_merged_splits_equal_whole(cuts: list[int], dtype: torch.dtype) -> None:
    """Any partition of the keys, with empty parts among them, in either order."""
    query, key, value = tensors(7, 257, dtype=dtype)
    bounds = [0, *cuts, 257]
    parts = [
        partial_attention(query, key[:, :, a:b], value[:, :, a:b], scaling=SCALING)
        for a, b in itertools.pairwise(bounds)
    ]
    everything = torch.ones(1, 1, 7, 257, dtype=torch.bool)
    for order in (parts, parts[::-1]):
        out, lse = order[0]
        for part in order[1:]:
            out, lse = merge_partials(out, lse, *part)
        check((out, lse), query, key, value, everything)


def test_merge_with_nothing_is_neutral() -> None:
    query, key, value = tensors(5, 63)
    out, lse = partial_attention(query, key, value, scaling=SCALING)
    nothing, minus_infinity = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
    for merged in (
        merge_partials(out, lse, nothing, minus_infinity),
        merge_partials(nothing, minus_infinity, out, lse),
    ):
        torch.testing.assert_close(merged, (out, lse), rtol=0, atol=1e-6)
    both = merge_partials(nothing, minus_infinity, nothing, minus_infinity)
    assert not both[0].any()
    assert (both[1] == -torch.inf).all()


def test_merge_of_masses_far_apart() -> None:
    """Scores that would overflow or vanish as plain exponentials."""
    one, two = torch.ones(1, 1, 1, 2), torch.full((1, 1, 1, 2), 3.0)
    for high, low in ((1000.0, -1000.0), (-1000.0, -3000.0), (3e4, 0.0)):
        out, lse = merge_partials(one, torch.tensor([[[high]]]), two, torch.tensor([[[low]]]))
        assert out.flatten().tolist() == [1.0, 1.0]
        assert lse.item() == high
    out, lse = merge_partials(one, torch.tensor([[[500.0]]]), two, torch.tensor([[[500.0]]]))
    assert out.flatten().tolist() == [2.0, 2.0]
    assert lse.item() == pytest.approx(500.693147)


def test_softmax_average_of_extreme_scores() -> None:
    value = torch.tensor([1.0, 2.0, 4.0]).view(1, 1, 3, 1)
    scores = torch.tensor([[1e4, 1e4, -1e4], [-1e4, -1e4, -1e4], [-torch.inf, 0.0, -torch.inf]])[None, None]
    out, lse = softmax_average(scores, value)
    torch.testing.assert_close(out.flatten(), torch.tensor([1.5, 7 / 3, 2.0]))
    torch.testing.assert_close(lse.flatten(), torch.tensor([1e4 + 0.6931, -1e4 + 1.0986, 0.0]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize("tokens", [63, 64, 111])
@pytest.mark.parametrize("threads", [1, 2, 8])
def test_keys_split_among_threads(
    tokens: int, heads: int, threads: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every thread gets as many parts of the keys as the others. Keys are a few heads of a larger buffer, as the bulk
    gives them."""
    monkeypatch.setattr(kernels, "MIN_SPLIT_TOKENS", 64)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    query, key, value = (tensor[1:, :heads] for tensor in tensors(1, 200, group=4, dtype=dtype))
    key, value = key[:, :, :tokens], value[:, :, :tokens]
    splits = kernels._count_splits(query, key, threads)
    assert splits == 1 if tokens < 64 else (heads * splits) % threads == 0
    found = kernels.partial_attention(query, key, value, scaling=SCALING)
    check(found, query, key, value, torch.ones(1, 1, 4, tokens, dtype=torch.bool))
