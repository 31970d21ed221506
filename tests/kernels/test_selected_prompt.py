"""Prompts read by selection, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import selected_prompt_reference
import torch
from compilers import SETS, instructions, needs_compiler, needs_vectors  # noqa: F401 - a fixture
from harness import Inputs, new_layer
from torch import Tensor

from qada_cache.attention.exact import attend_to_prompt
from qada_cache.kernels.cpu import prompt, selected_prompt
from qada_cache.kernels.operands import Query

pytestmark = [needs_compiler, needs_vectors]

LEAST = 192  # far keys, so that short prompts select
THETA = 60.0  # at which some far keys are read, and some are not


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt, "MIN_TOKENS", 1)
    monkeypatch.setattr(selected_prompt, "LEAST_FAR", LEAST)
    found = prompt.read_instructions() - {"amx_tile"}  # by which nothing is selected
    found = SETS["newest"] if SETS["newest"] <= found else found  # which other tests build for
    monkeypatch.setattr(prompt, "read_instructions", lambda: found)


def tensors(tokens: int, dim: int, value_dim: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """One row of two heads to a KV head, laid out as models do, in which few keys stand out: keys far from zero, large
    in some channels, and values that follow them."""
    made = torch.Generator().manual_seed(tokens)
    query, key, value = (
        torch.randn(1, tokens, heads, size, generator=made).transpose(1, 2)
        for heads, size in ((4, dim), (2, dim), (2, value_dim))
    )
    spread = torch.linspace(0.3, 3, dim)
    key = key * spread + 20 * torch.randn(1, 2, 1, dim, generator=made)
    mixed = torch.randn(dim, value_dim, generator=made) / dim
    return [(2.5 * query / spread).to(dtype), key.to(dtype), (value + key @ mixed).to(dtype)]


def attend(call: list[Tensor], **options: Any) -> tuple[Tensor, int]:
    query, _, value = call
    out = torch.full((*query.shape[:3], value.shape[3]), torch.nan, dtype=query.dtype)
    told = {"scaling": 0.2, "threshold": THETA, "sinks": 16, "window": 112} | options
    return out, selected_prompt.selected_attention(*call, out=out, **told)


def by_reference(
    call: list[Tensor], energies: Tensor | None = None, **options: Any
) -> tuple[Tensor, list[float], list[float]]:
    """All heads, and the shares of what each block and head reads and samples."""
    told = {"scaling": 0.2, "theta": THETA, "sinks": 16, "window": 112, "least": LEAST} | options
    query, key, value = (each[0] for each in call)
    kernel = selected_prompt.build_selecting(key.shape[2], value.shape[2], key.dtype)
    assert kernel is not None
    told |= {"levels": kernel.code_levels(), "words": kernel.code_words()}
    found = [
        selected_prompt_reference.selected_prompt(
            query=query[head], key=key[head // 2], value=value[head // 2],
            energies=None if energies is None else energies[head // 2], **told,
        )
        for head in range(4)
    ]  # fmt: skip
    outs, *shares = zip(*found, strict=True)
    read, sampled = ([share for each in of_heads for share in each] for of_heads in shares)
    return torch.stack(outs)[None], read, sampled


def count_pairs(tokens: int, shares: list[float], *, sinks: int = 16, window: int = 112) -> float:
    """Those that are computed of four heads, block by block: all of a query and the tokens up to its own but the share
    of far ones that a block leaves out."""
    first, pairs, shares = -(-sinks // 64) * 64, 4 * tokens * (tokens + 1) / 2, shares.copy()
    for _ in range(4):
        for start in range(first + LEAST + window - 1, tokens - window, 66):
            queries = min(start + 66, tokens - window) - start
            pairs -= (1 - shares.pop(0)) * queries * ((start - window + 1) // 64 * 64 - first)
    assert not shares
    return pairs


@pytest.mark.parametrize("sizes", [{}, {"sinks": 0, "window": 1}, {"sinks": 70, "window": 200}], ids=str)
@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize(
    ("tokens", "dim", "value_dim", "instructions"),
    [
        *((900, 64, 64, "newest"), (4700, 4, 16, "newest"), (830, 128, 128, "middle")),
        *((900, 64, 64, "least"), (1501, 80, 48, "least")),
    ],
    indirect=["instructions"],
)
def test_as_float64_computes_it(tokens: int, dim: int, value_dim: int, sizes: dict[str, int]) -> None:
    """Outputs equal float64's, except in few blocks, where a key is so near the cut that rounding decides."""
    if tokens == 4700 and sizes:
        pytest.skip("once is enough: more than 64 segments, of which centres are scored at once")
    call = tensors(tokens, dim, value_dim)
    wanted, shares, _ = by_reference(call, **sizes)
    assert 0.01 < sum(shares) / len(shares) < 0.8
    out, pairs = attend(call, **sizes)
    off = (out - wanted).abs().amax(dim=-1)
    assert off.quantile(0.97) < 2e-3 * float(wanted.std())
    assert off.max() < 0.3 * float(wanted.std())
    assert pairs == pytest.approx(count_pairs(tokens, shares, **sizes), rel=1e-3)


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("dim", [64, 80])
@pytest.mark.parametrize("instructions", ["newest", "middle", "least"], indirect=True)
def test_segments_that_no_query_may_select_from_are_sampled(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs are float64's of the same samples, and not those of estimates for all keys."""
    query, key, value = tensors(1500, dim, 64)
    call, energies = [0.3 * query, key, value], query[0].square().mean(1).unflatten(0, (2, 2)).mean(1)
    out, _ = attend(call, energies=energies)
    wanted, shares, sampled = by_reference(call, energies)
    assert 0.01 < sum(shares) / len(shares) < 0.2
    assert 0.1 < sum(sampled) / len(sampled) < 0.8
    assert (out - wanted).abs().amax(dim=-1).quantile(0.97) < 2e-3 * float(wanted.std())
    monkeypatch.setattr(selected_prompt_reference, "REACH", torch.inf)
    estimated, _, unsampled = by_reference(call, energies)
    assert not sum(unsampled)
    assert (out - estimated).abs().mean() > 10 * (out - wanted).abs().mean()


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("instructions", ["newest", "least"], indirect=True)
def test_weights_of_channels() -> None:
    """A model may have large keys and small queries in a channel, or the reverse: with the queries' energies nothing
    more is lost by that, and the selection is float64's. Without them more is lost."""
    factors = torch.exp(2 * torch.randn(64, generator=torch.Generator().manual_seed(3)))
    plain = tensors(1300, 64, 64)
    scaled = [plain[0] / factors, plain[1] * factors, plain[2]]
    full, errors = torch.empty(1, 4, 1300, 64), []
    prompt.prompt_attention(*plain, scaling=0.2, causal=True, out=full)
    for call in (plain, scaled):
        energies = call[0][0].square().mean(1).unflatten(0, (2, 2)).mean(1)  # a head of keys has two of queries
        out, wanted = attend(call, energies=energies)[0], by_reference(call, energies)[0]
        assert (out - wanted).abs().amax(dim=-1).quantile(0.97) < 2e-3 * float(wanted.std())
        errors.append(float((out - full).abs().mean()))
    assert errors[1] == pytest.approx(errors[0], rel=0.05)
    assert float((attend(scaled)[0] - full).abs().mean()) > 2 * errors[0]


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("instructions", ["newest", "least"], indirect=True)
def test_sums_of_large_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and queries that differ in one channel alone have the largest codes, all of one sign; sums have 16 bits."""
    query, key, value = tensors(900, 64, 64)
    query[..., 0] *= 3
    query[..., 1:], key[..., 1:] = 0.01 * query[..., 1:], key[..., :1, 1:]
    wanted, *_ = by_reference([query, key, value])

    def find_error() -> float:
        return float((attend([query, key, value])[0] - wanted).abs().amax(dim=-1).quantile(0.97) / wanted.std())

    assert find_error() < 2e-3
    kernel = selected_prompt.build_selecting(64, 64, torch.float32)
    assert kernel is not None
    if kernel.code_words() > 1:  # else, what happens without a bound
        monkeypatch.setattr(selected_prompt, "MOST_SUM", 2**20)
        assert find_error() > 2e-2


def test_what_is_lost_without_an_estimate_and_with_it() -> None:
    """The unread are worth something: without an estimate for them more is lost."""
    call = tensors(1500, 64, 64)
    out, _ = attend(call, threshold=1e9)
    full, _ = attend(call, threshold=1e-9)
    selecting = selected_prompt.find_selecting(1500, sinks=16, window=112)
    scores = 0.2 * call[0].double() @ call[1].double().repeat_interleave(2, 1).mT
    queries, keys = torch.arange(1500)[:, None], torch.arange(1500)
    start = selecting.start + (queries - selecting.start) // 66 * 66
    near = (keys < 64) | (keys >= (start - 111) // 64 * 64)
    scores = scores.masked_fill(~near | (keys > queries), -torch.inf)
    left_out = scores.softmax(-1) @ call[2].double().repeat_interleave(2, 1)
    error, other = ((each - full)[:, :, selecting].abs().mean() for each in (out, left_out))
    assert error < 0.75 * other


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("instructions", ["newest", "least"], indirect=True)
def test_a_low_threshold_reads_everything(dtype: torch.dtype) -> None:
    call = tensors(900, 64, 64, dtype)
    out, _ = attend(call, threshold=1e-9)
    full = torch.empty_like(out)
    prompt.prompt_attention(*call, scaling=0.2, causal=True, out=full)
    torch.testing.assert_close(out, full, rtol=torch.finfo(dtype).eps * 2, atol={torch.bfloat16: 2e-2}.get(dtype, 1e-5))


@pytest.mark.parametrize(("dim", "value_dim"), [(64, 64), (128, 128), (80, 48)])
def test_bfloat16_is_as_near_as_its_rounding(dim: int, value_dim: int) -> None:
    call = tensors(1001, dim, value_dim, torch.bfloat16)
    wanted, *_ = by_reference(call)
    off = (attend(call)[0] - wanted).abs()
    full = torch.empty_like(wanted, dtype=torch.bfloat16)
    prompt.prompt_attention(*call, scaling=0.2, causal=True, out=full)
    assert off.mean() < 0.25 * (full - wanted).abs().mean()


def test_by_tiles_nothing_is_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    """They read a key in the time that it takes to estimate it; float32 they do not multiply."""
    calls = {dtype: tensors(300, 64, 64, dtype) for dtype in (torch.bfloat16, torch.float32)}
    for name, selects in (("newest", True), ("tiles", False)):
        monkeypatch.setattr(prompt, "read_instructions", lambda name=name: SETS[name])
        assert selected_prompt.selects_sizes(64, 64, torch.float32)
        assert selected_prompt.selects_sizes(64, 64, torch.bfloat16) is selects
        assert not selected_prompt.selects_sizes(512, 512, torch.float32)
    assert not selected_prompt.serves(calls[torch.bfloat16][0], calls[torch.bfloat16][2])


def test_no_query_is_told_of_later_tokens() -> None:
    """Later tokens do not change a query's output in a prompt of the same length. The length itself does: it decides
    which queries are exact."""
    call, other = tensors(1000, 64, 64), tensors(1000, 64, 64)
    for changed, part in zip(other, call, strict=True):
        changed[:, :, 777:] += torch.randn(part[:, :, 777:].shape, generator=torch.Generator().manual_seed(1))
    one, two = attend(call)[0], attend(other)[0]
    block = 187 + LEAST - 12  # where blocks begin: 64 sinks, 192 far keys, 111 of the window
    assert torch.equal(one[:, :, : block + (777 - block) // 66 * 66], two[:, :, : block + (777 - block) // 66 * 66])
    assert not torch.equal(one[:, :, 777:], two[:, :, 777:])


def test_the_first_queries_and_the_last_window_are_exact() -> None:
    call = tensors(1000, 64, 64)
    out, full = attend(call)[0], torch.empty(1, 4, 1000, 64)
    prompt.prompt_attention(*call, scaling=0.2, causal=True, out=full)
    exactly = (out - full).abs().amax(dim=(0, 1, 3)) < 1e-5
    selecting = selected_prompt.find_selecting(1000, sinks=16, window=112)
    assert (selecting.start, selecting.stop) == (64 + LEAST + 111, 1000 - 112)
    assert exactly[: selecting.start].all()
    assert exactly[selecting.stop :].all()
    assert not exactly[selecting].any()


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_change_nothing(threads: int) -> None:
    call, before = tensors(1000, 64, 64), torch.get_num_threads()
    outs = []
    for count in (1, threads):
        torch.set_num_threads(count)
        outs.append(attend(call))
    torch.set_num_threads(before)
    assert torch.equal(outs[0][0], outs[1][0])
    assert outs[0][1] == outs[1][1]


def test_scores_far_apart_and_alike() -> None:
    """A far key that outweighs all others by far; the same score everywhere; no differences between keys at all."""
    query, key, value = tensors(1000, 64, 64)
    key[:, :, 100] += 40 * query[:, ::2, 700] / query[:, ::2, 700].norm(dim=-1, keepdim=True)
    for changed in (key, torch.zeros_like(key), key[:, :, :1].expand_as(key).contiguous()):
        call = [query, changed, value]
        wanted, *_ = by_reference(call)
        out, _ = attend(call)
        assert out.isfinite().all()
        assert (out - wanted).abs().mean() < 1e-3


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("part", [1, 2])
def test_what_is_not_finite_shows(part: int, bad: float) -> None:
    """A far key or value shows in all outputs that select from among such, whether it is read or not."""
    call = tensors(1000, 64, 64)
    call[part][0, 1, 100, 7] = bad
    shown = ~attend(call)[0].isfinite().all(-1)[0]
    assert not shown[:2].any()
    assert shown[2:, 64 + LEAST + 111 : 1000 - 112].all()


@pytest.mark.parametrize("side", ["none", "left", "right", "holes"])
def test_rows_of_a_batch(side: str) -> None:
    """Each row's real tokens as if there were no others; padding gets zeros, but at a row's end."""
    tokens, valid = 900, torch.ones(3, 900, dtype=torch.bool)
    valid[1, slice(0, 150) if side == "left" else slice(750, 900) if side == "right" else slice(40, 90)] = (
        side == "none"
    )
    valid[2, :850] = side != "left"
    key, value, states = Inputs(3, dim=64, value_dim=64, dtype=torch.bfloat16)(tokens, batch=3)
    layer = new_layer(key, value, prefill_threshold=THETA, sink_tokens=16, local_tokens=128)
    query = Query(states, 0.2, valid=None if valid.all() else valid)
    found = attend_to_prompt(layer, query, key, value)
    assert found is not None
    ends = torch.arange(tokens) == tokens - 1
    assert torch.equal(found.any(dim=-1).any(dim=-1), valid | ends)
    computed = 0
    for row, real in enumerate(valid):
        call = [each[row : row + 1, :, real] for each in (states, key, value)]
        out, pairs = attend(call)
        assert torch.equal(found[row : row + 1, real].transpose(1, 2), out)
        computed += pairs
    assert layer.counters.prompt_read_pairs == computed
    assert layer.counters.prompt_pairs == sum(4 * real * (real + 1) // 2 for real in valid.sum(dim=1).tolist())


@pytest.mark.parametrize("cuts", [[433 + 66 * 3, 433 + 66 * 5], [50, 433, 1060]], ids=str)
def test_a_prompt_in_parts(cuts: list[int]) -> None:
    """The selection does not depend on the cuts, if these are ends of blocks. Blocks begin at 433, or with a part."""
    call = tensors(1100, 64, 64)
    told = {"sinks": 134, "window": 50}
    assert selected_prompt.find_selecting(1100, **told) == slice(433, 1050)
    wanted, pairs = attend(call, **told)
    found, computed = torch.full_like(wanted, torch.nan), 0
    for start, stop in zip([0, *cuts], [*cuts, 1100], strict=True):
        part = [call[0][:, :, start:stop], *(each[:, :, :stop] for each in call[1:])]
        found[:, :, start:stop], now = attend(part, **told, end=1100)
        computed += now
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert computed == pairs < 4 * 1100 * 1101 // 2
