"""Which of transformers' causal language models a cache serves, and what it says to the others.

    python -m eval.families --out eval/results/families.csv

Every model type is built with few and small layers and random weights, each in a process of its own. At `threshold=1`
its logits have to be those of `DynamicCache`, over a prompt, a second turn and single tokens. After `generate` the
cache has to hold the text, or something was said. Where other layers keep states, a prompt whose beginning comes from a
`PrefixStore` has to be answered as one that is read whole.
"""

import logging
import multiprocessing
import re
import sys
import tempfile
import warnings
from contextlib import suppress
from itertools import accumulate
from multiprocessing.connection import Connection
from typing import Any

import torch
import transformers
from tqdm import tqdm
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from eval.shared.tables import align, make_parser, table_of, to_amount, write
from qada_cache import PrefixStore, QAdACache
from qada_cache.state.layer import QAdALayer
from qada_cache.versions import pass_cache

# Some of text alone have their place among models that read images. Others read images, and have no class for text.
_READ_IMAGES = ("glm5_next", "hy_v4_vl", "mistral_large4")
_BESIDE = {
    name: kind
    for name, kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.items()
    if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and (kind.endswith("ForCausalLM") or name in _READ_IMAGES)
}
TYPES = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *_BESIDE}
LAYERS, HEADS, DIM = 6, 4, 16  # most kinds of layers that a model has are among its first six
LONGEST_SHORT = 100  # tokens that a model with a second set of rotary frequencies reads by the first

# Sizes by the names that configs have for them. A name that a config does not have is not given to it.
_SIZES: dict[int, tuple[str, ...]] = {
    0: ("pad_token_id", "bos_token_id"),
    1: ("eos_token_id", "first_k_dense_replace", "n_group", "topk_group", "num_expert_group", "limited_topk_group"),
    2: ("num_key_value_heads", "num_kv_heads", "num_query_groups", "num_experts_per_tok", "num_experts_per_token",
        "mamba_n_groups", "n_groups", "num_kv_shared_layers", "moe_k"),
    HEADS: ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "decoder_attention_heads",
            "encoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads",
            "linear_num_key_heads", "linear_num_value_heads", "linear_num_heads", "swa_num_attention_heads",
            "swa_num_key_value_heads", "num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"),
    LAYERS: ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers",
             "encoder_layers", "num_encoder_layers"),
    8: ("mamba_n_heads", "mamba_num_heads", "rotary_dim"),
    DIM: ("head_dim", "d_head", "dim_head", "kv_channels", "qk_nope_head_dim", "qk_rope_head_dim",
          "v_head_dim", "kv_lora_rank",
          "q_lora_rank", "linear_key_head_dim", "linear_value_head_dim", "linear_head_dim", "swa_head_dim",
          "mamba_d_head", "mamba_head_dim", "index_head_dim", "index_topk", "mamba_d_state", "ssm_state_size",
          "hidden_size_per_layer_input", "chunk_size", "mamba_chunk_size", "attention_head_size"),
    2 * DIM: ("qk_head_dim",),
    HEADS * DIM: ("hidden_size", "d_model", "n_embd", "embedding_size", "emb_dim", "word_embed_proj_dim",
                  "intermediate_size", "ffn_dim", "n_inner", "d_inner", "decoder_ffn_dim", "encoder_ffn_dim",
                  "ffn_hidden_size", "dim_ff", "dff", "lru_width", "moe_intermediate_size", "mamba_d_ssm",
                  "shared_expert_intermediate_size", "shared_intermediate_size", "expert_ffn_hidden_size",
                  "dense_intermediate_size", "intermediate_size_mlp", "attention_hidden_size", "sliding_window",
                  # By few heads of an indexer many tokens score 0, and which of them it picks depends on their number.
                  "index_n_heads"),
    96: ("vocab_size", "vocab_size_per_layer_input", "decoder_vocab_size", "unpadded_vocab_size"),
    LONGEST_SHORT: ("original_max_position_embeddings",),
    1024: ("max_position_embeddings", "n_positions", "max_target_positions", "n_ctx", "max_seq_len"),
}  # fmt: skip
_OPTIONAL = ("num_kv_shared_layers", "hidden_size_per_layer_input", "bos_token_id", "eos_token_id")  # 0 stays 0
_UNSET = ("num_key_value_heads", "head_dim", "pad_token_id", "bos_token_id", "eos_token_id")  # None in some classes

