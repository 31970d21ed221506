"""Caches that hold short prompts, and their decode steps."""

from __future__ import annotations

from typing import Any

import torch
from models import SMALL, prompt
from transformers import PreTrainedModel

from qada_cache import QAdACache
from qada_cache.versions import pass_cache


def make(model: PreTrainedModel, **options: Any) -> QAdACache:
    return QAdACache(model, **{**SMALL, "moments": "current", **options})


def decode(model: PreTrainedModel, cache: QAdACache, tokens: int, start: int = 0) -> torch.Tensor:
    """Logits of a prompt, unless there is one, and of so many tokens behind it, one by one."""
    ids = prompt(90)[0].to(model.device)
    if not start:
        model(ids[:, :60], **pass_cache(cache), logits_to_keep=1)
    places = range(60 + start, 60 + start + tokens)
    return torch.cat([model(ids[:, at : at + 1], **pass_cache(cache)).logits for at in places])
