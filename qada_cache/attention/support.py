"""Which models a QAdACache can serve, and whether tables of heads and moments are of that model."""

import ast
import functools
import inspect
import json
import sys
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import LinearAttentionAndFullAttentionLayer
from transformers.utils import logging

from ..criterion import StaticHeads
from ..key_moments import KeyMoments
from ..key_moments.defaults import combine_sources, kept_energies, resolve_moments, sources
from ..key_moments.models import full_attention_config, head_shard, sizes
from ..key_moments.prompts import PROMPTS
from ..key_moments.rotation import rope_settings
from ..state import ManagedModel, Options

logger = logging.get_logger(__name__)

NEWEST = (5, 24)  # transformers that the tests run on: what is private there may change

# Functions that read the attention's name without effect: `__init__` ran before it was replaced. The other (Gemma 4's)
# is of models whose layers share keys, which are refused for that.
_HARMLESS = ("__init__", "_maybe_slice_kv_shared_inputs")
_TABLES = ("ALL_ATTENTION_FUNCTIONS", "ALL_MASK_ATTENTION_FUNCTIONS")  # of functions, where ours are registered


def text_config(model: PreTrainedModel | None, config: PreTrainedConfig | None) -> PreTrainedConfig:
    """The config of the decoder that a cache is for, from exactly one of its model and that model's config."""
    if model is not None and not isinstance(model, PreTrainedModel):
        hint = "as config=..." if isinstance(model, PreTrainedConfig) else "or config=model.config"
        raise TypeError(f"QAdACache takes a transformers model {hint}, got {type(model).__name__}")
    if (model is None) == (config is None):
        raise TypeError("QAdACache takes either a model or config=model.config")
    whole = config if model is None else model.config
    if not isinstance(whole, PreTrainedConfig):
        raise TypeError(f"config must be a transformers PreTrainedConfig, got {type(whole).__name__}")
    return whole.get_text_config(decoder=True)


def check_model(model: PreTrainedModel | None, config: PreTrainedConfig) -> None:
    """Raise NotImplementedError for a kind of model that its config, or its kind, already tells cannot be served. Of a
    transformers newer than any tested there is a warning, once."""
    if tuple(map(int, transformers.__version__.split(".")[:2])) > NEWEST:
        logger.warning_once(
            f"qada-cache was tested with transformers up to {'.'.join(map(str, NEWEST))}, and this is "
            f"{transformers.__version__}: look for a newer qada-cache, or compare threshold=1.0 with DynamicCache once"
        )
    way_out = f"use transformers.DynamicCache for {config.model_type}"
    if config.is_encoder_decoder:
        raise NotImplementedError(f"QAdACache serves decoder-only models: {way_out}")
    if getattr(config, "num_kv_shared_layers", 0) or any(getattr(config, "kv_sharing_modes", None) or []):
        raise NotImplementedError(f"QAdACache does not support layers that share another layer's keys: {way_out}")
    if getattr(config, "cross_attention_layers", None):
        raise NotImplementedError(f"QAdACache does not support layers that attend to images' keys: {way_out}")
    if config.model_type == "recurrent_gemma":  # copies and files would miss the states, which are of the last text
        raise NotImplementedError(f"{config.model_type} keeps its states in the model and not in a cache: {way_out}")
    full_attention_config(config)
    if model is None:
        return
    # The parts of a model, itself perhaps, that go by its decoder's config; what reads images does not.
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel) and part.config is config]
    if not all(part._can_set_attn_implementation() for part in parts or [model]):
        raise NotImplementedError(f"this model computes attention without transformers' AttentionInterface: {way_out}")


def warn_of_no_layers(layers: Sequence[Any], config: PreTrainedConfig) -> None:
    """Log why a cache serves none of these layers."""
    found = "has no full-attention layers"
    if any(isinstance(layer, LinearAttentionAndFullAttentionLayer) for layer in layers):
        found = "holds attention and states of another kind in the same layers, which transformers' own cache keeps"
    logger.warning("%s %s: QAdACache has nothing to do and acts as DynamicCache", config.model_type, found)


def describe_model(
    model: PreTrainedModel | None, config: PreTrainedConfig | None, layers: Sequence[int]
) -> ManagedModel:
    """What a cache that serves these layers knows of its model, of which there may be the config alone. What
    `head_shard` refuses is refused."""
    decoder = text_config(model, config)
    managed = ManagedModel(decoder.model_type, config=decoder, whole_config=config, layers=tuple(layers))
    if model is None:
        return managed
    shard = head_shard(model, decoder, layers)
    return replace(managed, whole_config=model.config, dtype=model.dtype, get=weakref.ref(model), shard=shard)


