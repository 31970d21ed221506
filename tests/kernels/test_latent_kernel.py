"""The kernel for latents: against float64, beside torch's products, for every set of instructions."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator

import pytest
import torch
from compilers import needs_compiler
from test_instruction_sets import SETS
from torch import Tensor

from qada_cache.kernels import partial_attention
from qada_cache.kernels.cpu import building, latent
from qada_cache.kernels.cpu.prompt import read_instructions
from qada_cache.sketch import Layout, count_closed, count_segments
from qada_cache.sketch.codec import Sketch
from qada_cache.sketch.coded import RecordLayout, code_tokens, decode_keys, estimate_keys, find_query_weights

# Allowed error in units of torch's, mean and largest: sums have another order.
NEAR = {torch.bfloat16: (1.02, 1.5), torch.float16: (1.02, 1.5), torch.float32: (1.3, 2.0)}
# Numbers of queries and of tokens: around vectors of 4, 8 and 16 queries, pairs of these, and tiles of 64 tokens.
CALLS = [(1, 1), (4, 63), (16, 64), (17, 65), (40, 300), (128, 129)]
NATIVE = "native"
SCALING = 0.1
pytestmark = needs_compiler


@pytest.fixture
def built_for(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if platform.machine() not in ("x86_64", "AMD64") or not SETS.get(request.param, set()) <= read_instructions():
        pytest.skip("the processor cannot run it")
    flags = [flag.replace("native", request.param) for flag in building.FLAGS]
    # The source's code for older processors is the subject, so -O1 is enough.
    flags = flags if request.param == NATIVE else ["-O1" if flag == "-O3" else flag for flag in flags]
    monkeypatch.setattr(building, "FLAGS", tuple(flags))
    latent.build_latent.cache_clear()
    yield
    latent.build_latent.cache_clear()


def tensors(queries: int, tokens: int, dim: int, dtype: torch.dtype, spread: float = 2.0) -> tuple[Tensor, Tensor]:
    """Queries, and rows of a larger buffer, which is nan wherever the kernel has no business."""
    generator = torch.Generator().manual_seed(tokens)
    query = torch.randn(2, 1, queries, dim, generator=generator) * spread**0.5
    whole = torch.full((3, 1, tokens + 9, dim), torch.nan, dtype=dtype)
    whole[1:, :, :tokens] = (torch.randn(2, 1, tokens, dim, generator=generator) * spread**0.5).to(dtype)
    return query.to(dtype), whole[1:, :, :tokens]


def in_float64(query: Tensor, latents: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    scores = SCALING * query.double() @ latents.double().mT
    return scores.softmax(-1) @ latents.double()[..., :rank], scores.logsumexp(-1)


def by_torch(query: Tensor, latents: Tensor, rank: int) -> Tensor:
    return partial_attention(query, latents, latents, scaling=SCALING, kernels="torch")[0][..., :rank]


Attend = Callable[..., tuple[Tensor, Tensor] | None]


def check_errors(attend: Attend, dtype: torch.dtype, dim: int, rank: int) -> None:
    """Assert that a kernel's outputs for queries and latents, in all `CALLS`, are as near to float64 as torch's."""
    mean, most = NEAR[dtype]
    errors: list[tuple[Tensor, Tensor]] = []
    for queries, tokens in CALLS:
        query, latents = tensors(queries, tokens, dim, dtype)
        found = attend(query, latents)
        assert found is not None
        wanted, wanted_lse = in_float64(query, latents, rank)
        errors.append(tuple((each - wanted).abs().flatten() for each in (found[0], by_torch(query, latents, rank))))
        torch.testing.assert_close(found[1].double(), wanted_lse, atol=2e-5, rtol=2e-6)
    ours, torchs = (torch.cat(each) for each in zip(*errors, strict=True))
    assert ours.mean() <= mean * torchs.mean()
    assert ours.max() <= most * torchs.max()


@pytest.mark.usefixtures("built_for")
@pytest.mark.parametrize(
    ("built_for", "dtype", "dim", "rank"),
    [
        *((NATIVE, torch.float32, 48, 32), (NATIVE, torch.bfloat16, 576, 512)),
        *((NATIVE, torch.float16, 24, 16), (NATIVE, torch.bfloat16, 40, 24), ("x86-64", torch.float16, 48, 32)),
        *(("x86-64-v3", torch.bfloat16, 48, 32), ("x86-64-v4", torch.bfloat16, 48, 32)),
    ],
    indirect=["built_for"],
    ids=str,
)
def test_as_near_to_float64_as_torch(dtype: torch.dtype, dim: int, rank: int) -> None:
    def attend(query: Tensor, latents: Tensor) -> tuple[Tensor, Tensor] | None:
        assert latent.serves_latents(query, latents, rank, 1024)
        return latent.attend_latents(query, latents, rank, scaling=SCALING)

    check_errors(attend, dtype, dim, rank)


@pytest.mark.usefixtures("built_for")
@pytest.mark.parametrize(
    ("built_for", "dtype", "dim", "rank", "bits"),
    [
        *((NATIVE, torch.bfloat16, 192, 120, 8), ("x86-64", torch.float32, 40, 16, 4)),
        *(("x86-64-v3", torch.bfloat16, 40, 16, 8), ("x86-64-v4", torch.float32, 192, 120, 4)),
    ],
    indirect=["built_for"],
    ids=str,
)
def test_records_are_decoded(dtype: torch.dtype, dim: int, rank: int, bits: int) -> None:
    check_records(latent.attend_recorded_latents, dtype, dim, rank, bits)


def check_records(attend: Attend, dtype: torch.dtype, dim: int, rank: int, bits: int, tokens: int = 1300) -> None:
    """Assert that a kernel attends to records of latents as torch does to decoded ones, which are rounded to the
    model's dtype. Bulks end in the last segment, or before it."""
    made = torch.Generator().manual_seed(0)
    keys = 2 * torch.randn(2, 1, tokens, dim, generator=made) + torch.randn(2, 1, 1, dim, generator=made)
    energies, layout = torch.rand(1, dim, generator=made), Layout.from_bits(dim, 1.5)
    records_layout = RecordLayout.from_bits(dim, 0, bits)
    assert layout is not None
    assert records_layout is not None
    sketch, weights = Sketch.of(keys, keys[..., :0], energies, layout), find_query_weights(energies, dim, keys.device)
    predicted = estimate_keys(sketch.to_tensors(), layout)
    records = code_tokens(keys, keys[..., :0], predicted, weights, records_layout)
    latents = decode_keys(records, predicted, weights, records_layout)
    query = 0.5 * torch.randn(2, 1, 20, dim, generator=made)
    for count in (count_closed(tokens), tokens):
        part = latents[:, :, :count]
        told = {"scaling": SCALING, "segments": count_segments(tokens)}
        found = attend(query.to(dtype), records[:, :, :count], sketch, weights, records_layout, rank, **told)
        assert found is not None
        wanted, wanted_lse = in_float64(query.to(dtype), part, rank)
        own_lse = in_float64(query.to(dtype), part.to(dtype), rank)[1]
        own = (by_torch(query.to(dtype), part.to(dtype), rank) - wanted).abs()
        error, (mean, most) = (found[0] - wanted).abs(), NEAR[dtype]
        assert error.mean() <= mean * own.mean() + 2e-7 * wanted.abs().max()
        assert error.max() <= most * own.max() + 2e-6 * wanted.abs().max()
        off = (found[1] - wanted_lse).abs().max()
        assert off <= 1.5 * (own_lse - wanted_lse).abs().max() + 2e-5


