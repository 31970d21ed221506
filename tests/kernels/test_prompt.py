"""The kernel for prompts: against float64, beside torch's own."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
import torch
from compilers import instructions, needs_compiler, needs_vectors  # noqa: F401 - a fixture
from harness import Inputs, new_layer
from torch import Tensor
from torch.nn import functional

from qada_cache.attention.exact import attend_to_prompt
from qada_cache.kernels import partial_attention
from qada_cache.kernels.cpu import building, prompt
from qada_cache.kernels.operands import Query

pytestmark = [needs_compiler, needs_vectors]

# Sizes of a head, a dtype, and a processor's instructions (`SETS`): each is a build. A dtype has every set, and sizes
# that fill its vectors and ones that do not; where vectors end is the same for both.
SIZES = [
    *((dim, value_dim, torch.bfloat16, "newest") for dim, value_dim in ((64, 64), (128, 128), (80, 48), (18, 16))),
    *((64, 64, torch.bfloat16, "middle"), (80, 48, torch.bfloat16, "least"), (256, 256, torch.bfloat16, "least")),
    *((64, 64, torch.float32, "newest"), (4, 16, torch.float32, "newest"), (128, 128, torch.float32, "middle")),
    (18, 16, torch.float32, "least"),
    *((dim, value_dim, torch.bfloat16, "tiles") for dim, value_dim in ((64, 64), (128, 128), (80, 48), (18, 16))),
]
# Allowed error in units of torch's, mean and largest: float32 sums have another order, which shows in short ones.
NEAR = {torch.bfloat16: (1.02, 1.5), torch.float32: (1.6, 2.5)}
# Around a strip of 6 or 32 queries, a block of 96, a chunk of 16 or 64 keys and a tile of 256.
CALLS = [(64, 64), (96, 96), (97, 255), (101, 256), (193, 257), (64, 1000), (700, 700)]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of keys is worth a build."""
    monkeypatch.setattr(prompt, "MIN_TOKENS", 1)


def tensors(
    queries: int, tokens: int, dim: int, value_dim: int, spread: float = 2.0, dtype: torch.dtype = torch.bfloat16
) -> list[Tensor]:
    """Some heads of larger buffers, two queries to a key, laid out as models do; nan wherever the kernel has no
    business."""
    generator = torch.Generator().manual_seed(tokens)
    made = []
    for heads, length, size in ((4, queries, dim), (2, tokens, dim), (2, tokens, value_dim)):
        whole = torch.full((2, length + 3, heads + 1, size), torch.nan, dtype=dtype).transpose(1, 2)
        part = whole[:, 1:, 2:-1]
        part.copy_(torch.randn(part.shape, generator=generator) * spread**0.5)
        made.append(part)
    return made