def resolve_options(options: Options, managed: ManagedModel) -> Options:
    """These options with the moments that they ask for, loaded or collected if they are needed. Errors are those of
    `resolve_moments`, or a ValueError: moments or static heads are not of this model."""
    used = options.criterion == "gaussian" and bool(managed.layers)
    current, other = resolve_moments(
        options.moments, model=managed.get(), config=managed.whole_config, used=used, shard=managed.shard
    )
    if isinstance(options.criterion, StaticHeads):
        layers, heads, kv_heads, _ = sizes(managed.config)
        shape = list(options.criterion.long_context.shape)
        if shape not in ([layers, heads], [layers, kv_heads]):
            raise ValueError(
                f"StaticHeads has shape {shape}, this model needs {[layers, heads]} or {[layers, kv_heads]}"
            )
    if other is not None and sources(options.moments)[1] not in PROMPTS:  # else they are of this very model
        _check_moments(other, managed.config)
    asked = combine_sources(current, other) if used else options.moments  # files are not read again
    energies = None if other is None else other.query_energies
    if energies is None and options.selects_tokens and managed.layers:
        energies = kept_energies(managed.get(), managed.whole_config)
    return replace(options, moments=asked, current_moments=current, other_moments=other, query_energies=energies)


def _check_moments(moments: KeyMoments, config: PreTrainedConfig) -> None:
    """Raise ValueError if key moments are of another kind of model, another shape or other rotary positions."""
    layers, _, kv_heads, dim = sizes(config)
    if moments.model_type != config.model_type or list(moments.shape) != [layers, kv_heads, dim]:
        raise ValueError(
            f"these KeyMoments are of a {moments.model_type} model with [layers, kv_heads, dim] = "
            f"{list(moments.shape)}; this {config.model_type} model has {[layers, kv_heads, dim]}"
        )
    theirs, ours = json.loads(json.dumps([moments.rope, rope_settings(config)]))
    for name in theirs.keys() & ours.keys():
        if theirs[name] != ours[name]:
            raise ValueError(
                f"these KeyMoments are of a {moments.model_type} model whose {name} is {theirs[name]}; this "
                f"model's is {ours[name]}"
            )


def find_reader(model: PreTrainedModel | None, config: PreTrainedConfig, name: str, instead: str) -> str | None:
    """Where the model's code may go another way if its attention is called `instead` and not `name`; None: nowhere.

    Some models do one thing under "sdpa" and another under any other name. The name of ours (`forward.py`) is another
    one, and it stands in the config whatever cache is used. So such a model has to keep its own.

    `config` is the model's text config. Without the model, its code is the whole modeling file that belongs to this
    kind of config. Code whose source is not there is taken not to read the name.
    """
    for module, scope in _scopes(model, config):
        for node in _readings(module).get(scope, ()):
            if _differs(node, name, instead):
                return f"{scope}, line {getattr(node, 'lineno', 0)} of {module}"
    return None


def _scopes(model: PreTrainedModel | None, config: PreTrainedConfig) -> Iterator[tuple[str, str]]:
    """Module and name of every class and function that may be asked for attention under this config."""
    if model is None:
        module = type(config).__module__.replace("configuration_", "modeling_")
        yield from ((module, scope) for scope in _readings(module))
        return
    # Parts with a config of their own (of images, of sound) keep their name.
    configs = (type(config), type(model.config))
    parts = {type(part) for part in model.modules() if type(getattr(part, "config", config)) in configs}
    foreign = {*PreTrainedModel.__mro__, *nn.Module.__mro__}
    kinds = {kind for part in parts for kind in part.__mro__ if kind not in foreign}
    yield from sorted({(kind.__module__, kind.__name__) for kind in kinds})


@functools.cache
def _readings(module: str) -> dict[str, list[ast.AST]]:
    """Where a module's classes and functions read the name, other than to build the model."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (KeyError, OSError, TypeError):
        return {}
    scopes = [scope for scope in tree.body if isinstance(scope, (ast.ClassDef, ast.FunctionDef))]
    return {scope.name: list(_read_by(scope)) for scope in scopes}


def _read_by(scope: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.FunctionDef) and node.name in _HARMLESS:
            continue
        if any(map(_is_name, ast.iter_child_nodes(node))):
            yield node
        yield from _read_by(node)


def _is_name(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "_attn_implementation"


def _differs(node: ast.AST, name: str, instead: str) -> bool:
    """Whether this, which reads the name, may do something else for `instead` than for `name`."""
    if isinstance(node, (ast.Compare, ast.Call, ast.Subscript)):  # for one of the tables, perhaps
        if any(isinstance(part, ast.Name) and part.id in _TABLES for part in ast.walk(node)):
            return False
    elif isinstance(node, ast.FormattedValue) or (isinstance(node, ast.Assign) and all(map(_is_name, node.targets))):
        return False  # for a message, or to hand it on
    if not isinstance(node, ast.Compare) or len(node.ops) > 1:
        return True
    try:
        other = ast.literal_eval(node.comparators[0])
    except ValueError:
        return True
    among = other if isinstance(node.ops[0], (ast.In, ast.NotIn)) else (other,)
    return (name in among) != (instead in among)
