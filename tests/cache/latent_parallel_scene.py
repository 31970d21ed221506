"""Uses of models of latent attention, for test_latent_parallel.py: by one process, and by two that share a model."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from latents import make_indexed
from models import FAMILIES, SMALL, dynamic, exact, forced, generate, logits_of, prompt, tiny
from small_sketch import small_sketch
from torch import Tensor
from transformers import PreTrainedModel

from qada_cache import KeyMoments, QAdACache, StaticHeads
from qada_cache.attention.latent import LatentLayer

MINICPM3 = {**FAMILIES["deepseek_v3"][1], "scale_emb": 1, "dim_model_base": 32, "scale_depth": 1.4}
INDEXED = "deepseek_v32"
# Whose plan splits query heads; that of "deepseek_v3" splits nothing of attention.
SPLIT = ("deepseek_v2", "minicpm3", "repeated", INDEXED)
TEXT = [300, 40, 3, 1]  # tokens: a prompt, a turn of more than the window and one of fewer, then single tokens
OPTIONS: dict[str, Any] = {**SMALL, "criterion": "gaussian", "kernels": "torch"}


def make(kind: str, **changes: Any) -> PreTrainedModel:
    """A tiny model, whose scores lie far apart and whose vocabulary two processes can split."""
    told: dict[str, Any] = {"vocab_size": 96, "initializer_range": 0.2, **changes}
    if kind == INDEXED:
        return make_indexed("DeepseekV32", **told)
    with patch.dict(FAMILIES, {"minicpm3": ("MiniCPM3", MINICPM3)}):
        model = tiny("deepseek_v2" if kind == "repeated" else kind, **told)
    if kind == "repeated":  # both processes have the same queries, keys and values
        for layer in model.model.layers:
            for projection in (layer.self_attn.q_proj, layer.self_attn.kv_b_proj):
                half = len(projection.weight) // 2
                projection.weight.data[half:] = projection.weight.data[:half]
    return model


def text() -> Tensor:
    """Token ids `[1, tokens]`."""
    return prompt(sum(TEXT) + 5)[0].clamp(max=95)


def _read(model: PreTrainedModel, cache: Any) -> Tensor:
    return forced(model, text(), TEXT, cache)


def _count(cache: QAdACache) -> dict[str, Any]:
    stats = cache.stats(gather=True)
    shares = {name: getattr(stats, name).tolist() for name in ("local_share", "kv_local_share")}
    names = ("steps", "decisions", "tokens", "host_bytes", "bulk_read_bytes", "dense_bulk_bytes", "streamed_bytes")
    audit = stats.audit and [stats.audit.decisions, stats.audit.needed]
    return {**shares, **{name: getattr(stats, name) for name in names}, "audit": audit}


def read_exactly(model: PreTrainedModel) -> dict[str, Any]:
    """Tokens, logits of texts that are forced and statistics, by name and JSON-able, where all is read."""
    found: dict[str, Any] = {}
    for name, cache in {"dynamic": dynamic(model), "exact": exact(model), "chunks": exact(model)}.items():
        chunks = {"prefill_chunk_size": 50} if name == "chunks" else {}
        out = generate(model, text()[:, :300], cache, tokens=8, **chunks)
        found[name] = {"tokens": out.sequences[0].tolist(), "logits": logits_of(out).tolist()}
    for bits in (16, 8, 4):
        with small_sketch(40, 64):
            cache = exact(model, bulk_bits=bits)
            logits = [_read(model, cache)]
            assert all(layer.reads_weight for layer in cache.layers if isinstance(layer, LatentLayer))
            cache.crop(-100)
            logits.append(forced(model, text()[:, -100:], [95, 1], cache))
        found[f"{bits} bits"] = {"logits": torch.cat(logits, dim=1).tolist(), **_count(cache)}
    found["dynamic read"] = {"logits": _read(model, dynamic(model)).tolist()}
    return found


def decide(model: PreTrainedModel, moments: KeyMoments) -> dict[str, Any]:
    """Results by name, as of `read_exactly`, of caches whose heads decide, or decide and select tokens."""
    by_heads = torch.tensor([[False, True, True, True], [True, False, False, False]])
    by_groups = torch.tensor([[True], [False]])
    kinds: dict[str, dict[str, Any]] = {
        "own": {"group_rule": "head", "token_threshold": 0.0, "audit_every": 1},
        "together": {"group_rule": "any", "token_threshold": 0.0},
        "all selected": {"threshold": 1 - 1e-9, "token_threshold": 1e-30},
        "selected": {"token_threshold": 2.0, "bulk_bits": 8},
        "static": {"criterion": StaticHeads(by_heads), "group_rule": "head", "token_threshold": 0.0},
        "static groups": {"criterion": StaticHeads(by_groups), "token_threshold": 0.0},
    }
    found: dict[str, Any] = {}
    with small_sketch(40, 64):
        for name, options in kinds.items():
            cache = QAdACache(model, **{**OPTIONS, "threshold": 0.05, "moments": ("current", moments), **options})
            found[name] = {"logits": _read(model, cache).tolist(), **_count(cache)}
    return found
