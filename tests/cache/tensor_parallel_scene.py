"""Uses of the needle model, for test_tensor_parallel.py: by one process, and by two that share a model."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import needle
import torch
from torch import Tensor
from transformers import PreTrainedModel

from qada_cache import QAdACache
from qada_cache.versions import pass_cache

NEW = 10
TOKENS: dict[str, Any] = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
SIZES = {"sink_tokens": 8, "local_tokens": 40}


def text() -> Tensor:
    """Token ids `[1, tokens]` of a text with facts in it, and a question about one."""
    prompt = needle.make_prompt(tokens=400, facts=16, questions=1)
    return needle.load_tokenizer()(f"{prompt.context} {prompt.questions[0]}", return_tensors="pt").input_ids


def heads_table() -> Tensor:
    """Long-context query heads, bool `[layers, heads]`."""
    return torch.rand(4, 8, generator=torch.Generator().manual_seed(3)) < 0.4


def found_by(model: PreTrainedModel, *, gather: bool, **options: Any) -> dict[str, Any]:
    """Greedy tokens through a cache, and its statistics, all JSON-able; kernels in torch unless `options` ask."""
    cache = QAdACache(model, **{**SIZES, "kernels": "torch", **options})
    generated = model.generate(text(), **pass_cache(cache), **TOKENS)[0, -NEW:].tolist()
    stats = vars(cache.stats(gather=gather))
    audit = stats["audit"] and asdict(stats["audit"])
    shown = {name: value.tolist() if isinstance(value, Tensor) else value for name, value in stats.items()}
    return {**shown, "generated": generated, "audit": audit, "layers": list(stats["layers"])}