_LONG_ROPE: dict[str, Any] = {  # frequencies that change where a text passes `LONGEST_SHORT`
    **{"rope_type": "longrope", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": LONGEST_SHORT},
    **{"short_factor": [1.0] * (DIM // 2), "long_factor": [4.0] * (DIM // 2)},
}
_MROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}

# What a type needs beside them, or instead.
_OWN: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [3]},
    "cohere_compass_text": {"rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), _MROPE)},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note_audio_encoder": {"adapter_input_size": HEADS * DIM, "adapter_out_dim": HEADS * DIM},
    "dots3_note_vision_encoder": {
        "adapter_in_dim": HEADS * DIM,
        "adapter_out_dim": HEADS * DIM,
        "mlp_layer_types": ["dense"] * LAYERS,
    },
    "dory": {"n_input_layers": 2, "n_output_layers": 2},
    "falcon_h1": {"mamba_d_ssm": 128},
    "gemma3n_text": {"layer_types": ["sliding_attention", "full_attention"] * 3},
    "gemma4_text": {"global_head_dim": 2 * DIM},  # wider in layers of full attention, as in the models that there are
    "glm5_next_text": {"qk_rope_head_dim": 0, "index_kpool": 4},
    "gpt_bigcode": {"num_key_value_heads": 1},  # which its layers have whatever is said here
    "gpt_neo": {"attention_types": [[["global", "local"], 3]]},
    "granitemoehybrid": {"layer_types": ["mamba", "mamba", "attention"] * 2},
    "hy_v4_vl_text": {"rope_parameters": _MROPE},
    "inkling2_loop_text": {"n_layers_per_attn_res_block": 2, "loop_layer_index_start": 2, "loop_layer_index_end": 4},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8},
    "mistral4": {"head_dim": 2 * DIM},  # of which half the channels turn
    "mistral_large4": {"image_token_index": 2},  # which no text here has
    # A window longer than their positions, as in the models that there are.
    **{kind: {"rope_parameters": _LONG_ROPE, "sliding_window": 2048} for kind in ("phi3", "phi4_multimodal")},
    "phimoe": {"rope_parameters": {**_LONG_ROPE, "short_mscale": 1.1, "long_mscale": 1.3}, "sliding_window": 2048},
    "reformer": {"axial_pos_embds": False},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"tie_word_embeddings": False, "attention_head_dim": 2 * DIM, "attention_hidden_size": 2 * HEADS * DIM},
    "zamba2": {
        **{"layers_block_type": ["mamba", "mamba", "hybrid"] * 2, "hybrid_layer_ids": [2, 5]},
        **{"mamba_headdim": 16, "attention_hidden_size": 128},
    },
    "zaya": {"num_experts_per_tok": 1},
}
CALLS = (150, 9, 40, 1, 1, 1)  # tokens: a prompt, a short and a long second turn, and single ones
EXACT: dict[str, Any] = {"threshold": 1.0, "sink_tokens": 4, "local_tokens": 20, "moments": "current"}
ROUNDING = 1e-4  # of the largest logit: float32's, many times over
STORED_ROUNDING = 1e-3  # likewise, where layers go on from states that they read in another order
LONGEST = 400  # characters of a message
STORED = (150, 40)  # tokens that a store has, and more that it does not have
TEXTS = (LONGEST_SHORT - 2, LONGEST_SHORT + 20)  # prompts of `generate`, in tokens
VERDICTS = ("served", "nothing to do", "refused", "differs", "dropped", "not run")


