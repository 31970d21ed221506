"""Calls of `generate`, as it is and by the folder; how much they read, and a client that goes."""

from __future__ import annotations

from typing import Any

import torch
from models import SMALL, prompt
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from qada_cache.serving import FOLDER
from qada_cache.versions import pass_cache

NEW = 12
EXACT = {"threshold": 1.0, "moments": "current", **SMALL}
DECIDING = {**EXACT, "threshold": 0.4}


def stock(model: PreTrainedModel, ids: Tensor, cache: Any, **options: Any) -> Tensor:
    """`generate` as it is, with this cache."""
    settings = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": NEW, **options}
    return model.generate(ids, **pass_cache(cache), **settings)


def ours(model: PreTrainedModel, ids: Tensor, cache_options: dict[str, Any] = EXACT, **options: Any) -> Any:
    """`generate` by the folder; nothing is stored unless `options` say so."""
    settings = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": NEW}
    settings |= {"conversations_store": False, **options}
    return model.generate(ids, custom_generate=FOLDER, trust_remote_code=True, cache_options=cache_options, **settings)


def said(*parts: Tensor | int) -> Tensor:
    """Token ids `[1, tokens]`: parts one after the other, a number standing for that many random ones."""
    rows = [prompt(part, seed=100 + place)[0] if isinstance(part, int) else part for place, part in enumerate(parts)]
    return torch.cat(rows, dim=1)


class Reads(list):
    """How many tokens a model was given, call by call."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.handle = model.get_input_embeddings().register_forward_hook(
            lambda module, inputs, output: self.append(output.shape[1])
        )

    def first(self) -> int:
        """The number of tokens, those of the prompt, in the model's first call since this was last asked."""
        read = self[0]
        self.clear()
        return read


class Stop(Exception):  # noqa: N818  # no error
    pass


class StoppingStreamer(BaseStreamer):
    """Raises after so many tokens, as `transformers serve` does when the client is gone."""

    def __init__(self, tokens: int) -> None:
        self.left = tokens + 1  # the prompt comes first

    def put(self, value: Tensor) -> None:
        if not self.left:
            raise Stop
        self.left -= 1

    def end(self) -> None:
        pass
