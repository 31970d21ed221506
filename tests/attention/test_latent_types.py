"""Every model type with latent attention in every mode of decoding, at the sizes of `python -m eval.families`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from latents import dynamic
from models import exact, forced, generate, logits_of, prompt
from small_sketch import small_sketch
from torch import Tensor
from transformers import CONFIG_MAPPING, Cache, PreTrainedModel

from eval import families
from qada_cache import PrefixStore, QAdACache
from qada_cache.attention.latent import LatentLayer
from qada_cache.models import latent

TYPES = {
    "axk1": "AXK1", "bailing_hybrid": "BailingHybrid", "deepseek_v2": "DeepseekV2", "deepseek_v3": "DeepseekV3",
    "glm4_moe_lite": "Glm4MoeLite", "kimi_linear": "KimiLinear", "longcat_flash": "LongcatFlash",
    "minicpm3": "MiniCPM3", "mistral4": "Mistral4", "sarvam_mla": "DeepseekV3", "youtu": "Youtu",
    # An indexer picks 16 tokens.
    "axk2": "AXK2", "deepseek_v32": "DeepseekV32", "dots3_note_text": "Dots3Note", "glm_moe_dsa": "GlmMoeDsa",
    "hy_v4": "HYV4", "glm5_next": "Glm5Next", "hy_v4_vl": "HYV4VL", "mistral_large4": "MistralLarge4",
}  # fmt: skip
MODES: dict[str, dict[str, Any]] = {
    "padded": {},
    "beams": {"num_beams": 3},
    "chunks": {"prefill_chunk_size": 17},
    "lookup": {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 1},
}
pytestmark = pytest.mark.slow


@pytest.fixture(params=TYPES)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    classes = (f"{TYPES[request.param]}For{what}" for what in ("CausalLM", "ConditionalGeneration"))
    kind = next((getattr(transformers, name) for name in classes if hasattr(transformers, name)), None)
    if kind is None or request.param not in CONFIG_MAPPING:
        pytest.skip("this transformers does not have it")
    config = families.make_tiny_config(CONFIG_MAPPING[request.param])
    torch.manual_seed(0)
    name = "sdpa" if kind._supports_sdpa else "eager"
    made = kind._from_config(config, attn_implementation=name).eval()
    for weight in made.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=1.5 * weight.shape[-1] ** -0.5)
    return made


@pytest.mark.parametrize("mode", MODES)
def test_modes(model: PreTrainedModel, mode: str) -> None:
    ids, mask = prompt(60) if mode == "lookup" else prompt(60, 41)
    options = {"attention_mask": mask, "tokens": 12, "eos_token_id": None, **MODES[mode]}
    try:
        wanted = generate(model, ids, dynamic(model), **options)
    except (RuntimeError, TypeError, ValueError) as error:
        pytest.skip(f"this transformers cannot do it with DynamicCache: {error}")
    cache = exact(model)
    got = generate(model, ids, cache, **options)
    assert sum(isinstance(layer, LatentLayer) for layer in cache.layers) > 0
    assert torch.equal(got.sequences, wanted.sequences)
    scale = logits_of(wanted).abs().max()
    assert (logits_of(got) - logits_of(wanted)).abs().max() <= 1e-4 * scale
    assert cache.stats().streamed_bytes + cache.stats().bulk_read_bytes > 0


def test_heads_that_select_all(model: PreTrainedModel) -> None:
    """Heads that decide by moments of latents and select all tokens read the whole bulk, and answer as DynamicCache."""
    if latent.has_indexers(model.config.get_text_config()):
        pytest.skip("its own indexer selects")
    ids, split = prompt(200)[0], [190, 1, 5, 1]
    wanted = forced(model, ids, split, dynamic(model))
    options = {"criterion": "gaussian", "threshold": 1 - 1e-9, "local_tokens": 20, "sink_tokens": 4}
    with small_sketch(40, 64):
        cache = QAdACache(model, **options, token_threshold=1e-30)
        got = forced(model, ids, split, cache)
    assert (got - wanted).abs().max() <= 1e-4 * wanted.abs().max()
    stats = cache.stats()
    assert stats.bulk_read_bytes == stats.dense_bulk_bytes
    assert stats.sketch_read_bytes > 0


def test_a_stored_text(model: PreTrainedModel, tmp_path: Path) -> None:
    assert PrefixStore(tmp_path).count(model, range(5, 90), **families.EXACT) == 0  # and refuses none of these tokens
    assert families.measure_stored(model) <= families.STORED_ROUNDING


def test_a_text_with_padding_is_not_kept(model: PreTrainedModel, tmp_path: Path) -> None:
    """Indexers count it as tokens, and each says in its own way which it is."""
    ids, mask = prompt(60)[0], torch.ones(1, 60, dtype=torch.long)
    mask[:, :10] = 0
    cache = exact(model)
    forced(model, ids, [60], cache, mask)
    with pytest.raises(NotImplementedError, match="PrefixStore keeps no"):
        PrefixStore(tmp_path).keep(cache, ids)


def test_a_text_goes_on_after_a_crop(model: PreTrainedModel) -> None:
    ids = prompt(120)[0]

    def read(cache: Cache) -> Tensor:
        forced(model, ids, [80, 1, 39], cache)
        cache.crop(-70)
        return forced(model, ids[:, 50:], [30, 1], cache)

    if "linear_attention" in (getattr(model.config.get_text_config(), "layer_types", None) or ()):
        pytest.skip("its linear layers cannot be cropped")
    wanted = read(dynamic(model))
    assert (read(exact(model)) - wanted).abs().max() <= 1e-4 * wanted.abs().max()
