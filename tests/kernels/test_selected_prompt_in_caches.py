"""Prompts read by selection in a whole cache."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from compilers import needs_compiler, needs_vectors
from models import exact, forced, prompt, tiny
from test_selected_prompt import THETA, short  # noqa: F401 - a fixture
from transformers import DynamicCache

from qada_cache import QAdACache
from qada_cache.versions import pass_cache

pytestmark = [needs_compiler, needs_vectors]


@torch.no_grad()
@pytest.mark.parametrize("bits", [16, 8])
def test_chunks_in_a_cache(bits: int) -> None:
    """Every chunk is read by selection, as the whole prompt is, and of a batch, too; in few bits of what was coded."""
    model, ids = tiny("llama", head_dim=32), prompt(1000, 1000)[0]
    told: dict[str, Any] = {"max_new_tokens": 1, "do_sample": False, "return_dict_in_generate": True}
    told |= {"output_logits": True, "pad_token_id": 0}
    found, shares = [], []
    for theta, chunk in ((0.0, 400), (THETA, None), (THETA, 400)):
        cache = exact(model, prefill_threshold=theta, bulk_bits=bits)
        out = model.generate(ids, **pass_cache(cache), **told, **({"prefill_chunk_size": chunk} if chunk else {}))
        found.append(out.logits[0])
        shares.append(cache.stats().prompt_read_share)
        assert cache.stats().prompt_pairs == (theta > 0) * 2 * 2 * 4 * 1000 * 1001 // 2  # rows, layers, heads
    assert shares[1] == pytest.approx(shares[2], rel=0.05)
    assert shares[2] < 0.8
    errors = [float((each - found[0]).abs().mean()) for each in found]
    assert 1e-3 < errors[2] < 1.5 * errors[1]


@torch.no_grad()
def test_in_a_cache() -> None:
    """0, the default, is exact; a low threshold as near to it as rounding; a higher one is not, and is near."""
    model, ids = tiny("llama", head_dim=32), prompt(900)[0]
    plain = forced(model, ids, [900], DynamicCache(config=model.config))
    caches = [exact(model, prefill_threshold=theta) for theta in (0.0, 1e-9, THETA)]
    logits = [forced(model, ids, [900], cache) for cache in caches]
    assert QAdACache(model, moments="current").options.prefill_threshold == 0
    assert (logits[0] - plain).abs().max() < 1e-4
    assert (logits[1] - plain).abs().max() < 1e-4
    assert 1e-3 < (logits[2] - plain).abs().mean() < 0.2 * float(plain.std())
    stats = [cache.stats() for cache in caches]
    assert [each.prompt_pairs for each in stats] == [0, *[2 * 4 * 900 * 901 // 2] * 2]  # layers, heads
    assert math.isnan(stats[0].prompt_read_share)
    assert 0.2 < stats[2].prompt_read_share < stats[1].prompt_read_share <= 1
    assert str(stats[2]).endswith(f", {stats[2].prompt_read_share:.1%} of the pairs of prompts computed")
    assert "pairs" not in str(stats[0])


@torch.no_grad()
def test_under_autocast() -> None:
    """Autocast, which lowers products to bfloat16, does not change the selection, whose products stay float32."""
    model, ids = tiny(dtype=torch.bfloat16), prompt(900)[0]
    found = []
    for enabled in (False, True):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            found.append(model(ids, **pass_cache(exact(model, prefill_threshold=THETA))).logits.float())
    torch.testing.assert_close(found[1], found[0], rtol=0.02, atol=0.02)


def test_a_fork_does_not_say_otherwise() -> None:
    """A fork cannot change `prefill_threshold`: a PrefixStore has to know how a prompt was read."""
    cache = QAdACache(tiny(), moments="current", prefill_threshold=THETA)
    with pytest.raises(ValueError, match="prefill_threshold"):
        cache.fork(prefill_threshold=0.0)


@torch.no_grad()
def test_torch_reads_exactly() -> None:
    model, ids = tiny("llama", head_dim=32), prompt(900)[0]
    cache = exact(model, prefill_threshold=THETA, kernels="torch")
    plain = model(ids, **pass_cache(DynamicCache(config=model.config))).logits
    assert torch.equal(model(ids, **pass_cache(cache)).logits, plain)
