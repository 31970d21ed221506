"""Caches that hold short prompts, and decode steps on them, for tests of captured graphs."""

from __future__ import annotations

from typing import Any

import torch
from models import SMALL, prompt
from transformers import PreTrainedModel

from qada_cache import QAdACache
from qada_cache.versions import pass_cache


def make(model: PreTrainedModel, **options: Any) -> QAdACache:
    """An empty cache with small sinks and window (`SMALL`), which decides by its own prompt's moments."""
    return QAdACache(model, **{**SMALL, "moments": "current", **options})


def decode(model: PreTrainedModel, cache: QAdACache, tokens: int, start: int = 0) -> torch.Tensor:
    """Give the model one token at a time, `tokens` in all, from the one at `start` behind a prompt of 60. At `start` 0
    the prompt is read first. Returns the decoded tokens' logits `[tokens, 1, vocabulary]`."""
    ids = prompt(90)[0].to(model.device)
    if not start:
        model(ids[:, :60], **pass_cache(cache), logits_to_keep=1)
    places = range(60 + start, 60 + start + tokens)
    return torch.cat([model(ids[:, at : at + 1], **pass_cache(cache)).logits for at in places])
