"""Which models a QAdACache can serve, and whether tables of heads and moments are of that model."""

import json
import logging
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import LinearAttentionAndFullAttentionLayer

from ..criterion import StaticHeads
from ..kernels import cpu
from ..kernels.cpu import latent
from ..kernels.cpu.building import has_compiler
from ..key_moments import KeyMoments
from ..key_moments.defaults import combine_sources, resolve_moments, split_sources
from ..key_moments.rotation import read_rope_settings
from ..models import attends_twice, check_loaded, find_long_window, list_sizes, read_sizes
from ..models.latent import INDEXED, find_latent_sizes
from ..models.sharding import check_whole_config, find_shard
from ..models.shared_keys import find_readers
from ..names import PROMPTS
from ..said_once import warn_once
from ..sketch.coded import RecordLayout
from ..state import DEFAULT_BITS, ManagedModel, Options, Shared
from ..state.layer import QAdALayer
from ..versions import find_missing
from .differential import DifferentialLayer
from .indexed import IndexedLayer
from .latent import LatentLayer, resolve_latent_options

logger = logging.getLogger(__name__)

OWN_CACHES = "minimax", "xlstm"  # types of models that refuse or ignore any other cache than their own
LOOPED = "dory", "inkling2_loop_text"  # some layers run several times: each further run's keys get a layer of their own
NEWEST = (5, 24)  # the newest transformers that the tests run on: private names may change in later ones


def find_text_config(model: PreTrainedModel | None, config: PreTrainedConfig | None) -> PreTrainedConfig:
    """The config of the decoder that a cache is for, from exactly one of its model and that model's config;
    NotImplementedError, if there is an encoder beside it."""
    if model is not None and not isinstance(model, PreTrainedModel):
        hint = "or config=model.config"
        if isinstance(model, PreTrainedConfig):
            hint = "first, and a config by its name: QAdACache(model), or QAdACache(config=model.config)"
        raise TypeError(f"QAdACache takes a transformers model {hint}, got {type(model).__name__}")
    if (model is None) == (config is None):
        raise TypeError("QAdACache takes either a model or config=model.config")
    whole = config if model is None else model.config
    if not isinstance(whole, PreTrainedConfig):
        raise TypeError(f"config must be a transformers PreTrainedConfig, got {type(whole).__name__}")
    decoder = whole.get_text_config(decoder=True)
    if whole.is_encoder_decoder or decoder.is_encoder_decoder:
        named = whole.model_type if whole.is_encoder_decoder else decoder.model_type
        raise NotImplementedError(f"QAdACache serves decoder-only models: use transformers.DynamicCache for {named}")
    return decoder


def check_model(model: PreTrainedModel | None, config: PreTrainedConfig) -> None:
    """Raise NotImplementedError if the model's config or class already shows that it cannot be served. Warn once of a
    transformers that is newer than any tested, or that lacks a private name which this package reads."""
    missing = find_missing()
    if missing or tuple(map(int, transformers.__version__.split(".")[:2])) > NEWEST:
        lacking = f", which lacks {', '.join(missing)}" if missing else ""
        warn_once(
            logger,
            f"qada-cache was tested with transformers up to {'.'.join(map(str, NEWEST))}, and this is "
            f"{transformers.__version__}{lacking}: look for a newer qada-cache, or compare threshold=1.0 with "
            "DynamicCache once",
        )
    way_out = f"use transformers.DynamicCache for {config.model_type}"
    find_readers(config)
    if getattr(config, "cross_attention_layers", None):
        raise NotImplementedError(f"QAdACache does not support layers that attend to images' keys: {way_out}")
    if config.model_type == "recurrent_gemma":  # copies and files would miss the states, which are of the last text
        raise NotImplementedError(f"{config.model_type} keeps its states in the model and not in a cache: {way_out}")
    if config.model_type in OWN_CACHES:
        raise NotImplementedError(f"{config.model_type} takes no cache but its own: give it none")
    if config.model_type in LOOPED:
        raise NotImplementedError(f"{config.model_type} runs some layers several times: {way_out}")
    if model is None:
        return
    # The parts of a model, perhaps itself, that have its decoder's config; parts that read images have another.
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel) and part.config is config]
    asked = [getattr(part, "_can_set_attn_implementation", None) for part in parts or [model]]
    if not all(can_set is None or can_set() for can_set in asked):
        raise NotImplementedError(f"this model computes attention without transformers' AttentionInterface: {way_out}")
    check_loaded(model)


def warn_of_no_layers(layers: Sequence[Any], config: PreTrainedConfig) -> None:
    """Log why a cache serves none of these layers."""
    found = "has no full-attention layers"
    if any(isinstance(layer, LinearAttentionAndFullAttentionLayer) for layer in layers):
        found = "holds attention and states of another kind in the same layers, which transformers' own cache keeps"
    logger.warning("%s %s: QAdACache has nothing to do and acts as DynamicCache", config.model_type, found)