@pytest.mark.parametrize("tokens", [64, 1000, 4099])
def test_threads(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of uneven length, more threads than there are parts, and none without a token."""
    query, latents = tensors(20, tokens, 48, torch.float32)
    wanted, wanted_lse = in_float64(query, latents, 32)
    monkeypatch.setattr(latent, "THREAD_TOKENS", 8)
    for threads in (1, 3, 16):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        found = latent.attend_latents(query, latents, 32, scaling=SCALING)
        assert found is not None
        torch.testing.assert_close(found[0].double(), wanted, atol=2e-6, rtol=2e-6)
        torch.testing.assert_close(found[1].double(), wanted_lse, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize(
    ("dtype", "dim", "rank"), [(torch.float32, 48, 32), (torch.bfloat16, 40, 24), (torch.float16, 24, 16)], ids=str
)
def test_scores_far_apart_and_alike(dtype: torch.dtype, dim: int, rank: int) -> None:
    """A token that outweighs all others by far, late or early, and the same score everywhere."""
    query, latents = tensors(16, 300, dim, dtype, spread=100.0)
    for each in (latents, latents.flip(2), torch.zeros_like(latents)):
        wanted, wanted_lse = in_float64(query, each, rank)
        found = latent.attend_latents(query, each, rank, scaling=SCALING)
        assert found is not None
        assert (found[0] - wanted).abs().max() <= 2**-8 * latents.abs().max()
        torch.testing.assert_close(found[1].double(), wanted_lse, atol=1e-4, rtol=2e-6)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_shows(bad: float) -> None:
    query, latents = tensors(16, 200, 48, torch.float32)
    query[0, 0, 3, 5] = latents[1, 0, 150, 7] = bad
    found = latent.attend_latents(query, latents, 32, scaling=SCALING)
    assert found is not None
    wrong = ~found[0].isfinite().all(-1)[:, 0]
    expected = torch.zeros_like(wrong)
    expected[0, 3] = expected[1] = True
    assert torch.equal(wrong, expected)


@pytest.mark.parametrize(("tokens", "infinite"), [(1, 1), (200, 150), (200, 200)])
def test_tokens_whose_scores_are_not_finite(tokens: int, infinite: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of -inf have no weight, and are no reason for nan: those of whole tiles, and of all tokens."""
    query, latents = tensors(16, tokens, 48, torch.float32)
    query[..., 40], latents[:, :, :infinite, 40] = 1, -torch.inf
    wanted, wanted_lse = in_float64(query, latents, 32)
    monkeypatch.setattr(latent, "THREAD_TOKENS", 8)
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        found = latent.attend_latents(query, latents, 32, scaling=SCALING)
        assert found is not None
        assert found[0].isfinite().all()
        torch.testing.assert_close(found[1].double(), wanted_lse, atol=1e-4, rtol=2e-6)
        if infinite < tokens:
            torch.testing.assert_close(found[0].double(), wanted, atol=1e-4, rtol=0)


def test_no_token() -> None:
    """The neutral element of merging, as `partial_attention` gives it."""
    query, latents = tensors(5, 0, 48, torch.float32)
    found = latent.attend_latents(query, latents, 32, scaling=SCALING)
    assert found is not None
    assert not found[0].any()
    assert (found[1] == -torch.inf).all()
