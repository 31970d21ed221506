"""The tuned setting of a model: `qada tune` keeps it beside the key moments, and caches take it as their default.

A tuned setting counts only for caches with the other deciding options of its measurement. It is found by the model's
weights, config and dtype, wherever the model lies. A cache that was built with a config alone does without. So does a
cache of a split model, as each process sees its own part of the weights.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.utils import logging

from .criterion import StaticHeads
from .files import private, tensor_file
from .key_moments import KeyMoments, identity
from .key_moments.defaults import CURRENT, FOLDER, sources
from .state.shared import ManagedModel, Options

logger = logging.get_logger(__name__)

KIND = "qada-choice"
# A setting was measured under these options.
_UNDER = ("threshold", "sink_tokens", "local_tokens", "criterion", "group_rule", "moments", "sketch_bits")
CONDITIONS = frozenset({*_UNDER, "update_moments", "token_threshold"})  # others need another measurement


def keep(model: PreTrainedModel, options: Options, figures: dict[str, Any]) -> Path:
    """Keep the `token_threshold` of these options as the model's own, in place of an earlier one.

    Args:
        model: whose.
        options: of the caches that were measured.
        figures: the measurements behind the choice, JSON-able, for people.

    Returns:
        the file.

    Raises:
        OSError: the user's cache folder cannot be written to, or is not the user's alone.
    """
    path = _path(model)
    state = {"token_threshold": options.token_threshold, "under": _conditions(options), "figures": figures}
    with private.opened(FOLDER, make=True) as folder:
        private.write(path.name, tensor_file.encoded(KIND, {}, state), folder=folder)
    return path


def apply_tuned(options: Options, managed: ManagedModel) -> Options:
    """The options with the model's tuned setting; without, if they do not ask for it, or none is kept that counts.

    A setting that is kept and does not count is warned of, once.
    """
    without = replace(options, tuned=False)
    model = managed.get()
    if not (options.tuned and options.selects_tokens and managed.layers) or model is None or managed.shard.size > 1:
        return without
    try:
        path = _path(model)
        if not path.exists():  # then it is no matter whether the folder is the user's alone
            return without
        with private.opened(FOLDER) as folder:
            kept = tensor_file.decoded(private.read(folder, path.name), KIND, path)[1]
        taken = replace(options, token_threshold=kept["token_threshold"])
        differing = [name for name, value in _conditions(options).items() if kept["under"][name] != value]
    except (OSError, ValueError, TypeError, KeyError) as error:
        known = isinstance(error, (OSError, ValueError))
        reason = str(error) if known else f"it does not hold what this version keeps ({error})"
    else:
        if not differing:
            return taken
        theirs, ours = (
            ", ".join(f"{name}={given[name]}" for name in differing) for given in (kept["under"], _conditions(options))
        )
        reason = f"it was measured with {theirs}, and this cache has {ours}"
    logger.warning_once(
        f"the tuned setting of this {managed.model_type} model is not used: {reason}. This cache goes by "
        f"token_threshold={options.token_threshold:g}; run qada tune again, or give token_threshold or tuned=False"
    )
    return without


def _conditions(options: Options) -> dict[str, Any]:
    """The options that a setting was measured under, JSON-able."""
    found = {name: getattr(options, name) for name in (*_UNDER, "update_moments")}
    current, other = sources(options.moments)
    prompt = other.prompt if isinstance(other, KeyMoments) else other
    found["moments"] = "+".join([CURRENT] * current + [str(prompt)] * (prompt is not None))
    if isinstance(options.criterion, StaticHeads):
        found["criterion"] = "static heads"
    return found


def _path(model: PreTrainedModel) -> Path:
    return private.home() / FOLDER / f"{model.config.model_type}-tuned-{identity.digest(model)}.safetensors"
