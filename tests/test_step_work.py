"""A decode step does the same work on the host whatever the length of the context."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from types import FrameType
from typing import Any

import pytest
import torch
from compilers import needs_compiler
from models import prompt, tiny
from transformers import PreTrainedModel

from qada_cache import QAdACache
from qada_cache.kernels import compiled


def calls(model: PreTrainedModel, cache: QAdACache, ids: torch.Tensor) -> Counter[str]:
    """How often each function was called, ours, transformers' and torch's, in decoding one token."""
    made: Counter[str] = Counter()

    def count(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            made[frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name] += 1
        elif event == "c_call":
            made[argument.__qualname__] += 1

    gc.collect()
    gc.disable()  # what it finalises, it would call in the middle of a step
    sys.setprofile(count)
    try:
        model(ids, past_key_values=cache)
    finally:
        sys.setprofile(None)
        gc.enable()
    return made


@pytest.mark.parametrize(
    ("kernels", "threshold"),
    [
        ("torch", 0.0),
        ("torch", 1.0),
        pytest.param("auto", 0.0, marks=needs_compiler),
        pytest.param("auto", 0.5, marks=needs_compiler),  # the kernel itself sees to heads that differ
        pytest.param("auto", 1.0, marks=needs_compiler),
    ],
)
@torch.inference_mode()
def test_python_work_does_not_grow_with_the_context(
    kernels: str, threshold: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same calls at two lengths, both long enough to be split among threads, and into parts of the same kind."""
    monkeypatch.setenv("QADA_KERNELS", kernels)
    monkeypatch.setattr(compiled, "MIN_TOKENS", 1)
    model = tiny(max_position_embeddings=8192, num_hidden_layers=2)
    made = []
    for tokens in (2400, 2400 + 333 * 12):
        cache = QAdACache(model, threshold=threshold, moments="current")
        ids = prompt(tokens)[0]
        model(ids, past_key_values=cache)
        for _ in range(3):
            before = calls(model, cache, ids[:, :1])
        made.append(before)
        assert cache.stats().decisions == 3
    assert made[0] == made[1]
    assert sum(made[0].values()) > 100