def in_float64(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exp, scores scaled by 0.2."""
    group = query.shape[1] // key.shape[1]
    scores = 0.2 * query.double() @ key.double().repeat_interleave(group, 1).mT
    if causal:
        seen = torch.ones(scores.shape[2:], dtype=torch.bool).tril(scores.shape[3] - scores.shape[2])
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ value.double().repeat_interleave(group, 1), scores.logsumexp(-1)


def by_torch(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    queries, tokens = query.shape[2], key.shape[2]
    mask = torch.ones(queries, tokens, dtype=torch.bool).tril(tokens - queries) if causal else None
    dim = max(key.shape[3], value.shape[3])  # torch's fused operator has one for both
    query, key, value = (functional.pad(each, (0, dim - each.shape[3])) for each in (query, key, value))
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.2, enable_gqa=True)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("dim", "value_dim", "dtype", "instructions"), SIZES, indirect=["instructions"])
@pytest.mark.parametrize(("queries", "tokens"), CALLS)
@pytest.mark.usefixtures("instructions")
def test_as_near_to_float64_as_torch(
    queries: int, tokens: int, dim: int, value_dim: int, causal: bool, dtype: torch.dtype
) -> None:
    call = tensors(queries, tokens, dim, value_dim, dtype=dtype)
    wanted, wanted_lse = in_float64(*call, causal)
    own = (by_torch(*call, causal)[..., :value_dim] - wanted).abs()
    out = torch.full((2, queries, 4, value_dim), torch.nan, dtype=dtype).transpose(1, 2)
    lse = torch.full((2, 4, queries), torch.nan)
    assert prompt.serves(*call, causal=causal)
    prompt.prompt_attention(*call, scaling=0.2, causal=causal, out=out, lse=lse)
    error = (out - wanted).abs()
    mean, most = NEAR[dtype]
    assert error.mean() <= mean * own.mean()
    assert error.max() <= most * own.max()
    torch.testing.assert_close(lse.double(), wanted_lse, atol=2e-5, rtol=2e-6)


def test_parts_are_not_rounded() -> None:
    """`partial_attention` does not round outputs of parts, which are still to be merged."""
    query, key, value = tensors(100, 300, 64, 64)
    wanted, wanted_lse = in_float64(query[:, :2], key, value, False)
    out, lse = partial_attention(query[:, :2], key, value, scaling=0.2)
    rounded, _ = partial_attention(query[:, :2], key, value, scaling=0.2, kernels="torch")
    assert (out - wanted).abs().mean() < 0.7 * (rounded - wanted).abs().mean()
    torch.testing.assert_close(lse.double(), wanted_lse, atol=2e-5, rtol=2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_threads_change_nothing(dtype: torch.dtype) -> None:
    """Nor does how many queries a thread gets at once: all get as many, as far as strips of at most 32 allow."""
    before, kernel = torch.get_num_threads(), prompt.build(64, 64, dtype)
    for queries in (1, 64, 96, 97, 113, 128, 193, 300, 600):
        outs, call = [], tensors(queries, 600, 64, 64, dtype=dtype)
        for threads in (1, 2, 3, 16):
            torch.set_num_threads(threads)
            outs.append(torch.empty(2, 4, queries, 64))
            prompt.prompt_attention(*call, scaling=0.2, causal=True, out=outs[-1])
            assert 0 < kernel.block_size(queries, threads) <= min(96, -(-queries // threads) + 31)
        torch.set_num_threads(before)
        assert all(torch.equal(outs[0], out) for out in outs[1:])


def test_scores_far_apart_and_alike() -> None:
    """A key that outweighs all others by far, and keys of no weight beside it; the same score everywhere."""
    query, key, value = tensors(200, 600, 64, 64, spread=100.0)
    for keys in (key, torch.zeros_like(key)):
        wanted, wanted_lse = in_float64(query, keys, value, True)
        out, lse = torch.empty(2, 4, 200, 64), torch.empty(2, 4, 200)
        prompt.prompt_attention(query, keys, value, scaling=0.2, causal=True, out=out, lse=lse)
        assert (out - wanted).abs().max() <= 2**-8 * value.abs().max()
        torch.testing.assert_close(lse.double(), wanted_lse, atol=1e-4, rtol=2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("spread", [1e10, 1e17])
def test_scores_beyond_what_exponents_hold(spread: float, dtype: torch.dtype) -> None:
    """Outputs are right for scores beyond the range of exponents, whose rounding exceeds any score of a model."""
    query, key, value = (part.clone() for part in tensors(200, 600, 64, 64, spread, dtype))
    value /= spread**0.5
    wanted, wanted_lse = in_float64(query, key, value, True)
    out, lse = torch.empty(2, 4, 200, 64), torch.empty(2, 4, 200)
    prompt.prompt_attention(query, key, value, scaling=0.2, causal=True, out=out, lse=lse)
    assert (out - wanted).abs().max() <= 2**-8 * value.abs().max()
    torch.testing.assert_close(lse.double(), wanted_lse, atol=0, rtol=2e-6)


def test_what_is_no_number_stays_so() -> None:
    query, key, value = (each.clone() for each in tensors(200, 200, 64, 64))
    query[0, 1, 50, 3] = torch.nan
    key[1, 0, 120, 5] = torch.nan
    out = torch.empty(2, 4, 200, 64)
    prompt.prompt_attention(query, key, value, scaling=0.2, causal=True, out=out)
    wrong = out.isnan().any(dim=-1)
    expected = torch.zeros_like(wrong)
    expected[0, 1, 50] = True
    expected[1, :2, 120:] = True
    assert torch.equal(wrong, expected)


@pytest.mark.parametrize(
    "changed",
    [
        {"dtype": torch.float16},
        {"queries": 63},
        {"dim": 17},
        {"value_dim": 24},
        {"tokens": 99},
    ],
    ids=str,
)
def test_other_calls_are_torch_s(changed: dict[str, Any]) -> None:
    sizes = {"queries": 100, "tokens": 100, "dim": 64, "value_dim": 64, "dtype": torch.bfloat16} | changed
    dtype = sizes.pop("dtype")
    call = [each.to(dtype) for each in tensors(**sizes)]
    assert not prompt.serves(*call, causal=True)


@pytest.mark.parametrize("place", range(3))
def test_calls_with_gradients_are_torch_s(place: int) -> None:
    """Keys and values have them where a model expands latents by weights that do."""
    call = tensors(100, 100, 64, 64)
    call[place].requires_grad_()
    assert not prompt.serves(*call, causal=True)
    with torch.no_grad():
        assert prompt.serves(*call, causal=True)


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's own attention, and torch's, serve."""

    def fails(*_: Any) -> Any:
        raise subprocess.SubprocessError("no compiler")

    call = tensors(100, 100, 64, 64)
    monkeypatch.setattr(building, "_load", fails)
    prompt._build_once.cache_clear()
    assert not prompt.serves(*call, causal=True)
    assert not prompt.serves(*call, causal=False)
    monkeypatch.undo()
    prompt._build_once.cache_clear()


PADDED = {  # real tokens of a prompt of 300, by row; the first one has all
    "left": [range(300), range(90, 300), range(297, 300)],
    "right": [range(300), range(210), range(3)],
    "holes": [range(300), [*range(5, 40), *range(60, 280)], range(0, 300, 7)],
    "both, and a row of nothing else": [range(300), range(20, 290), []],
}


def padding(side: str) -> Tensor:
    """bool `[rows, tokens]`, True for a real token."""
    return torch.stack(
        [
            torch.zeros(300, dtype=torch.bool).index_fill_(0, torch.tensor([*real], dtype=torch.long), True)
            for real in PADDED[side]
        ]
    )


@pytest.mark.parametrize("side", PADDED)
def test_padded_rows_are_read_one_by_one(side: str) -> None:
    """Each row's real tokens as if there were no others, nan among them; padding gets zeros. At a row's end it sees
    the real tokens before it."""
    valid = padding(side)
    inputs = Inputs(3, heads=4, kv_heads=2, dim=80, value_dim=48, dtype=torch.bfloat16)
    key, value, states = inputs(300, batch=3)
    layer = new_layer(key, value)
    asked = valid.clone()
    asked[:, -1] = valid.any(dim=1)
    query, key, value = (
        part.masked_fill(~shown[:, None, :, None], torch.nan)
        for part, shown in ((states, asked), (key, valid), (value, valid))
    )
    found = attend_to_prompt(layer, Query(query, 0.2, valid=valid), key, value)
    assert found is not None
    assert torch.equal(found.any(dim=-1).any(dim=-1), asked)
    for row, real in enumerate(valid):
        if real.any():
            part = [each[row : row + 1, :, real] for each in (states, key, value)]
            error = (found[row : row + 1, real].transpose(1, 2) - in_float64(*part, True)[0]).abs()
            own = (by_torch(*part, True)[..., :48] - in_float64(*part, True)[0]).abs()
            assert error.mean() <= 1.02 * own.mean()
            assert error.max() <= 1.5 * own.max()
            last = found[row : row + 1, -1:].transpose(1, 2)
            wanted, _ = in_float64(states[row : row + 1, :, -1:], *part[1:], False)
            assert (last - wanted).abs().max() <= 2**-8 * value[row, :, real].abs().max()


def test_another_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt, "read_instructions", set)
    prompt._build_once.cache_clear()
    assert prompt.build(64, 64, torch.bfloat16) is None
    prompt._build_once.cache_clear()
