"""Latents in few bits: records of keys alone, whose first channels are the values."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from latents import dynamic
from models import exact, forced, generate, prompt, tiny

from qada_cache import QAdACache
from qada_cache.attention.latent_attention import LatentAttention
from qada_cache.kernels.operands import Query
from qada_cache.sketch import Layout
from qada_cache.sketch.codec import quantize_segments
from qada_cache.sketch.coded import RecordLayout, code_tokens, decode_keys, decode_values, estimate_keys

SPLIT = [1400, 1, 30, 1]


@pytest.mark.parametrize("tokens", [8192, 16_400])
@pytest.mark.parametrize(("bits", "share"), [(16, 1.05), (8, 0.5), (4, 0.4)])
def test_bytes_held(bits: int, share: float, tokens: int) -> None:
    """A cache of latents of DeepSeek's sizes takes at most this share of their bytes, all its copies together."""
    model = tiny("deepseek_v3", dtype=torch.bfloat16, kv_lora_rank=512, qk_rope_head_dim=64, num_hidden_layers=1)
    cache = QAdACache(model, bulk_bits=bits, kernels="torch")
    latents = torch.randn(1, 1, tokens, 576, generator=torch.Generator().manual_seed(0)).bfloat16()
    layer = cache.layers[0]
    layer.lazy_initialization(latents, latents[..., :0])
    for part in latents.split(4100, dim=2):
        layer.store.absorb(part, part[..., :0], None)
    stats = cache.stats()
    assert 0.3 < (stats.device_bytes + stats.host_bytes) / latents.nbytes <= share


@pytest.mark.parametrize("bits", [8, 4])
def test_records_are_those_of_keys(bits: int) -> None:
    """Values have no part in what is kept of a key."""
    made = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(2, 1, 700, dim, generator=made) for dim in (24, 16))
    sketch = Layout.from_bits(24, 1.5)
    assert sketch is not None
    found = quantize_segments(keys, None, sketch)
    predicted, weights, records = estimate_keys(found, sketch), torch.ones(24), []
    for part in (values, values[..., :0]):
        layout = RecordLayout.from_bits(24, part.shape[-1], bits)
        assert layout is not None
        coded = code_tokens(keys, part, predicted, weights, layout)
        assert decode_values(coded, layout).shape == part.shape
        records.append((coded[..., : 4 + layout.key_bytes], decode_keys(coded, predicted, weights, layout)))
        assert coded.shape[-1] == layout.size
    assert torch.equal(records[0][0][..., [0, 1]], records[1][0][..., [0, 1]])
    assert torch.equal(records[0][0][..., 4:], records[1][0][..., 4:])
    assert torch.equal(records[0][1], records[1][1])
    assert layout.size <= 24 * bits // 8 + 4


@pytest.mark.parametrize(("bits", "kernels"), [(8, "auto"), (4, "torch")])
@torch.no_grad()
def test_attention_is_that_of_float64_over_decoded_latents(bits: int, kernels: str) -> None:
    """Attention equals float64 over decoded latents, and these are as near to the model's as the bits allow."""
    model, ids = tiny("deepseek_v3"), prompt(1400)[0]
    cache, plain = QAdACache(model, bulk_bits=bits, kernels=kernels), dynamic(model)
    for each in (cache, plain):
        forced(model, ids, [1399, 1], each)
    layer = cache.layers[1]
    assert layer.store.bulk.records is not None
    held = layer.store.copy_tokens(slice(0, 1), 0, 1400)[0].double()
    other = plain.layers[1]
    off = (held - torch.cat([other.keys, other.values], dim=-1)).norm() / held.norm()
    assert 1e-4 < off < {8: 0.04, 4: 0.08}[bits]
    states = torch.randn(1, 4, 3, 16, generator=torch.Generator().manual_seed(0))
    out, lse = LatentAttention(layer, layer.store, Query(states, 0.7), 8).attend(slice(0, 1), states)
    weight = layer.bound_module().kv_b_proj.weight.double().view(4, 16, 16)
    keys, values = (held[..., :16] @ weight.mT).split(8, dim=-1)
    scores = 0.7 * states.double() @ torch.cat([keys, held[..., 16:].expand(-1, 4, -1, -1)], dim=-1).mT
    wanted = scores.softmax(-1) @ values
    assert (out - wanted).norm() <= 1e-5 * wanted.norm()
    assert (lse - scores.logsumexp(-1)).norm() <= 1e-5 * scores.logsumexp(-1).norm()


@pytest.mark.parametrize("bits", [8, 4])
def test_copies_files_and_crops(bits: int, tmp_path: Path) -> None:
    """All go on with the same codes, near those of 16 bits."""
    model, ids = tiny("deepseek_v3"), prompt(sum(SPLIT) + 40)[0]
    cache, other = QAdACache(model, bulk_bits=bits), exact(model)
    for each in (cache, other):
        forced(model, ids[:, : sum(SPLIT)], SPLIT, each)
    cache.save(tmp_path / "cache")
    cropped = copy.deepcopy(cache)
    cropped.crop(-600)
    cropped.save(tmp_path / "cropped")
    found = []
    loaded = QAdACache.load(tmp_path / "cropped", model), QAdACache.load(tmp_path / "cache", model)
    for each in (copy.deepcopy(cache), cache.fork(), *loaded, cache, other):
        each.crop(sum(SPLIT) - 600 - each.get_seq_length())
        found.append(forced(model, ids[:, sum(SPLIT) - 600 :], [600, 39, 1], each))
    for got in found[1:-1]:
        assert torch.equal(got, found[0])
    assert (found[0] - found[-1]).norm() <= {8: 0.05, 4: 0.1}[bits] * found[-1].norm()


def test_eight_bits_write_what_sixteen_do() -> None:
    model, ids = tiny("deepseek_v3"), prompt(1300)[0]
    wanted = generate(model, ids, dynamic(model), tokens=24)
    got = generate(model, ids, QAdACache(model, bulk_bits=8), tokens=24)
    assert torch.equal(got.sequences, wanted.sequences)
