"""lm-eval's `HFLM` with every token it scores or generates read through a QAdACache."""

import copy
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from torch import Tensor

from qada_cache import QAdACache

from .options import split_arguments


class QAdALM(HFLM):
    """An `HFLM` whose prompts are prefilled exactly and whose answers are decoded or scored query-adaptively.

    The last token of a prompt counts as decoded: its query yields the first token of the answer, which would
    otherwise be full attention's, and so would a whole one-token answer.

    Args:
        pretrained: as for `HFLM`.
        cache: "qada", "oracle", "static", "local" or "dense".
        keywords: `cache_*` are the cache's (see `options`); all others are `HFLM`'s.

    Raises:
        ValueError, TypeError: an argument the cache cannot take.
        NotImplementedError: a model the cache does not support.
    """

    def __init__(self, pretrained: Any, *positional: Any, cache: str = "qada", **keywords: Any) -> None:
        options, keywords = split_arguments(cache, keywords)
        super().__init__(pretrained, *positional, **keywords)
        # Built once, so that a wrong option or model is refused before any request; every batch gets a copy.
        self._empty_cache = QAdACache(self.model, **options)

    def _new_cache(self) -> QAdACache:
        return copy.deepcopy(self._empty_cache)

    def _forward(self, cache: QAdACache, ids: Tensor, mask: Tensor, **options: Any) -> Tensor:
        """Logits of the tokens `ids` `[rows, tokens]`; `mask` `[rows, cached + tokens]` is 0 at padding."""
        positions = (mask.cumsum(-1) - 1).clamp_min(0)[:, -ids.shape[1] :]
        with (
            torch.no_grad(),
            torch.autocast(
                self.device.type, dtype=self.mixed_precision_dtype, enabled=self.mixed_precision_dtype is not None
            ),
        ):
            return self.model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                **options,
            ).logits

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **generation_kwargs: Any) -> Tensor:
        cache = self._new_cache()
        if context.shape[1] > 1:  # generate() itself decodes the one token that is left
            mask = generation_kwargs["attention_mask"]
            self._forward(cache, context[:, :-1], mask[:, :-1], logits_to_keep=1)
        return super()._model_generate(context, max_length, stop, past_key_values=cache, **generation_kwargs)
