"""Prompts read by a sample of their tokens, by Triton's kernels: each step against float64, and the whole."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import sampled_prompt_reference as reference
import torch
from harness import new_layer
from models import exact, prompt, tiny
from torch import Tensor

from qada_cache.attention.exact import attend_to_prompt
from qada_cache.kernels import partial_attention, prompt_choice, sampled_prompt
from qada_cache.kernels.operands import Query
from qada_cache.kernels.sampled_prompt import FLOOR, TILE, encode
from qada_cache.state.layer import QAdALayer
from qada_cache.versions import pass_cache

pytest.importorskip("triton", reason="triton is not installed: pip install triton", exc_type=ModuleNotFoundError)
from steps import interpreter

from qada_cache.kernels.triton import selected_prompt

pytestmark = interpreter
SCALING, SINKS = 0.15, 5
ONE = torch.tensor([[0]])
BLOCK = selected_prompt.SHORT_BLOCK
CALLS = [  # tokens, heads, KV heads, dim, value_dim, dtype
    (300, 2, 2, 64, 64, torch.float32),
    (517, 4, 2, 64, 48, torch.bfloat16),
    (260, 8, 1, 80, 80, torch.float16),
    (400, 2, 1, 128, 128, torch.float32),
    (200, 2, 1, 256, 144, torch.float32),
]
SIZES = [selected_prompt.BLOCK, BLOCK, selected_prompt.BLOCK, BLOCK, BLOCK]  # queries that read together, in each


def tensors(tokens: int, heads: int, kv_heads: int, dim: int, value_dim: int, dtype: torch.dtype) -> list[Tensor]:
    """One row, laid out as models do, in which few keys stand out: keys far from zero, large in some channels."""
    made = torch.Generator().manual_seed(tokens)
    query, key, value = (
        torch.randn(1, tokens, count, size, generator=made).transpose(1, 2)
        for count, size in ((heads, dim), (kv_heads, dim), (kv_heads, value_dim))
    )
    spread = torch.linspace(0.3, 3, dim)
    key = key * spread + 5 * torch.randn(1, kv_heads, 1, dim, generator=made)
    return [(2.5 * query / spread).to(dtype), key.to(dtype), value.to(dtype)]


def find_shares(
    query: Tensor, coded: tuple[Tensor, Tensor], block: int, size: int, scaling: float, stride: int = 16
) -> Tensor:
    """256ths of one block, for each head."""
    told = {"scaling": scaling, "threshold": 100.0, "sinks": SINKS, "block": size, "stride": stride}
    return selected_prompt.find_shares(query, *coded, block, 1, **told)[:, 0, : block * size].int() + 1


def check_shares(found: Tensor, wanted: Tensor, off: float) -> None:
    """Assert that found shares are the wanted ones, within a relative error of `off`, rounded up to whole 256ths."""
    assert 1 < wanted.mean() < 250
    assert (found >= torch.ceil(wanted * (1 - off)).clamp_min(4).int()).all()
    assert (found <= torch.ceil(wanted * (1 + off)).clamp_max(256).int()).all()


@pytest.mark.parametrize(("call", "size"), [*zip(CALLS, SIZES, strict=True)], ids=str)
def test_probabilities(call: tuple[Any, ...], size: int) -> None:
    query, key, _ = tensors(*call)
    tokens, heads, kv_heads, *_, dtype = call
    told = {"scaling": SCALING, "threshold": 100.0, "sinks": SINKS, "floor": FLOOR, "stride": 16}
    for block in (1, (tokens - 1) // size):
        found = find_shares(query, encode(key, dtype), block, size, SCALING)
        for head in range(heads):
            own = query[0, head], key[0, head // (heads // kv_heads)]
            off = {torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.06}[dtype]  # of codes in such numbers
            check_shares(found[head], reference.probabilities(*own, block * size, size, **told), off)


@pytest.mark.parametrize(("step", "stride", "size"), [(1.0, 16, 64), (0.125, 48, 128), (2**-11, 16, 64)])
def test_probabilities_by_codes_of_eight_bits(
    step: float, stride: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a device of capability 9.0, by wide tiles, the last of which reaches beyond the tokens to choose from. Sums
    of products are in 16 bits. Also of scores so alike that the logarithm of the sum of their exponentials, in their
    own unit, would be no such number. Queries are such codes: Triton's interpreter rounds others otherwise than a GPU.
    """
    monkeypatch.setattr(selected_prompt, "find_capability", lambda _: (9, 0))
    made, scaling = torch.Generator().manual_seed(0), math.log(2) / 8
    query, key = (torch.randn(1, heads, 333, 64, generator=made) for heads in (2, 1))
    query = (3 * query).round().clamp(-15, 15)
    query[..., 0] = 15
    codes = (2 * key).to(torch.float8_e4m3fn)
    told = {"scaling": scaling * step, "threshold": 100.0, "sinks": SINKS, "floor": FLOOR}
    for block in (1, 332 // size):
        found = find_shares(query, (codes, torch.full((1, 1), step)), block, size, scaling, stride)
        for head in range(2):
            own = query[0, head], codes[0, 0].float()
            wanted = reference.probabilities(*own, block * size, size, **told, stride=stride)
            check_shares(found[head], wanted, 0.03)


@pytest.mark.parametrize("size", [BLOCK, selected_prompt.BLOCK])
def test_a_sample(size: int) -> None:
    made = torch.Generator().manual_seed(0)
    shares = torch.randint(0, 256, (3, 2, 640), generator=made, dtype=torch.uint8)
    shares[torch.rand(shares.shape, generator=made) < 0.8] = 3
    for capacity in (640, 60):
        chosen, counts = selected_prompt.draw(shares, 4, capacity, block=size)
        for head in range(3):
            for block in range(2):
                own = shares[head, block, : (4 + block) * size].int() + 1
                wanted = reference.sample(own, 4 + block, head)
                written = [token << 9 | int(own[token]) for token in wanted][:capacity]
                assert counts[head, block] == len(wanted)
                assert chosen[head, block, : len(written)].tolist() == written
                assert not chosen[head, block, len(written) : len(written) + TILE].any()


@pytest.mark.parametrize(("call", "size"), [*zip(CALLS, SIZES, strict=True)], ids=str)
def test_attention_of_a_sample(call: tuple[Any, ...], size: int) -> None:
    query, key, value = tensors(*call)
    tokens, heads, kv_heads, *_, dtype = call
    made, begin = torch.Generator().manual_seed(1), (tokens - 1) // size * size
    chosen = [
        {token: int(torch.randint(1, 257, (), generator=made)) for token in range(head, begin, 3)}
        for head in range(heads)
    ]
    items = torch.tensor([[token << 9 | share for token, share in each.items()][:80] for each in chosen])[:, None]
    out = torch.full((1, heads, tokens, value.shape[3]), torch.nan, dtype=dtype)
    counts = torch.full((heads, 1), count := items.shape[2], dtype=torch.int32)
    items = torch.nn.functional.pad(items, (0, -count % TILE))
    counts[1] = items.shape[2] + 1  # more than were written
    told = items.int().contiguous(), counts, out, begin // size, SCALING
    selected_prompt.read_sample(query, key, value, *told, block=size)
    for head in range(heads):
        kept = dict(list(chosen[head].items())[:count])
        if head == 1:
            kept = dict.fromkeys(range(begin), 256)
        group = head // (heads // kv_heads)
        wanted = reference.attend(query[0, head], key[0, group], value[0, group], begin, size, kept, SCALING)
        tolerance = {torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
        torch.testing.assert_close(out[0, head, begin:].double(), wanted, rtol=0, atol=tolerance)
    assert out[:, :, :begin].isnan().all()


def attend(call: list[Tensor], threshold: float, window: int = 1) -> tuple[Tensor, int]:
    query, _, value = call
    out = torch.full((*query.shape[:3], value.shape[3]), torch.nan, dtype=query.dtype)
    told = {"scaling": SCALING, "threshold": threshold, "sinks": SINKS, "window": window}
    return out, int(selected_prompt.selected_attention(*call, **told, out=out))


def in_float64(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    told = {"is_causal": True, "scale": SCALING, "enable_gqa": True}
    return torch.nn.functional.scaled_dot_product_attention(query.double(), key.double(), value.double(), **told)


def test_a_low_threshold_reads_everything() -> None:
    call = tensors(300, 4, 2, 64, 64, torch.float32)
    out, pairs = attend(call, 1e-9)
    torch.testing.assert_close(out.double(), in_float64(*call), rtol=0, atol=3e-5)
    assert pairs == 4 * 300 * 301 // 2


def test_what_is_not_read_is_stood_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of samples cancel: those of a mean over many are far smaller than each one's own."""
    monkeypatch.setattr(sampled_prompt, "MAX_SHARE", 1)
    query, key, value = tensors(384, 1, 1, 64, 64, torch.float32)
    query = (query / 2.5).expand(1, 8, -1, -1).contiguous()  # heads alike but for their samples
    exact, (out, pairs) = in_float64(query, key, value), attend([query, key, value], 1500.0, window=0)
    assert pairs < 0.7 * 8 * 384 * 385 // 2
    errors = (out - exact)[0, :, BLOCK:]
    assert errors.mean(0).square().mean() < 0.25 * errors.square().mean()


def test_the_last_queries_read_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks that have no others do, and the last block, in every slice of blocks."""
    call = tensors(400, 2, 1, 64, 64, torch.float32)
    exact = in_float64(*call)
    monkeypatch.setattr(sampled_prompt, "MAX_SHARE", 1)
    for most, window, whole in ((2**26, 9, 384), (2**26, 0, 384), (2**26, 112, 320), (600, 112, 320)):
        monkeypatch.setattr(selected_prompt, "MAX_CHOSEN", most)
        out, pairs = attend(call, 1500.0, window)
        errors = (out - exact).abs().amax(dim=(0, 1, 3))
        assert errors[whole:].max() < 3e-5 < errors[BLOCK:whole].median()
        assert 2 * sum(range(whole + 1, 401)) < pairs < 2 * 400 * 401 // 2


@pytest.mark.parametrize("spread", [0.0, 5e-4])
def test_keys_that_hardly_differ(spread: float) -> None:
    """Keys that hardly differ are coded finitely, and all read at a low threshold, even in float16, of small range."""
    query, key, value = tensors(300, 2, 1, 64, 64, torch.float16)
    key = (0.5 + spread * torch.randn(key.shape, generator=torch.Generator().manual_seed(0))).half()
    assert encode(key, key.dtype)[0].isfinite().all()
    out, pairs = attend([100 * query, key, value], 1e-9)
    assert pairs == 2 * 300 * 301 // 2
    assert (out - in_float64(100 * query, key, value)).abs().max() < 2e-3


def test_slices_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    call = tensors(520, 2, 1, 64, 64, torch.float32)
    whole = attend(call, 300.0)
    monkeypatch.setattr(selected_prompt, "MAX_CHOSEN", 600)
    monkeypatch.setattr(sampled_prompt, "MAX_SHARE", 1)
    several = attend(call, 300.0)
    monkeypatch.setattr(selected_prompt, "MAX_CHOSEN", 2**26)
    assert torch.equal(several[0], attend(call, 300.0)[0])
    assert whole[0].shape == several[0].shape


def attend_in_chunks(call: list[Tensor], cuts: list[int], threshold: float) -> tuple[Tensor, int]:
    query, key, value = call
    outs, pairs = [], 0
    for start, stop in itertools.pairwise([0, *cuts, query.shape[2]]):
        own = query[:, :, start:stop], key[:, :, :stop], value[:, :, :stop]
        out = torch.full((*own[0].shape[:3], value.shape[3]), torch.nan, dtype=query.dtype)
        told = {"scaling": SCALING, "threshold": threshold, "sinks": SINKS, "window": 9, "end": query.shape[2]}
        pairs += int(selected_prompt.selected_attention(*own, **told, out=out))
        outs.append(out)
    return torch.cat(outs, dim=2), pairs


def test_chunks_of_blocks_are_read_as_the_whole_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of whole blocks read the same keys by the same codes; the last one, of any length, has the window."""
    monkeypatch.setattr(selected_prompt, "encode", lambda key, _: (key.contiguous(), torch.ones(*key.shape[:2])))
    monkeypatch.setattr(sampled_prompt, "MAX_SHARE", 1)
    call = tensors(517, 4, 2, 64, 48, torch.float32)
    wanted, pairs = attend(call, 300.0, 9)
    for cuts in ([128, 448], [384, 512]):
        found, computed = attend_in_chunks(call, cuts, 300.0)
        assert computed == pairs < 0.9 * 4 * 517 * 518 // 2
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


def test_chunks_of_any_length() -> None:
    """Everything is read at a low threshold; at another what stands for the rest is right on the average."""
    call = tensors(300, 4, 2, 64, 64, torch.float32)
    out, pairs = attend_in_chunks(call, [7, 150, 299], 1e-9)
    torch.testing.assert_close(out.double(), in_float64(*call), rtol=0, atol=3e-5)
    assert pairs == 4 * 300 * 301 // 2
    out, pairs = attend_in_chunks(call, [131], 300.0)
    assert pairs < 4 * 300 * 301 // 2
    assert (out - in_float64(*call)).square().mean() < 0.1 * call[2].square().mean()


@pytest.mark.parametrize("bits", [16, 8])
@torch.no_grad()
def test_chunks_in_a_cache(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_choice, "MIN_TOKENS", 1)
    model, ids = tiny("llama", num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1), prompt(600)[0]
    found, ends, own = [], [], selected_prompt.selected_attention
    monkeypatch.setattr(prompt_choice, "_find_prompt_fault", lambda *_, **__: None)
    monkeypatch.setattr(
        selected_prompt, "selected_attention", lambda *call, **told: ends.append(told["end"]) or own(*call, **told)
    )
    for theta in (0.0, 1e-9, 300.0):
        cache = exact(model, prefill_threshold=theta, bulk_bits=bits, kernels="triton")
        told = {"max_new_tokens": 1, "prefill_chunk_size": 256, "output_logits": True, "return_dict_in_generate": True}
        found.append(model.generate(ids, **pass_cache(cache), **told, do_sample=False, pad_token_id=0).logits[0])
        assert cache.stats().prompt_pairs == (theta > 0) * 2 * 600 * 601 // 2
    assert ends == 2 * 3 * [600]  # the first chunk has none of the last queries either
    assert cache.stats().prompt_read_share < 0.95
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-4)
    assert (found[2] - found[0]).abs().mean() < 0.3 * float(found[0].std())


def select(kernels: str, monkeypatch: pytest.MonkeyPatch, **more: Any) -> tuple[Tensor | None, QAdALayer, list[Tensor]]:
    """Outputs of a new layer for a prompt of two rows, or None; the layer; the prompt's queries, keys and values."""
    monkeypatch.setattr(prompt_choice, "MIN_TOKENS", 1)
    call = [part.expand(2, -1, -1, -1) for part in tensors(300, 4, 2, 64, 48, torch.float32)]
    layer = new_layer(*call[1:], kernels=kernels, prefill_threshold=300.0, sink_tokens=SINKS)
    return attend_to_prompt(layer, Query(call[0], SCALING, **more), *call[1:]), layer, call


def test_a_layer_reads_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer reads by the kernel, and counts pairs in every mode, also after a crop to nothing and another prompt."""
    with torch.inference_mode():
        found, layer, call = select("triton", monkeypatch)
    out, pairs = attend(call, 300.0, layer.options.window)
    assert found is not None
    assert torch.equal(found, out.transpose(1, 2))
    assert int(layer.counters.prompt_read_pairs) == pairs < layer.counters.prompt_pairs == 2 * 4 * 300 * 301 // 2
    attend_to_prompt(layer, Query(call[0], SCALING), *call[1:])
    assert int(layer.counters.prompt_read_pairs) == 2 * pairs


def test_what_it_does_not_serve_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caps and masks; and a kernel at fault."""
    for more in ({"softcap": 30.0}, {"visible": torch.ones(1, 300, 300, dtype=torch.bool)}, {"sink_logits": ONE[0]}):
        assert select("triton", monkeypatch, **more)[0] is None
    monkeypatch.setattr(prompt_choice, "_find_prompt_fault", lambda *_, **__: "it is off")
    assert select("triton", monkeypatch)[1].counters.prompt_read_pairs == 0


@pytest.mark.parametrize("block", [BLOCK, sampled_prompt.BLOCK])
def test_a_trial_finds_probabilities_that_are_off(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    find = prompt_choice._find_prompt_fault.__wrapped__
    told = torch.device("cpu"), torch.bfloat16
    sizes = {"group": 2, "dim": 64, "value_dim": 48, "block": block}
    assert find(*told, **sizes) is None
    own = selected_prompt.find_shares
    for off in (1.3, 0.8):
        monkeypatch.setattr(
            selected_prompt,
            "find_shares",
            lambda *call, off=off, **more: own(*call, **more | {"threshold": more["threshold"] * off}),
        )
        assert "off by" in find(*told, **sizes)


@pytest.mark.parametrize("lengths", [(300, 261), (190, 300)], ids=str)
def test_padded_rows_are_read_as_by_themselves(lengths: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """On whichever side the padding is, whose outputs are zeros but at a row's end; a row of nothing else is not
    read."""
    monkeypatch.setattr(prompt_choice, "_find_prompt_fault", lambda *_, **__: None)
    for tail in (0, 7):
        valid = torch.zeros(3, 300, dtype=torch.bool)
        for row, length in enumerate(lengths):
            valid[row, 300 - length : 300 - tail] = True
        monkeypatch.setattr(prompt_choice, "MIN_TOKENS", 1)
        call = [part.expand(3, -1, -1, -1) for part in tensors(300, 4, 2, 64, 48, torch.float32)]
        layer = new_layer(*call[1:], kernels="triton", prefill_threshold=300.0, sink_tokens=SINKS)
        found = attend_to_prompt(layer, Query(call[0], SCALING, valid=valid), *call[1:])
        assert found is not None
        expected, pairs = torch.zeros_like(found), 0
        for row in range(2):
            own = [part[row : row + 1, :, valid[row]] for part in call]
            out, read = attend(own, 300.0, layer.options.window)
            expected[row, valid[row]], pairs = out[0].transpose(0, 1), pairs + read
            if tail:
                pair = (part.repeat_interleave(2, dim=1) for part in own[1:])
                last, _ = partial_attention(call[0][row : row + 1, :, -1:], *pair, scaling=SCALING)
                torch.testing.assert_close(found[row, -1], last[0, :, 0])
                expected[row, -1] = found[row, -1]
        assert torch.equal(found, expected)
        assert int(layer.counters.prompt_read_pairs) == pairs
