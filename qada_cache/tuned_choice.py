"""What `qada tune` chose for a model: kept beside its key moments, and taken by caches that are given nothing else.

A kept choice counts only for caches that decide, but for it, as those it was measured with. It is never looked up for a
model that processes share: each would see its own part of the weights, and they might disagree.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.utils import logging

from .criterion import StaticHeads
from .files import private, tensor_file
from .key_moments import identity
from .key_moments.defaults import CURRENT, FOLDER, sources
from .key_moments.key_moments import KeyMoments
from .state.options import Options
from .state.shared import ServedModel

logger = logging.get_logger(__name__)

KIND = "qada-choice"
NAME = "tuned"  # in the names of files
# What a choice was measured under.
_UNDER = ("threshold", "sink_tokens", "local_tokens", "criterion", "group_rule", "moments", "sketch_bits")
CONDITIONS = frozenset({*_UNDER, "update_moments", "token_threshold"})  # what makes a cache another than was measured


def keep(model: PreTrainedModel, options: Options, figures: dict[str, Any]) -> Path:
    """Keep the `token_threshold` of these options as the model's own, in place of an earlier one.

    Args:
        model: whose.
        options: of the caches that were measured.
        figures: what was measured, JSON-able; for people who ask where the choice comes from.

    Returns:
        the file.

    Raises:
        OSError: the user's cache folder cannot be written to, or is not the user's alone.
    """
    file = f"{identity.name(model, NAME)}.safetensors"
    state = {"token_threshold": options.token_threshold, "under": _conditions(options), "figures": figures}
    with private.opened(FOLDER, make=True) as folder:
        private.write(file, tensor_file.encoded(KIND, {}, state), folder=folder)
    return private.home() / FOLDER / file


def applied(options: Options, served: ServedModel) -> Options:
    """The options with the model's kept choice; without, if they do not ask for it, or none is kept that counts.

    A choice that is kept and does not count is warned of, once.
    """
    without = replace(options, tuned=False)
    if not (options.tuned and options.chooses_tokens and served.layers) or served.shard.size > 1:
        return without
    try:
        kept = _read(served)
        if kept is None:
            return without
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
        f"what `qada tune` kept of this {served.model_type} model is not used: {reason}. This cache goes by "
        f"token_threshold={options.token_threshold:g}; run qada tune again, or give token_threshold or tuned=False"
    )
    return without


def _conditions(options: Options) -> dict[str, Any]:
    """What a choice depends on beside the model, JSON-able."""
    found = {name: getattr(options, name) for name in (*_UNDER, "update_moments")}
    current, other = sources(options.moments)
    prompt = other.prompt if isinstance(other, KeyMoments) else other
    found["moments"] = "+".join([CURRENT] * current + [str(prompt)] * (prompt is not None))
    if isinstance(options.criterion, StaticHeads):
        found["criterion"] = "static heads"
    return found


def _read(served: ServedModel) -> dict[str, Any] | None:
    """What is kept of the model, or of the one that its config names; None if nothing is, or it cannot be told apart.

    Raises:
        OSError, ValueError: it cannot be read, or is truncated, altered or of another format.
    """
    model, folder = served.get(), private.home() / FOLDER
    if model is not None:
        found = [folder / f"{identity.name(model, NAME)}.safetensors"]
    else:
        source = identity.source(served.whole_config)
        found = list(folder.glob(f"{source}-{NAME}-*.safetensors")) if source else []
    if len(found) != 1 or not found[0].exists():  # a folder that is not the user's alone matters only if there is one
        return None
    with private.opened(FOLDER) as descriptor:
        return tensor_file.decoded(private.read(descriptor, found[0].name), KIND, found[0])[1]
