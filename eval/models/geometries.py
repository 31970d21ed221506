"""Models by the sizes of real ones, with random weights: what a benchmark times needs no trained model."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

# hidden, MLP, layers, query heads, KV heads, dim of a head, vocabulary
GEOMETRIES = {
    "tiny": (256, 512, 4, 8, 4, 64, 1024),
    "small": (128, 256, 16, 4, 2, 32, 1024),  # of so many layers that what a layer's step costs beside computing shows
    "llama-3.2-1b": (2048, 8192, 16, 32, 8, 64, 128256),
    "llama-3-8b": (4096, 14336, 32, 32, 8, 128, 128256),
    "qwen2-7b": (3584, 18944, 28, 28, 4, 128, 152064),
    "mistral-7b": (4096, 14336, 32, 32, 8, 128, 32000),
}


def make_model(
    name: str, *, dtype: torch.dtype, device: torch.device, positions: int, seed: int = 0
) -> PreTrainedModel:
    """A Llama of the geometry `name` in eval mode; its scores are peaked enough to tell a right attention from a wrong.

    Qwen2's and Mistral's own layers differ from Llama's by biases at most: for timing they are the same.
    """
    hidden, mlp, layers, heads, kv_heads, dim, vocabulary = GEOMETRIES[name]
    config = LlamaConfig(
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
    with torch.device("meta"):
        model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa", dtype=dtype)
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
