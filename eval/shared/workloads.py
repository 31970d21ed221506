"""The work that every method of a benchmark does: a model, a context in its cache, and tokens to decode."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Cache,
    DynamicCache,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    QuantizedCache,
    StaticCache,
)
from transformers.cache_utils import DynamicLayer
from transformers.utils import is_hqq_available, is_optimum_quanto_available

from eval.shared import language_model
from eval.shared.graphed import GraphedStaticCache
from eval.shared.random_models import GEOMETRIES, LATENT_GEOMETRIES, make_model
from qada_cache import QAdACache, StaticHeads
from qada_cache.attention.latent import LatentLayer
from qada_cache.key_moments.prompts import knows
from qada_cache.models.latent import find_latent_sizes
from qada_cache.tuning.measuring import read_default_text
from qada_cache.versions import pass_cache

FRACTIONS = (0.0, 0.05, 0.1, 0.15, 0.34, 1.0)
FEW_FRACTIONS = (0.0, 0.1, 1.0)  # on an accelerator, where each is timed with the bulk in three places
TOKEN_SHARE = 0.05  # of the bulk's tokens, what every head reads in the row that is named after it
TOKENS = f"QAdACache tokens={TOKEN_SHARE:g}"
RESIDENT_TOKENS = f"QAdACache resident tokens={TOKEN_SHARE:g}"
CUDNN = "DynamicCache, cuDNN attention"
PLACES: dict[str, dict[str, Any]] = {  # of a bulk beside a GPU, by options of QAdACache
    "device, 16 bits": {"offloading": False, "bulk_bits": 16},
    "device, 8 bits": {"offloading": False, "bulk_bits": 8},
    "host, 8 bits": {"bulk_bits": 8},
    "host, 16 bits": {"bulk_bits": 16},
}


@dataclass(frozen=True)
class Work:
    """What every method does.

    Args:
        model: in eval mode.
        states: keys and values `[batch, kv_heads, tokens, dim]` of every layer, or latents and rotary channels.
        inputs: tokens to decode `[batch, steps]`, after the context.
        warm_up: of them, the first ones, which are not timed.
        read: whether the model itself has read the context, so that its heads' own decisions mean something.
        seed: of the heads flagged.
    """

    model: PreTrainedModel
    states: list[tuple[Tensor, Tensor]]
    inputs: Tensor
    warm_up: int
    read: bool
    seed: int

    @property
    def batch(self) -> int:
        """Rows."""
        return self.states[0][0].shape[0]

    @property
    def tokens(self) -> int:
        """Of context, per row."""
        return self.states[0][0].shape[2]


def make_random_work(model: PreTrainedModel, *, tokens: int, batch: int, steps: int, warm_up: int, seed: int) -> Work:
    """Random keys and values, put into the cache without prefill."""
    config = model.config
    generator = torch.Generator(model.device).manual_seed(seed)
    latents = find_latent_sizes(config)
    heads, dims = (config.num_key_value_heads, (config.head_dim,) * 2) if latents is None else (1, tuple(latents))

    def make(dim: int) -> Tensor:
        size = (batch, heads, tokens, dim)
        return torch.randn(size, generator=generator, device=model.device, dtype=model.dtype)

    states = [(make(dims[0]), make(dims[1])) for _ in range(config.num_hidden_layers)]
    inputs = torch.arange(batch)[:, None] + torch.arange(warm_up + steps)
    inputs = inputs.to(model.device) % config.vocab_size
    return Work(model, states, inputs, warm_up, False, seed)


def _compute_states(model: PreTrainedModel, ids: Tensor) -> list[tuple[Tensor, Tensor]]:
    """What the model makes of `ids` `[batch, tokens]`: keys and values of every layer.

    Raises:
        ValueError: it has layers that are not full attention.
    """
    cache = DynamicCache(config=model.config)
    if any(type(layer) is not DynamicLayer for layer in cache.layers):
        raise ValueError("the benchmark fills full-attention layers only, and this model has others")
    model(ids, **pass_cache(cache), logits_to_keep=1)
    return [(layer.keys, layer.values) for layer in cache.layers]


def draw_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, count: int, *, seed: int) -> Tensor:
    """Prose `[count]` on the model's device; random tokens if it does not know its words.

    Raises:
        ValueError: the prose is too short.
    """
    text = read_default_text()
    whole = tokenizer(text, return_tensors="pt", verbose=False).input_ids[0] if tokenizer else None
    if whole is None or tokenizer is None or not knows(tokenizer, text, whole):
        generator = torch.Generator().manual_seed(seed)
        whole = torch.randint(model.config.get_text_config().vocab_size, (count,), generator=generator)
    if len(whole) < count:
        raise ValueError(f"{count} tokens are more than the prose's {len(whole)}")
    return whole[:count].to(model.device)


@torch.inference_mode()
def read_work(
    model: PreTrainedModel,
    *,
    tokens: int,
    batch: int,
    steps: int,
    warm_up: int,
    seed: int,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Work:
    """What `draw_tokens` says, read by the model, each row its own, and how it goes on; ValueError likewise."""
    piece = tokens + warm_up + steps
    ids = draw_tokens(model, tokenizer, batch * piece, seed=seed).view(batch, piece)
    return Work(model, _compute_states(model, ids[:, :tokens]), ids[:, tokens:], warm_up, True, seed)


def load(
    name: str, *, dtype: torch.dtype, device: torch.device, tokens: int, latents: bool = True
) -> tuple[PreTrainedModel, Callable, PreTrainedTokenizerBase | None]:
    """A geometry by its name, with positions for contexts of `tokens`, or a pretrained model (`language_model`); what
    makes its `Work`; its tokenizer, if any.

    Raises:
        OSError, ValueError: as `language_model.read_config`.
    """
    if name in LATENT_GEOMETRIES and not latents:
        raise ValueError(language_model.LATENTS)
    if name in GEOMETRIES or name in LATENT_GEOMETRIES:
        return make_model(name, dtype=dtype, device=device, positions=tokens + 1024), make_random_work, None
    config = language_model.read_config(name, tokens=tokens, latents=latents)
    where = language_model.find_source(name)
    model = AutoModelForCausalLM.from_pretrained(**where, config=config, dtype=dtype).to(device).eval()
    try:
        tokenizer = AutoTokenizer.from_pretrained(**where)
    except (OSError, ValueError):
        return model, read_work, None
    return model, functools.partial(read_work, tokenizer=tokenizer), tokenizer


PRETRAINED = f"{language_model.DEFAULT}, a path or Hub repository, or a GGUF file"
MODEL_HELP = f"sizes by name ({', '.join((*GEOMETRIES, *LATENT_GEOMETRIES))}), {PRETRAINED}"


def fill(cache: Cache, work: Work) -> Cache:
    """Give a cache the context, as a prefill would have."""
    for index, (keys, values) in enumerate(work.states):
        if isinstance(cache, QAdACache):
            layer = cache.layers[index]
            if isinstance(layer, LatentLayer):
                keys, values = torch.cat((keys, values), dim=-1), keys[..., :0]
            layer.lazy_initialization(keys, values)
            layer.store.absorb(keys, values, None)
            layer.seen = work.tokens
        else:
            cache.update(keys, values, index)
    return cache


def flag_heads(work: Work, fraction: float) -> StaticHeads:
    """`fraction` of all KV heads, spread over the layers."""
    layers, kv_heads = len(work.states), work.states[0][0].shape[1]
    count = round(fraction * layers * kv_heads)
    generator = torch.Generator().manual_seed(work.seed)
    table = torch.zeros(layers, kv_heads, dtype=torch.bool)
    order = torch.stack([torch.randperm(kv_heads, generator=generator) for _ in range(layers)])
    for index in range(count):
        layer = index % layers
        table[layer, order[layer, index // layers]] = True
    return StaticHeads(table)


@torch.inference_mode()
def find_token_threshold(work: Work, share: float) -> float:
    """By which every KV head reads about this share of its tokens, on average over a decode step.

    Random keys have no tokens that matter, so that no threshold means anything beside the share it gives.
    """
    if find_latent_sizes(work.model.config) is not None:
        return 0.0  # everything is read
    low, high = math.log(1e-3), math.log(1e3)
    told = {"criterion": flag_heads(work, 1.0), "offloading": False}  # copies of pinned memory would take long
    cache = fill(QAdACache(work.model, token_threshold=1.0, **told), work)
    for _ in range(12):
        middle = (low + high) / 2
        probe = cache.fork(token_threshold=math.exp(middle))
        work.model(input_ids=work.inputs[:, :1], **pass_cache(probe))
        stats = probe.stats()
        low, high = (middle, high) if stats.bulk_read_bytes > share * stats.dense_bulk_bytes else (low, middle)
        del probe
    return math.exp((low + high) / 2)


def find_quantized() -> str | None:
    """The backend of transformers' QuantizedCache that is installed, if any."""
    found = {"quanto": is_optimum_quanto_available(), "hqq": is_hqq_available()}
    return next((backend for backend, installed in found.items() if installed), None)


