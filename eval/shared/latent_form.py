"""A Llama or Qwen2 written as a model of latent attention (DeepSeek-V3's), with the same logits up to rounding.

No pretrained model of latent attention is small. This one has a pretrained one's attention, to judge by; its latents
have none of the structure that training for latents would give.

The latent is all KV heads' values side by side, and the rotary key all of their keys. A query is zero outside its own
KV head's channels. One large constant channel makes the norm of latents a constant, which the norm's weight undoes.
"""

import torch
from torch import Tensor, nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, PreTrainedModel

TYPES = ("llama", "qwen2")
CONSTANT = 65536.0  # values with a norm of 100 then change that of the latent by a millionth; bfloat16 has it exactly
PADDING = 8  # channels of a latent beside the values, the constant's among them
NOPE = 8  # channels of keys that do not turn, all zeros


@torch.no_grad()
def make_latent(model: PreTrainedModel) -> DeepseekV3ForCausalLM:
    """The model as one of latent attention, in eval mode, dtype and on the CPU as it was.

    Raises:
        ValueError: it is of another kind, or its rotary frequencies are not the same for all texts.
    """
    config, rotary = model.config, getattr(model.base_model, "rotary_emb", None)
    if config.model_type not in TYPES or "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        raise ValueError(f"{config.model_type} is not written as latent attention, only {' and '.join(TYPES)} are")
    if rotary.rope_type in ("dynamic", "longrope") or rotary.attention_scaling != 1:
        raise ValueError(f"rotary embeddings of type {rotary.rope_type} are not written as latent attention")
    first = model.base_model.layers[0].self_attn
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, first.head_dim
    biased = first.q_proj.bias is not None
    wavelengths = (1 / rotary.inv_freq.double()).repeat(kv_heads).tolist()
    made = DeepseekV3ForCausalLM(
        DeepseekV3Config(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_hidden_layers,
            first_k_dense_replace=config.num_hidden_layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            q_lora_rank=heads * dim + PADDING if biased else None,
            kv_lora_rank=kv_heads * dim + PADDING,
            qk_rope_head_dim=kv_heads * dim,
            qk_nope_head_dim=NOPE,
            v_head_dim=dim,
            hidden_act=config.hidden_act,
            vocab_size=config.vocab_size,
            max_position_embeddings=config.max_position_embeddings,
            rms_norm_eps=config.rms_norm_eps,
            tie_word_embeddings=config.tie_word_embeddings,
            attention_bias=True,
            rope_interleave=False,
            rope_parameters={  # the only ones of which every frequency can be named
                "rope_type": "longrope",
                "rope_theta": 1.0,
                "factor": 1.0,
                "attention_factor": 1.0,
                "original_max_position_embeddings": config.max_position_embeddings,
                "short_factor": wavelengths,
                "long_factor": wavelengths,
            },
            bos_token_id=config.bos_token_id,
            eos_token_id=config.eos_token_id,
            pad_token_id=config.pad_token_id,
        )
    ).to(model.dtype)
    kept = made.state_dict() | {name: part for name, part in model.state_dict().items() if ".self_attn." not in name}
    made.load_state_dict(kept)
    made.tie_weights()
    made.generation_config = model.generation_config
    for old, new in zip(model.base_model.layers, made.model.layers, strict=True):
        _rewrite(old.self_attn, new.self_attn, heads, kv_heads, dim)
    return made.eval()


def _rewrite(old: nn.Module, new: nn.Module, heads: int, kv_heads: int, dim: int) -> None:
    """Write the attention `new` as `old` is."""
    halves = torch.arange(kv_heads * dim).view(kv_heads, 2, -1)
    turned = halves.transpose(0, 1).flatten()  # of each rotary channel, the channel of keys: `rotate_half` pairs halves
    own = torch.arange(kv_heads * dim).view(kv_heads, dim).repeat_interleave(heads // kv_heads, dim=0)
    width = NOPE + kv_heads * dim
    # [heads, channels of a new query, channels of an old one]; the scaling of scores is by the former.
    queries = nn.functional.one_hot(turned.argsort()[own], kv_heads * dim).mT.float() * old.scaling / new.scaling
    queries = nn.functional.pad(queries, (0, 0, NOPE, 0))
    queries = torch.block_diag(*queries).view(heads * width, heads * dim)
    values = nn.functional.one_hot(own, kv_heads * dim).float()  # [heads, dim, values]
    keys_bias, values_bias = old.k_proj.bias, old.v_proj.bias
    channels = kv_heads * dim
    _fill_with_constant(new.kv_a_proj_with_mqa, new.kv_a_layernorm, old.v_proj.weight, values_bias)
    new.kv_a_proj_with_mqa.weight[channels + PADDING :] = old.k_proj.weight[turned]
    if keys_bias is not None:
        new.kv_a_proj_with_mqa.bias[channels + PADDING :] = keys_bias[turned]
    new.kv_b_proj.weight.copy_(nn.functional.pad(values, (0, PADDING, NOPE, 0)).flatten(0, 1))
    if old.q_proj.bias is None:
        new.q_proj.weight.copy_(queries @ old.q_proj.weight.float())
    else:
        _fill_with_constant(new.q_a_proj, new.q_a_layernorm, old.q_proj.weight, old.q_proj.bias)
        new.q_b_proj.weight.copy_(nn.functional.pad(queries, (0, PADDING)))
    new.o_proj.weight.copy_(old.o_proj.weight)
    new.o_proj.bias.zero_()
    if old.o_proj.bias is not None:
        new.o_proj.bias.copy_(old.o_proj.bias)


def _fill_with_constant(projection: nn.Linear, norm: nn.Module, weight: Tensor, bias: Tensor | None) -> None:
    """Have the first rows of a projection make these numbers, and the norm leave them as they are: the constant beside
    them, of which nothing is left, outweighs them in it."""
    count, rank = len(weight), norm.weight.shape[0]
    projection.weight.zero_()
    projection.weight[:count] = weight
    projection.bias.zero_()
    if bias is not None:
        projection.bias[:count] = bias
    projection.bias[count] = CONSTANT
    norm.weight.zero_()
    norm.weight[:count] = CONSTANT * rank**-0.5