def describe_model(
    model: PreTrainedModel | None, config: PreTrainedConfig | None, layers: Sequence[int]
) -> ManagedModel:
    """The `ManagedModel` of a cache that serves these layers and the readers of their keys, from a model or its config
    alone. NotImplementedError, if `find_shard` refuses the model."""
    decoder = find_text_config(model, config)
    latents = find_latent_sizes(decoder) if layers else None
    readers = {index: owner for index, owner in find_readers(decoder).items() if owner in layers}
    layers = (*layers, *readers)
    arguments: dict[str, Any] = {"whole_config": config, "layers": layers, "latents": latents, "readers": readers}
    arguments["window"] = find_long_window(decoder)
    managed = ManagedModel(decoder.model_type, config=decoder, **arguments)
    if model is None:
        check_whole_config(managed.whole_config)
        return managed
    shard = find_shard(model, decoder, layers)
    return replace(managed, whole_config=model.config, dtype=model.dtype, get=weakref.ref(model), shard=shard)


def make_layer(shared: Shared, index: int) -> QAdALayer:
    """An empty layer of the kind that the model has."""
    if shared.model.latents is None:
        return (DifferentialLayer if attends_twice(shared.model.model_type) else QAdALayer)(shared, index)
    types = getattr(shared.model.config, "layer_types", None) or ()
    return (IndexedLayer if INDEXED in types[index : index + 1] else LatentLayer)(shared, index)


def resolve_options(options: Options, managed: ManagedModel, *, chosen: bool) -> Options:
    """These options with the moments that they ask for, loaded or collected if they are needed, and the query energies
    of these moments' prompt: none of `"current"`, whatever is kept. Latents are read whole unless another criterion was
    `chosen`. ValueError, if moments or static heads are not of this model; other errors as by `resolve_moments` and
    `resolve_latent_options`."""
    if managed.latents is not None:
        options = resolve_latent_options(options, managed.config, chosen=chosen)
        if options.criterion == "dense":
            return options
    used = options.uses_moments and bool(managed.layers)
    current, other = resolve_moments(
        options.moments, model=managed.get(), config=managed.whole_config, used=used, shard=managed.shard
    )
    if isinstance(options.criterion, StaticHeads):
        layers, heads, kv_heads, _ = read_sizes(managed.config)
        shape = list(options.criterion.long_context.shape)
        if shape not in ([layers, heads], [layers, kv_heads]):
            raise ValueError(
                f"StaticHeads has shape {shape}, this model needs {[layers, heads]} or {[layers, kv_heads]}"
            )
    if other is not None and split_sources(options.moments)[1] not in PROMPTS:  # a prompt's are of this very model
        _check_moments(other, managed.config)
    asked = combine_sources(current, other) if used else options.moments  # files are not read again
    energies = None if other is None else other.query_energies
    return replace(options, moments=asked, current_moments=current, other_moments=other, query_energies=energies)


def choose_bits(options: Options, managed: ManagedModel) -> Options:
    """These resolved options with the default `bulk_bits`: `DEFAULT_BITS` if the model `reads_records`."""
    return replace(options, bulk_bits=DEFAULT_BITS) if reads_records(options, managed) else options


def reads_records(options: Options, managed: ManagedModel) -> bool:
    """Whether a model with these resolved options decodes as fast with a bulk in few bits as in the model's dtype:
    tokens are selected by a sketch in the metric of the queries, and the kernel for CPUs computes every call."""
    model, config = managed.get(), managed.config
    if model is None or not options.selects_tokens or options.query_energies is None:
        return False
    plain = getattr(config, "attn_logit_softcapping", None) is None
    if (latents := managed.latents) is not None:
        built = latent.serves_sizes(model.dtype, latents.dim, latents.rank)
    else:
        built = model.dtype in cpu.ELEMENTS and all(
            heads <= cpu.MAX_QUERIES * kv_heads and RecordLayout.serves(dim, dim)
            for heads, kv_heads, dim in list_sizes(config)
        )
    on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
    return plain and built and on_cpu and options.kernels == "auto" and has_compiler()


def _check_moments(moments: KeyMoments, config: PreTrainedConfig) -> None:
    """Raise ValueError if key moments are of another kind of model, another shape or other rotary positions."""
    layers, _, kv_heads, dim = read_sizes(config)
    if moments.model_type != config.model_type or list(moments.shape) != [layers, kv_heads, dim]:
        raise ValueError(
            f"these KeyMoments are of a {moments.model_type} model with [layers, kv_heads, dim] = "
            f"{list(moments.shape)}; this {config.model_type} model has {[layers, kv_heads, dim]}"
        )
    theirs, ours = json.loads(json.dumps([moments.rope, read_rope_settings(config)]))
    for name in theirs.keys() & ours.keys():
        if theirs[name] != ours[name]:
            raise ValueError(
                f"these KeyMoments are of a {moments.model_type} model whose {name} is {theirs[name]}; this "
                f"model's is {ours[name]}"
            )
