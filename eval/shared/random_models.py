"""Models of known sizes with random weights."""

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

# hidden, MLP, layers, query heads, KV heads, dim of a head, vocabulary
GEOMETRIES = {
    "tiny": (256, 512, 4, 8, 4, 64, 1024),
    "small": (128, 256, 16, 4, 2, 32, 1024),  # of so many layers that what a layer's step costs beside computing shows
    "llama-3.2-1b": (2048, 8192, 16, 32, 8, 64, 128256),
    "llama-3-8b": (4096, 14336, 32, 32, 8, 128, 128256),
    "qwen2-7b": (3584, 18944, 28, 28, 4, 128, 152064),
    "mistral-7b": (4096, 14336, 32, 32, 8, 128, 32000),
}
# hidden, MLP, layers, heads, rank of latents, rotary channels, other channels of keys, of values, vocabulary
LATENT_GEOMETRIES = {
    "tiny-latent": (256, 512, 4, 8, 64, 16, 32, 32, 1024),
    # Of its mixture of experts, 6 of 64 and 2 shared ones of 1,408 channels: as many as a token meets, in one MLP.
    "deepseek-v2-lite": (2048, 8 * 1408, 27, 16, 512, 64, 128, 128, 102400),
}
# Of sliding or linear layers and full ones: the type, and where it differs from that config's defaults.
HYBRIDS = {
    "qwen3.5-0.8b": (
        "qwen3_5_text",
        {
            "hidden_size": 1024,
            "intermediate_size": 3584,
            "num_hidden_layers": 24,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "linear_num_value_heads": 16,
        },
    ),
    "gemma-3-270m": (
        "gemma3_text",
        {
            "hidden_size": 640,
            "intermediate_size": 2048,
            "num_hidden_layers": 18,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "sliding_window": 512,
        },
    ),
}


def make_hybrid_config(name: str) -> PreTrainedConfig:
    """A config of `HYBRIDS`; no token ends a text."""
    kind, sizes = HYBRIDS[name]
    return AutoConfig.for_model(kind, **sizes, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None)


def make_hybrid(name: str, *, seed: int = 0) -> PreTrainedModel:
    """A float32 model of `HYBRIDS` in eval mode, as its class draws weights."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(make_hybrid_config(name), dtype=torch.float32).eval()


def _make_config(name: str, *, dtype: torch.dtype, positions: int) -> LlamaConfig:
    """A Llama's, of the geometry `name`."""
    hidden, mlp, layers, heads, kv_heads, dim, vocabulary = GEOMETRIES[name]
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=dim,
        vocab_size=vocabulary,
        max_position_embeddings=positions,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=vocabulary > 100_000 and hidden < 4096,
        dtype=dtype,
    )


def make_model(
    name: str, *, dtype: torch.dtype, device: torch.device, positions: int, seed: int = 0
) -> PreTrainedModel:
    """A Llama of the geometry `name` in eval mode, or a DeepSeek-V2 if that is one of latents; its scores are peaked
    enough to tell a right attention from a wrong.

    Qwen2's and Mistral's own layers differ from Llama's by biases at most: for timing they are the same.
    """
    make, kind = (
        (_make_latent_config, DeepseekV2ForCausalLM) if name in LATENT_GEOMETRIES else (_make_config, LlamaForCausalLM)
    )
    config = make(name, dtype=dtype, positions=positions)
    with torch.device("meta"):
        model = kind._from_config(config, attn_implementation="sdpa", dtype=dtype)
    model = model.to_empty(device=device).eval()
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name_of, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.fill_(1.0)
            else:
                weight.normal_(
                    0.0, (1.5 if "q_proj" in name_of else 1.0) * weight.shape[-1] ** -0.5, generator=generator
                )
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)  # its buffers are no weights
    return model


def _make_latent_config(name: str, *, dtype: torch.dtype, positions: int) -> DeepseekV2Config:
    """DeepSeek-V2's, of the geometry `name`, without experts."""
    hidden, mlp, layers, heads, rank, rope, nope, value_dim, vocabulary = LATENT_GEOMETRIES[name]
    return DeepseekV2Config(
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        first_k_dense_replace=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        q_lora_rank=None,
        kv_lora_rank=rank,
        qk_rope_head_dim=rope,
        qk_nope_head_dim=nope,
        v_head_dim=value_dim,
        vocab_size=vocabulary,
        max_position_embeddings=positions,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=False,
        dtype=dtype,
    )
