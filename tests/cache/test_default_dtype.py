"""torch's default dtype is the user's, who sets it before a model is built: a cache names its own."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import needle
import pytest
import torch
from compilers import needs_compiler
from models import prompt, tiny
from quick_cases import mark_rest_slow
from scenarios import small_buffers
from small_sketch import small_sketch
from test_default_device import Found, Given, coded, collected, commands, decoding, static_heads, whole_heads
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from qada_cache import QAdACache, files
from qada_cache.key_moments import defaults
from qada_cache.models.identity import sample
from qada_cache.versions import pass_cache

DTYPES = [torch.float16, torch.bfloat16, torch.float64]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


class Watch(TorchDispatchMode):
    """Notes operations that make tensors of a dtype which nothing that they are given has."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype, self.found = dtype, set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {part.dtype if isinstance(part, Tensor) else part for part in tree_leaves((args, kwargs))}
        if self.dtype not in given and any(t.dtype == self.dtype for t in tree_leaves(out) if isinstance(t, Tensor)):
            self.found.add(str(func))
        return out


@functools.cache
def find(use: Callable[[Given], Found], dtype: torch.dtype) -> Found:
    """The results of a use with this default dtype."""
    shutil.rmtree(files.find_home() / defaults.FOLDER, ignore_errors=True)
    with default_dtype(torch.float32):
        given = Given(tiny(), needle.load_model(), *prompt(90, 61), files.find_home())
    with default_dtype(dtype):
        return use(given)


def sketched(given: Given) -> Found:
    return decoding(given, token_threshold=1e-3, audit_every=3)


def decides_as_told(given: Given) -> Found:
    """Every head is long-context, then none: no moments are known, and no estimate is made."""
    return [part for criterion in ("dense", "local", "oracle") for part in decoding(given, criterion=criterion)]


USES = [coded, static_heads, sketched, whole_heads, decides_as_told, collected, commands]
QUICK = [*((dtype, static_heads) for dtype in DTYPES), (torch.float16, collected)]  # others take seconds each
REST = [(dtype, use) for use in USES for dtype in DTYPES if (dtype, use) not in QUICK]


@pytest.mark.parametrize(
    ("dtype", "use"), mark_rest_slow([*QUICK, *REST], len(QUICK)), ids=lambda one: getattr(one, "__name__", str(one))
)
def test_everything_does_the_same(dtype: torch.dtype, use: Callable) -> None:
    with small_buffers(), small_sketch(6, 16):
        there, here = (find(use, each) for each in (dtype, torch.float32))
    assert len(here) > 10
    torch.testing.assert_close(there, here, rtol=0, atol=0, equal_nan=True)


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@torch.inference_mode()
def test_long_turns_over_records(dtype: torch.dtype) -> None:
    """C++ decodes whole bulks, into as much memory as it writes."""
    model, (ids, mask) = tiny(head_dim=32), prompt(2000, 1400)
    turn, found = prompt(130, seed=3)[0].repeat(2, 1), []
    told = torch.cat([mask, torch.ones_like(turn), torch.ones_like(turn)], dim=1)
    for each in (dtype, torch.float32):
        cache = QAdACache(model, bulk_bits=8, moments="current")
        with default_dtype(each), Watch(torch.float16) as watch:
            logits = [model(ids, attention_mask=mask, **pass_cache(cache)).logits]
            for tokens in (130, 4, 1):
                mask_so_far = told[:, : cache.get_seq_length() + tokens]
                logits.append(model(turn[:, :tokens], attention_mask=mask_so_far, **pass_cache(cache)).logits)
            found.append((*logits, cache.stats().local_share))
        assert not watch.found  # half precision is made nowhere on the way
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_a_model_has_one_identity() -> None:
    """Weights are sampled at places that no half precision tells apart, or counts up to."""
    models = [tiny(vocab_size=9000) for _ in (torch.float32, *DTYPES)]  # each is sampled once
    expected = sample(models[0])
    for dtype, model in zip(DTYPES, models[1:], strict=True):
        with default_dtype(dtype):
            assert sample(model) == expected
