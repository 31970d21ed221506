"""Tiny random models by family, and the two ways the tests run them: `generate()`, and forced tokens.

They have no end-of-sequence token, so that they do not stop. Their weights are large (`initializer_range`), so that
attention is peaked and the best token's logit exceeds the second's by far more than rounding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from qada_cache import QAdACache
from qada_cache.versions import pass_cache

VOCABULARY = 97
SMALL = {"sink_tokens": 4, "local_tokens": 20}  # options of caches in which a short prompt has a bulk

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.35,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_HYBRID = {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "head_dim": 8,
    "mlp_only_layers": [0, 1],  # no mixture of experts: torch has none in float64
}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 2,
}
_SHARED = {
    **_HYBRID,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 4,
    "head_dim": 8,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
}
_GEMMA3N = {
    **_SHARED,
    "intermediate_size": [48] * 6,
    "activation_sparsity_pattern": [0.0] * 6,
    "laurel_rank": 4,
    "altup_num_inputs": 2,
}

# By family: the prefix of transformers' classes, and config entries beside or instead of those of _COMMON.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral_sliding": ("Mistral", {"sliding_window": 12}),
    "phi3": ("Phi3", {}),
    "gemma3": ("Gemma3", {"head_dim": 8, **_HYBRID}),
    "olmo2": ("Olmo2", {}),
    "glm4": ("Glm4", {"head_dim": 8}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0]}),
    "granite": ("Granite", {"attention_multiplier": 0.35}),
    "qwen3_next": ("Qwen3Next", _LINEAR),
    "afmoe": ("Afmoe", {"head_dim": 8, "num_dense_layers": 2, "global_attn_every_n_layers": 2, **_HYBRID}),
    "gpt_oss": (
        "GptOss",
        {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1, "initializer_range": 0.2, **_HYBRID},
    ),
    "gemma2": (
        "Gemma2",
        {"head_dim": 8, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 2, "initializer_range": 0.1, **_HYBRID},
    ),
    "diffllama": ("DiffLlama", {}),  # its modules attend twice
    "deepseek_v2": ("DeepseekV2", {**_LATENT, "q_lora_rank": None}),
    "deepseek_v3": ("DeepseekV3", _LATENT),
    "gemma3n": ("Gemma3n", _GEMMA3N),
    # Its layers of full attention have wider heads, and most layers read another layer's keys.
    "gemma4": ("Gemma4", {**_SHARED, "global_head_dim": 16, "use_double_wide_mlp": True, "initializer_range": 0.2}),
    # The rest is not supported, each for a reason of its own.
    "jetmoe": ("JetMoe", {"kv_channels": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "gptj": ("GPTJ", {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_inner": 48, "rotary_dim": 4, "n_positions": 1024}),
}


LATENT = ("deepseek_v2", "deepseek_v3")  # latent attention: by default all tokens are read exactly
EAGER = ("gemma2", "gpt_oss", "gptj")  # transformers has eager attention alone for them


def tiny(
    family: str = "llama",
    *,
    seed: int = 0,
    attention: str | None = None,
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> PreTrainedModel:
    """A seeded random model of `family` in eval mode. `changes` go to its config. Attention is sdpa by default, and
    eager for `EAGER`."""
    prefix, needs = FAMILIES[family]
    suffix = "TextConfig" if family in ("gemma3", "gemma3n", "gemma4") else "Config"
    common = {} if family == "gptj" else _COMMON
    if family == "gptj":  # its config has names of its own, and aliases that refuse to be set
        common = {name: _COMMON[name] for name in ("vocab_size", "initializer_range", "tie_word_embeddings")}
        common |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    config = getattr(transformers, prefix + suffix)(**{**common, **needs, **changes})
    torch.manual_seed(seed)
    attention = attention or ("eager" if family in EAGER else "sdpa")
    model = getattr(transformers, prefix + "ForCausalLM")._from_config(config, attn_implementation=attention)
    return model.eval().to(dtype)


def uneven(kv_heads: dict[int, int]) -> PreTrainedModel:
    """A seeded Llama whose layers differ in their KV heads: `kv_heads` has the number of each layer."""
    sizes = {index: {"num_key_value_heads": count} for index, count in kv_heads.items()}
    model = tiny(num_hidden_layers=len(sizes), per_layer_config=sizes, allow_global_per_layer_attribute_access=True)
    for index, count in kv_heads.items():  # transformers' Llama does not read `per_layer_config` itself
        module = model.model.layers[index].self_attn
        module.num_key_value_groups = 4 // count
        for name in ("k_proj", "v_proj"):
            setattr(module, name, torch.nn.Linear(32, 8 * count, bias=False))
            torch.nn.init.normal_(getattr(module, name).weight, std=0.35)
    return model


def prompt(*lengths: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Random token ids int64 `[rows, max(lengths)]`, padded on the left with 0, and their attention mask of 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, -length:] = torch.randint(1, VOCABULARY, (length,), generator=generator)
        mask[row, -length:] = 1
    return ids, mask


def exact(model: PreTrainedModel, **options: Any) -> QAdACache:
    """A cache at threshold 1: every head reads everything, so it must be indistinguishable from DynamicCache."""
    return QAdACache(model, **{"threshold": 1.0, **SMALL, **options})


def dynamic(model: PreTrainedModel) -> DynamicCache:
    """An empty `DynamicCache` for the model, which other caches are compared with."""
    return DynamicCache(config=model.config)


def generate(model: PreTrainedModel, ids: Tensor, cache: Cache | None, *, tokens: int = 24, **options: Any) -> Any:
    """Generate `tokens` tokens behind `ids`; return `generate()`'s output object, with raw logits. Decoding is greedy
    unless `options` differ, and always seeded."""
    torch.manual_seed(5)
    ids = ids.to(model.device)
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0, **options}
    return model.generate(
        ids,
        **pass_cache(cache),
        max_new_tokens=tokens,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )


def logits_of(output: Any) -> Tensor:
    """The logits `[rows, generated tokens, vocabulary]` of an output of `generate`."""
    return torch.stack(output.logits, dim=1)


@torch.no_grad()
def forced(
    model: PreTrainedModel, ids: Tensor, split: list[int], cache: Cache | None, mask: Tensor | None = None
) -> Tensor:
    """Give `ids` to the model in calls of `split` tokens, the last of which repeats. Returns logits `[rows, tokens,
    vocabulary]`.

    Forced tokens keep two runs comparable: generated ones could differ by rounding, and then all that follows.
    """
    logits, start = [], 0
    split = list(split)
    while start < ids.shape[1]:
        stop = min(start + (split.pop(0) if len(split) > 1 else split[0]), ids.shape[1])
        given = None if mask is None else mask[:, :stop]
        logits.append(model(ids[:, start:stop], attention_mask=given, **pass_cache(cache), use_cache=True).logits)
        start = stop
    return torch.cat(logits, dim=1)


def rounding(model: PreTrainedModel, ids: Tensor) -> float:
    """The largest error of the model's logits of `ids`, compared with the same model in float64, without any cache.

    Sums in two orders differ by about this much, though both are correct. Tests allow a few times as much.
    """
    twin = tiny_like(model, torch.float64)
    with torch.no_grad():
        wanted, got = (m(ids, use_cache=False).logits.double() for m in (twin, model))
    return (wanted - got).abs().max().item()


def tiny_like(model: PreTrainedModel, dtype: torch.dtype, attention: str | None = None) -> PreTrainedModel:
    """A model with the same weights in another dtype, whose attention implementation no cache has switched."""
    config = type(model.config)(**{k: v for k, v in model.config.to_dict().items() if k not in ("dtype", "model_type")})
    capped = getattr(config, "attn_logit_softcapping", None)  # "sdpa" ignores it, or does not take it
    attention = attention or ("sdpa" if model._supports_sdpa and not capped else "eager")
    # Torch's batched kernels for experts have no float64.
    twin = type(model)._from_config(config, attn_implementation=attention, experts_implementation="eager").eval()
    twin.load_state_dict(model.state_dict())
    return twin.to(dtype)


def assert_same(model: PreTrainedModel, got: Any, wanted: Any) -> None:
    """Assert that two outputs of `generate` have the same tokens, and logits that differ by at most four times the
    model's own rounding."""
    assert torch.equal(got.sequences, wanted.sequences)
    budget = 4 * rounding(model, prompt(200)[0])
    assert budget < 1e-3  # a larger one would let mistakes pass: logits have a standard deviation of 2
    assert (logits_of(got) - logits_of(wanted)).abs().max() <= budget


@contextlib.contextmanager
def limited_file_size(size: int) -> Iterator[None]:
    """Inside, no file of this process can grow beyond `size` bytes: writing more fails, as on a full disk."""
    import resource  # Windows does not have it

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
