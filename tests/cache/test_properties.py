"""A cache's properties are those of a `DynamicCache` with the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from models import VOCABULARY, exact, forced, prompt, tiny
from torch import Tensor
from transformers import Cache, DynamicCache

from qada_cache.versions import pass_cache

OF_LAYERS = ("is_initialized", "is_sliding", "is_croppable", "is_compileable", "supports_early_init", "device")
ASKED = ("get_seq_length", "get_max_length", "get_query_offset", "is_recording_past", "has_previous_state")


def told(ask: Callable[[], Any]) -> Any:
    """The result of a call, or the type of its error."""
    try:
        return ask()
    except Exception as error:
        return type(error)


def said(cache: Cache) -> dict[str, Any]:
    """Every public attribute that is no verb, and what the questions return, of the cache and for each layer."""
    names = {name for name in (*dir(DynamicCache), *vars(cache)) if not name.startswith("_")} - {"layers"}
    plain = [name for name in names if not callable(getattr(DynamicCache, name, None))]
    found = {name: told(lambda name=name: getattr(cache, name)) for name in plain}
    found |= {name: hasattr(cache, name) for name in ("max_batch_size", "max_cache_len", "get_max_cache_shape")}
    found |= {"len": len(cache), "true": bool(cache)}
    for name in ASKED:
        for at in ((), *((index,) for index in range(len(cache) + 1))):
            found[f"{name}{at}"] = told(lambda name=name, at=at: getattr(cache, name)(*at))
    for index, layer in enumerate(cache.layers):
        found[f"get_mask_sizes {index}"] = told(lambda index=index: cache.get_mask_sizes(7, index))
        found |= {f"{name} {index}": told(lambda layer=layer, name=name: getattr(layer, name)) for name in OF_LAYERS}
    return found


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])
def test_it_says_what_dynamic_cache_says(family: str) -> None:
    model, text = tiny(family), prompt(60, 60)[0]
    caches = exact(model), DynamicCache(config=model.config)

    def same() -> dict[str, Any]:
        ours, theirs = map(said, caches)
        assert ours == theirs
        return ours

    assert not same()["is_initialized"]
    for tokens in (6, 30, 1):
        for cache in caches:
            forced(model, text[:, :tokens], [tokens], cache)
        assert same()["is_initialized"]
    if family == "llama":  # others refuse to crop
        for count in (-3, -100):
            for cache in caches:
                cache.crop(count)
            assert same()["is_initialized"]


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])
def test_initialised_early(family: str) -> None:
    """As transformers' export does it: nothing is held, and everything follows."""
    model, text = tiny(family), prompt(60, 60)[0]
    caches = exact(model), DynamicCache(config=model.config)
    for cache in caches:
        cache.early_initialization(2, 2, 8, torch.float32, torch.device("cpu"))
    ours, theirs = map(said, caches)
    assert ours == theirs
    assert ours["is_initialized"]
    got, wanted = (forced(model, text, [50, 10], cache) for cache in caches)
    assert (got - wanted).abs().max() < 1e-3


def test_a_prefix_that_sees_itself() -> None:
    """A prefix whose tokens see each other is the first piece alone: the model asks whether the cache is filled."""
    config = transformers.HrmTextConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_attention_heads=4, head_dim=8,
        num_layers_per_stack=1, num_hidden_layers=8, max_position_embeddings=1024, initializer_range=0.35,
        pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.HrmTextForCausalLM._from_config(config, attn_implementation="sdpa").eval()
    text = prompt(70)[0]
    prefix = torch.ones_like(text)

    @torch.no_grad()
    def logits(cache: Cache) -> Tensor:
        pieces = [slice(0, 20), slice(20, 69), slice(69, 70)]
        kept = {**pass_cache(cache), "use_cache": True}
        return torch.cat([model(text[:, at], token_type_ids=prefix[:, at], **kept).logits for at in pieces], dim=1)

    assert (logits(exact(model)) - logits(DynamicCache(config=config))).abs().max() < 1e-3