def make_tiny_config(kind: type[PreTrainedConfig]) -> PreTrainedConfig:
    """A config of this class with small sizes, as a decoder's; its parts likewise."""
    return kind(**_choose_settings(kind))


def _choose_settings(kind: type[PreTrainedConfig]) -> dict[str, Any]:
    default = kind()
    set_ = vars(default)
    found: dict[str, Any] = {}
    for size, names in _SIZES.items():
        for name in names:
            given = isinstance(set_.get(name), int) and (set_[name] != 0 or name not in _OPTIONAL)
            if given or (name in _UNSET and name in set_):
                found[name] = size
    if getattr(default, "is_decoder", None) is False and not default.sub_configs:
        found["is_decoder"] = True  # of models that are encoders as well
    if "kv_lora_rank" in found and "num_key_value_heads" in found:  # latent attention has keys for every head
        found["num_key_value_heads"] = HEADS
    for name, part in default.sub_configs.items():
        if getattr(default, name, None) is not None and isinstance(part, type):
            part = type(getattr(default, name))
            found[name] = _choose_settings(part)
    return found | _OWN.get(kind.model_type, {})


def compute_logits(model: PreTrainedModel, cache: DynamicCache) -> torch.Tensor:
    """`[1, tokens, vocabulary]` of random tokens, in `CALLS`."""
    ids = torch.randint(5, 90, (1, sum(CALLS)), generator=torch.Generator().manual_seed(0))
    calls = (model(input_ids=part, **pass_cache(cache), use_cache=True) for part in ids.split(CALLS, dim=1))
    return torch.cat([called.logits for called in calls], dim=1)


def build(model_type: str) -> tuple[PreTrainedModel, torch.Tensor]:
    """A tiny model, with weights large enough for attention to be peaked, and its logits through `DynamicCache`."""
    config: PreTrainedConfig = make_tiny_config(CONFIG_MAPPING[model_type])
    torch.manual_seed(0)
    beside = getattr(transformers, _BESIDE[model_type]) if model_type in _BESIDE else None
    model = (AutoModelForCausalLM.from_config(config) if beside is None else beside._from_config(config)).eval()
    for weight in model.parameters():
        if weight.dim() > 1 and weight.is_floating_point():
            torch.nn.init.normal_(weight, std=1.5 * weight.shape[-1] ** -0.5)
    wanted = compute_logits(model, DynamicCache(config=model.config))
    if not wanted.isfinite().all():
        raise ValueError("its own logits are not finite")
    return model, wanted


