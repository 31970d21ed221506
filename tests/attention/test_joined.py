"""Exact calls over everything at once, as on a GPU, against the reference and against those block by block."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from compilers import needs_compiler
from harness import Inputs
from models import prompt, tiny
from pair import Pair
from stand_in import accelerator
from torch import Tensor

from qada_cache import QAdACache
from qada_cache.attention import joined
from qada_cache.kernels import lower_right
from qada_cache.kernels.cpu import prompt as prompt_kernel
from qada_cache.storage import staging
from qada_cache.versions import pass_cache


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Tokens of each call that was computed so, here on CPUs."""
    found: list[int] = []
    original = joined.attend_to_joined

    def note(layer: Any, store: Any, query: Any, *given: Tensor) -> Tensor:
        found.append(query.states.shape[2])
        return original(layer, store, query, *given)

    monkeypatch.setattr(joined, "DEVICES", ("cpu", "cuda"))
    monkeypatch.setattr(joined, "attend_to_joined", note)
    return found


@pytest.mark.parametrize("offloading", [False, True])
@pytest.mark.parametrize(("most", "at_once"), [(1 << 26, 1 << 27), (0, 1 << 27), (0, 1)])
def test_long_turns_equal_the_reference(
    offloading: bool, most: int, at_once: int, taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Joined, in two parts, and in blocks of a segment."""
    monkeypatch.setattr(joined, "JOINED_BYTES", most)
    monkeypatch.setattr(staging, "BLOCK_BYTES", at_once)
    monkeypatch.setattr(staging, "SEGMENT_TOKENS", 64)
    with accelerator():
        pair, inputs = Pair(offloading=offloading), Inputs()
        for tokens in (300, 40, 1, 1, 30):
            pair.update(*inputs(tokens))
    assert taken == [40, 30]


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("offloading", [False, True])
@pytest.mark.parametrize("small", [False, True])
@torch.inference_mode()
def test_layers_follow_each_other(
    bits: int, offloading: bool, small: bool, taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns of a model of several layers, after crops and steps, are those of the path block by block."""
    if small:
        monkeypatch.setattr(joined, "JOINED_BYTES", 0)
        monkeypatch.setattr(staging, "BLOCK_BYTES", 1)
        monkeypatch.setattr(staging, "COPY_BYTES", 0)
    model, ids = tiny(head_dim=32, num_hidden_layers=3), prompt(1800)[0]
    with accelerator():
        cache = QAdACache(model, moments="current", threshold=1.0, bulk_bits=bits, offloading=offloading)
        for start, end in itertools.pairwise((0, 1200, 1201, 1400, 1700, 1701)):
            twin = cache.fork()
            found = model(ids[:, start:end], **pass_cache(cache)).logits
            with monkeypatch.context() as patch:
                patch.setattr(joined, "can_join", lambda *_: False)
                expected = model(ids[:, start:end], **pass_cache(twin)).logits
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
            if end == 1400:
                cache.crop(-100)
                model(ids[:, 1300:1400], **pass_cache(cache))
        stagings = cache.layers[0].store.bulk.placement._staging.values()
        assert len(stagings) == offloading
        assert all(each._memory == [None, None] for each in stagings)
    assert taken == [199] * 3 + [300] * 3


def test_calls_that_others_compute(taken: list[int]) -> None:
    """Calls with unlike rows, or with padding, are not computed by the joined attention."""
    pair, inputs = Pair(), Inputs()
    pair.update(*inputs(60))
    valid = torch.ones(2, 30, dtype=torch.bool)
    valid[0, :4] = False
    pair.update(*inputs(30), valid)
    pair.update(*inputs(30))
    assert not taken


@pytest.mark.parametrize("causal", [False, True])
def test_an_operator_that_groups_is_used_if_it_agrees(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator that groups heads is used if it agrees with plainer operations; else these are."""
    made = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, heads, tokens, 16, generator=made) for heads, tokens in ((6, 7), (2, 50), (2, 50))
    )
    calls: list[bool] = []

    class Grouped:
        name = lower_right.NAME

        def __init__(self, aligned: bool) -> None:
            self.aligned = aligned

        def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float, causal: bool) -> Any:
            calls.append(causal)
            key, value = (part.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for part in (key, value))
            scores = query @ key.mT * scaling
            if causal:
                shift = key.shape[2] - query.shape[2] if self.aligned else 0
                shown = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(shift)
                scores = scores.masked_fill(~shown, -torch.inf)
            return scores.softmax(dim=-1) @ value, scores.logsumexp(dim=-1)

    plain = lower_right.attend_to_all(query, key, value, scaling=0.3, causal=causal)
    scores = query.double() @ key.double().repeat_interleave(3, dim=1).mT * 0.3
    if causal:
        scores = scores.masked_fill(~torch.ones(7, 50, dtype=torch.bool).tril(43), -torch.inf)
    expected = scores.softmax(dim=-1) @ value.double().repeat_interleave(3, dim=1), scores.logsumexp(dim=-1)
    found = [plain]
    for aligned in (True, False):
        operator = Grouped(aligned)
        monkeypatch.setattr(lower_right, "find_operator", lambda *_, own=operator: own)
        calls.clear()
        if aligned:
            found.append(lower_right.attend_to_all(query, key, value, scaling=0.3, causal=causal))
            assert calls == [True, False, causal]
        else:
            fault = lower_right.find_grouped_fault(operator, query.device, query.dtype, 16)
            assert fault is not None
            assert "it is off" in fault
    for out, lse in found:
        torch.testing.assert_close(out.double(), expected[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse.double(), expected[1], rtol=1e-5, atol=1e-5)


@needs_compiler
def test_a_cpus_kernel_takes_long_turns(taken: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind as many tokens as are worth it; others are computed part by part."""
    monkeypatch.setattr(joined, "DEVICES", ("cuda",))
    monkeypatch.setattr(prompt_kernel, "MIN_TOKENS", 300)
    pair, inputs = Pair(), Inputs()
    for tokens in (150, 70, 1, 200, 30, 70):
        pair.update(*inputs(tokens))
    assert taken == [200, 70]