def list_methods(work: Work, theta: float) -> dict[str, Callable[[], Cache]]:
    """Caches by name, each filled when it is called for; `theta` is what `find_token_threshold` says."""
    model, config = work.model, work.model.config
    room = work.tokens + work.inputs.shape[1] + 8
    accelerated = model.device.type != "cpu"
    ours = functools.partial(QAdACache, model, token_threshold=0.0, cuda_graph=False)  # heads are read whole
    made: dict[str, Callable[[], Cache]] = {
        "DynamicCache": lambda: DynamicCache(config=config),
        "StaticCache": lambda: StaticCache(config=config, max_cache_len=room),
    }
    if find_latent_sizes(config) is not None:  # all of which is read
        return _fill_each(work, made | {"QAdACache": lambda: QAdACache(model)})
    made |= {
        "sinks + window": lambda: ours(criterion="local"),
        "always bulk": lambda: ours(criterion="dense"),
    }
    if model.device.type == "cuda":
        made[CUDNN] = lambda: DynamicCache(config=config)
    if accelerated:
        made["DynamicCache, offloading"] = lambda: DynamicCache(config=config, offloading=True)
    if backend := find_quantized():
        made[f"QuantizedCache, {backend}"] = lambda: QuantizedCache(backend, config)
    for fraction in FEW_FRACTIONS if accelerated else FRACTIONS:
        forced = functools.partial(ours, criterion=flag_heads(work, fraction))
        made[f"QAdACache f={fraction:g}"] = forced
        if accelerated:
            made[f"QAdACache resident f={fraction:g}"] = functools.partial(forced, offloading=False)
            made[f"QAdACache budget f={fraction:g}"] = functools.partial(forced, device_budget=0.15)
    every = functools.partial(QAdACache, model, criterion=flag_heads(work, 1.0), cuda_graph=False)
    made[TOKENS] = functools.partial(every, token_threshold=theta, bulk_bits=16)
    for bits in (8, 4):
        made[f"QAdACache f=1, {bits} bits"] = functools.partial(every, token_threshold=0.0, bulk_bits=bits)
        made[f"{TOKENS}, {bits} bits"] = functools.partial(every, token_threshold=theta, bulk_bits=bits)
    if accelerated:
        resident = functools.partial(every, token_threshold=theta, offloading=False)
        made[RESIDENT_TOKENS] = functools.partial(resident, bulk_bits=16)
        made[f"{RESIDENT_TOKENS}, 8 bits"] = functools.partial(resident, bulk_bits=8)
    if model.device.type == "cuda":
        for name in (f"{TOKENS}, 8 bits", RESIDENT_TOKENS, "QAdACache f=0.1"):
            made[f"{name}, CUDA graph"] = functools.partial(made[name], cuda_graph=True)
        made["StaticCache, CUDA graph"] = lambda: GraphedStaticCache(config=config, max_cache_len=room)
    if work.read:
        made["QAdACache, whole heads"] = ours
        made["QAdACache"] = lambda: QAdACache(model)
    return _fill_each(work, made)


def _fill_each(work: Work, made: dict[str, Callable[[], Cache]]) -> dict[str, Callable[[], Cache]]:
    """These, filled when they are called for, and one that stays empty."""
    filled = {name: lambda make=make: fill(make(), work) for name, make in made.items()}
    return {"no context": lambda: DynamicCache(config=work.model.config), **filled}