def listen() -> list[str]:
    """What the package logs from now on."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]  # a stand-in
    logging.getLogger("qada_cache").addHandler(handler)
    return said


@torch.no_grad()
def judge(model_type: str) -> dict[str, Any]:
    """The row of a model type."""
    row: dict[str, Any] = {"model_type": model_type, "verdict": "not run", "layers": "", "words": ""}
    try:
        model, wanted = build(model_type)
    except Exception as error:  # whatever a model raises that is not ours to judge: that is the finding
        return row | {"words": describe(error)}
    said = listen()
    try:
        cache = QAdACache(model, **EXACT)
        ours = sum(isinstance(layer, QAdALayer) for layer in cache.layers)
        row["layers"] = f"{ours} of {len(cache.layers)}"
        error = float((compute_logits(model, cache) - wanted).abs().max() / wanted.abs().max())
    except Exception as error:  # whatever a cache, or the model with it, raises: that is the finding
        return row | {"verdict": "refused", "words": describe(error)}
    if error > ROUNDING:
        return row | {"verdict": "differs", "words": f"by {error:.1e} of the largest logit"}
    if 0 < ours < len(cache.layers) and (error := measure_stored(model)) > STORED_ROUNDING:
        return row | {"verdict": "differs", "words": f"from a store, by {error:.1e} of the largest logit"}
    if not said and (tokens := find_dropped(model)):
        return row | {"verdict": "dropped", "words": f"without a word, by generate of {tokens} tokens"}
    return row | {"verdict": "served" if ours else "nothing to do", "words": "; ".join(said)}


def measure_stored(model: PreTrainedModel) -> float:
    """How far the next token's logits are, as a share of the largest, from those of a prompt that is read whole, if a
    store has its beginning; 0 if stores refuse the model."""
    ids = torch.randint(5, 90, (1, sum(STORED)), generator=torch.Generator().manual_seed(2))
    told: dict[str, Any] = {"max_new_tokens": 1, "output_logits": True, "return_dict_in_generate": True}
    with tempfile.TemporaryDirectory() as folder:
        for tokens in accumulate(STORED):
            store, text = PrefixStore(folder, snapshot_tokens=64), ids[:, :tokens]
            try:
                cache = store.cache(model, text, **EXACT)
            except NotImplementedError:
                return 0.0
            asked = told | {"attention_mask": torch.ones_like(text)}
            got = model.generate(text, **pass_cache(cache), **asked).logits[0]
            store.keep(cache, text)
    wanted = model.generate(text, **pass_cache(DynamicCache(config=model.config)), **asked).logits[0]
    return float((got - wanted).abs().max() / wanted.abs().max())


def find_dropped(model: PreTrainedModel) -> int:
    """The first of `TEXTS`, in tokens, after which a cache that `generate` was given does not hold the text, though
    nothing was raised or logged; 0: none."""
    said = listen()
    for tokens in TEXTS:
        cache = QAdACache(model, **EXACT)
        ids = torch.randint(5, 90, (1, tokens), generator=torch.Generator().manual_seed(1))
        asked = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
        with suppress(Exception):  # of the model, or ours: then it is told
            out = model.generate(ids, **pass_cache(cache), **asked)
            if cache.get_seq_length() != out.shape[1] - 1 and not said:
                return tokens
    return 0


def describe(error: Exception) -> str:
    """Its kind, and how what it says begins."""
    said = re.sub(r"\s+", " ", str(error)).strip()
    return f"{type(error).__name__}: {said if len(said) <= LONGEST else said[:LONGEST] + '...'}"


def _work(model_type: str, end: Connection) -> None:
    end.send(judge(model_type))


def judge_within(seconds: float, model_type: str) -> dict[str, Any]:
    """Its verdict, from a process that may crash, or take no longer than that."""
    here, there = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_work, args=(model_type, there))
    process.start()
    there.close()
    found = {"model_type": model_type, "verdict": "not run", "layers": "", "words": f"not done in {seconds:.0f} s"}
    try:
        if here.poll(seconds):
            found = here.recv()
    except EOFError:
        process.join()
        found["words"] = f"its process ended with {process.exitcode}"
    process.kill()
    process.join()
    return found


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = make_parser("families", __doc__)
    add = parser.add_argument
    add("--types", nargs="+", metavar="TYPE", default=sorted(TYPES), help="model types (default: all)")
    add("--seconds", type=to_amount, default=60, help="that a model type may take (default: %(default)s)")
    add("--out", type=table_of("model_type", "verdict"), help="the CSV file to write")
    options = parser.parse_args(arguments)
    if unknown := set(options.types) - set(TYPES):
        parser.error(f"--types: transformers has no causal language model {', '.join(sorted(unknown))}")
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    rows = [
        judge_within(options.seconds, model_type) for model_type in tqdm(options.types, disable=not sys.stderr.isatty())
    ]
    print(align([{name: row[name] for name in ("model_type", "verdict", "layers", "words")} for row in rows]))
    print(*(f"{sum(row['verdict'] == kind for row in rows)} {kind}" for kind in VERDICTS), sep=", ")
    if options.out:
        write(options.out, rows, transformers=transformers.__version__)


if __name__ == "__main__":
    main()
