"""A call goes on only with conversations of its own key, which the call or its request names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from calling import EXACT, NEW, Reads, ours, said
from models import tiny
from transformers import GenerationConfig, PreTrainedModel

from qada_cache.serving import FOLDER, counters


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny()


@pytest.fixture
def reads(model: PreTrainedModel) -> Reads:
    return Reads(model)


def test_a_key_is_an_argument_or_an_attribute_of_the_request(model: PreTrainedModel, reads: Reads) -> None:
    """As `transformers serve` hands a request's `generation_config` on."""
    ids, settings = said(90), {"do_sample": False, "max_new_tokens": NEW}

    def read(**options: Any) -> int:
        reads.clear()
        wanted = {"attention_mask": torch.ones_like(ids), "cache_options": EXACT, **options}
        model.generate(ids, custom_generate=FOLDER, trust_remote_code=True, **wanted)
        return reads.first()

    mine = {"generation_config": GenerationConfig(conversation_key="mine", **settings)}
    assert [read(**settings), read(**settings)] == [90, 1]
    assert [read(**mine), read(**mine), read(conversation_key="mine", **settings)] == [90, 1, 1]
    assert read(conversation_key="yours", **settings) == 90
    with pytest.raises(ValueError, match="conversation_key must be a str, got int"):
        read(conversation_key=5, **settings)


def test_nothing_is_shared_without_a_key_where_several_are_served(model: PreTrainedModel, reads: Reads) -> None:
    ids = said(90)
    for _ in range(2):
        reads.clear()
        ours(model, ids, one_user=False)
        assert reads.first() == 90
    assert counters(model)["conversations"] == 0
    for wanted in (90, 1):
        reads.clear()
        ours(model, ids, one_user=False, conversation_key="mine")
        assert reads.first() == wanted
