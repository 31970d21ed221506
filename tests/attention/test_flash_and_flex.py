"""Implementations of attention other than eager and sdpa: flash and flex read the prompt; others are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import exact, forced, prompt, tiny
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gemma2 import modeling_gemma2

from qada_cache import QAdACache
from qada_cache.versions import pass_cache

pytestmark = pytest.mark.usefixtures("clean_tables")

# Flex attention takes a minute to compile. Uncompiled it warns, and what compiles its masks is deprecated in itself.
UNCOMPILED = pytest.mark.filterwarnings("ignore:flex_attention called:UserWarning", "ignore::DeprecationWarning")
SPLIT = [120, 5, 22, 1]  # a prompt, a short and a long turn, single tokens


def named(attention: str, family: str = "llama", **changes: Any) -> PreTrainedModel:
    """A tiny model as if loaded with this implementation of attention, whose library need not be installed."""
    model = tiny(family, **changes)
    model.config._attn_implementation = attention
    return model


class Flash:
    """A stand-in for flash attention: it takes a mask of tokens or none. It counts its calls and keeps its masks."""

    def __init__(self) -> None:
        self.masks: list[Tensor | None] = []
        self.queries: list[int] = []

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        assert not hasattr(key, "_qada_layer")
        assert mask is None or mask.dim() == 2
        self.masks.append(mask)
        queries, seen = query.shape[2], key.shape[2]
        self.queries.append(queries)
        visible = torch.ones(queries, seen, dtype=torch.bool).tril(seen - queries)[None, None]
        if mask is not None:
            itself = torch.eye(seen, dtype=torch.bool)[seen - queries :]  # or padding's softmax would be of nothing
            visible = (visible & mask.bool()[:, None, None]) | itself
        key, value = (part.repeat_interleave(module.num_key_value_groups, dim=1) for part in (key, value))
        scores = query @ key.mT * kwargs["scaling"]
        out = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1) @ value
        return out.transpose(1, 2).contiguous(), None


@pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_3", "kernels-community/flash-attn2"])
@pytest.mark.parametrize("lengths", [(150,), (150, 61)])
def test_flash_attention_reads_the_prompt_and_ours_decodes(
    name: str, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    flash, theirs = Flash(), AttentionMaskInterface._global_mapping["flash_attention_2"]
    monkeypatch.setitem(AttentionInterface._global_mapping, name, flash)
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, name, theirs)  # as kernels of the Hub do it
    model = named(name)
    ids, mask = prompt(*lengths)
    wanted = forced(tiny(), ids, SPLIT, DynamicCache(config=model.config), mask)
    cache = exact(model)
    flash.queries.clear()  # of the pass that collects moments
    got = forced(model, ids, SPLIT, cache, mask)
    assert (got - wanted)[mask.bool()].abs().max() < 1e-4
    assert flash.queries == [SPLIT[0]] * 2  # of each layer
    assert cache.stats().decisions > 0
    assert model.config._attn_implementation == name
    with_dynamic = forced(model, ids, SPLIT, DynamicCache(config=model.config), mask)
    assert (with_dynamic - wanted)[mask.bool()].abs().max() < 1e-4
    assert len(flash.queries) > 2


def test_flash_attention_takes_a_soft_cap() -> None:
    """Under another name than "sdpa", which takes none, ours does what the model asks for."""
    seen: list[Any] = []

    def flash(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        seen.append(kwargs["softcap"])
        mask = torch.ones(query.shape[2], key.shape[2]).tril(key.shape[2] - query.shape[2]).log()[None, None]
        # A sliding layer's keys are no more than its window's, but for the prompt's.
        behind = torch.ones_like(mask).tril(-12) if kwargs.get("sliding_window") else torch.zeros_like(mask)
        return modeling_gemma2.eager_attention_forward(
            module, query, key, value, mask.masked_fill(behind.bool(), -torch.inf), **kwargs
        )

    AttentionInterface.register("flash_attention_2", flash)
    ids = prompt(150)[0]
    plain = tiny("gemma2")
    wanted = forced(plain, ids, [120, 1], DynamicCache(config=plain.config))
    model = named("flash_attention_2", "gemma2")
    got = forced(model, ids, [120, 1], exact(model))
    assert seen[0] == 5.0
    assert (got - wanted).abs().max() < 1e-4


@UNCOMPILED
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("lengths", [(150,), (150, 61)])
def test_flex_attention_reads_the_prompt_and_ours_decodes(lengths: tuple[int, ...], family: str) -> None:
    model, plain = named("flex_attention", family), tiny(family)
    ids, mask = prompt(*lengths)
    wanted = forced(plain, ids, SPLIT, DynamicCache(config=plain.config), mask)
    with torch.compiler.set_stance("force_eager"):
        cache = exact(model)
        got = forced(model, ids, SPLIT, cache, mask)
    assert (got - wanted)[mask.bool()].abs().max() < 1e-4
    assert cache.stats().decisions > 0


@UNCOMPILED
def test_block_masks_have_plain_lengths() -> None:
    """Compiled for a prompt of a second length, flex attention compares them: graphs know no class of ours."""
    model, ids, masks = named("flex_attention"), prompt(150)[0], list[Any]()
    own = AttentionInterface._global_mapping["flex_attention"]

    def keep(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        masks.append(mask)
        return own(module, query, key, value, mask, **kwargs)

    AttentionInterface.register("flex_attention", keep)
    with torch.compiler.set_stance("force_eager"):
        forced(model, ids, [150], exact(model))
    assert {type(length) for mask in masks for length in mask.seq_lengths} == {int}


@UNCOMPILED
@pytest.mark.parametrize("split", [[150], [120, 30]])
def test_a_block_mask_of_another_kind_is_refused(split: list[int]) -> None:
    model, ids = named("flex_attention"), prompt(150)[0]
    cache = exact(model)

    def skipping(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        query = query + 150 - split[-1]
        return (key <= query) & ((query < 140) | (key != 30))

    mask = create_block_mask(skipping, 1, None, split[-1], 150, device="cpu")
    with torch.compiler.set_stance("force_eager"), torch.no_grad():
        if split[1:]:
            model(ids[:, : split[0]], **pass_cache(cache))
        with pytest.raises(ValueError, match=r"block mask is more than causal|does not agree with the tokens"):
            model(ids[:, -split[-1] :], **pass_cache(cache), attention_mask=mask)
        assert cache.get_seq_length() == 150 - split[-1]


@pytest.mark.parametrize("name", ["mine", "paged|eager", "kernels-community/nothing", "kernels-staging/msa"])
def test_an_attention_that_may_be_another_one_is_refused(name: str) -> None:
    AttentionInterface.register("mine", ALL_ATTENTION_FUNCTIONS["sdpa"])
    AttentionInterface.register("kernels-staging/msa", ALL_ATTENTION_FUNCTIONS["sdpa"])
    try:
        with pytest.raises(
            ValueError, match=f"cannot stand in for the attention implementation '{name}'".replace("|", r"\|")
        ):
            QAdACache(named(name))
    finally:
        for registered in ("mine", "kernels-staging/msa"):
            del AttentionInterface._global_mapping[registered]
