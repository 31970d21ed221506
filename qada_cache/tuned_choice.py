"""The tuned setting of a model: `qada tune` keeps it beside the key moments, and caches take it as their default.

It counts only for caches with the other deciding options of its measurement, and is found by the model's weights,
config and dtype. Caches of a config alone, or of a split model, whose processes see parts of the weights, do without.
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.utils import logging

from . import files
from .criterion import StaticHeads
from .files import tensor_file
from .key_moments import KeyMoments, identity
from .key_moments.defaults import CURRENT, FOLDER, sources
from .state import THRESHOLD, ManagedModel, Options

logger = logging.get_logger(__name__)

KIND = "qada-choice"
_CHOSEN = ("token_threshold", "threshold")
# A setting was measured under these options.
_UNDER = ("sink_tokens", "local_tokens", "criterion", "group_rule", "moments", "sketch_bits", "update_moments")
CONDITIONS = frozenset(_UNDER + _CHOSEN)  # others need another measurement


@dataclass(frozen=True)
class Thresholds:
    """What a setting is: options of these names."""

    token_threshold: float
    threshold: float = THRESHOLD

    @staticmethod
    def of(options: Options) -> "Thresholds":
        """Those of a cache's options."""
        return Thresholds(options.token_threshold, options.threshold)

    def __str__(self) -> str:
        threshold = "" if self.threshold == THRESHOLD else f", threshold={self.threshold:g}"
        return f"token_threshold={self.token_threshold:g}{threshold}"


def keep(model: PreTrainedModel, options: Options, figures: dict[str, Any]) -> Path:
    """Keep the thresholds of these options, under which caches were measured, as the model's own. Returns the path. The
    `figures`, measurements behind the choice, are JSON-able and for people. An OSError if the user's cache folder
    cannot be written to, or is not the user's alone."""
    path = _path(model)
    state = {"chosen": asdict(Thresholds.of(options)), "under": _conditions(options), "figures": figures}
    with files.opened(FOLDER, make=True) as folder:
        files.write(path.name, tensor_file.encoded(KIND, {}, state), folder=folder)
    return path


def apply_tuned(options: Options, managed: ManagedModel, *, threshold: float | None) -> Options:
    """The options with the model's tuned setting; without, if they do not ask for it, or none is kept that counts. One
    that is kept and does not count is warned of, once. A `threshold` that was asked for has to be the setting's; None:
    the setting's counts."""
    without = replace(options, tuned=False)
    model = managed.get()
    if not (options.tuned and options.selects_tokens and managed.layers) or model is None or managed.shard.size > 1:
        return without
    try:
        path = _path(model)
        if not path.exists():  # then it is no matter whether the folder is the user's alone
            return without
        with files.opened(FOLDER) as folder:
            kept = tensor_file.decoded(files.read(folder, path.name), KIND, path)[1]
        taken = replace(options, **{name: kept["chosen"][name] for name in _CHOSEN})
        measured, ours = kept["under"] | kept["chosen"], _conditions(options)
        if threshold is not None:
            ours["threshold"] = threshold
        differing = [name for name, value in ours.items() if measured[name] != value]
        if not differing:
            return taken
        theirs, its = (", ".join(f"{name}={given[name]}" for name in differing) for given in (measured, ours))
        reason = f"it was measured with {theirs}, and this cache has {its}"
    except (OSError, ValueError) as error:
        reason = str(error)
    except (TypeError, KeyError) as error:
        reason = f"it does not hold what this version keeps ({error})"
    logger.warning_once(
        f"the tuned setting of this {managed.model_type} model is not used: {reason}. This cache goes by "
        f"{Thresholds.of(options)}; run qada tune again, or give token_threshold or tuned=False"
    )
    return without


def _conditions(options: Options) -> dict[str, Any]:
    """The options that a setting was measured under, JSON-able."""
    found = {name: getattr(options, name) for name in _UNDER}
    current, other = sources(options.moments)
    prompt = other.prompt if isinstance(other, KeyMoments) else other
    found["moments"] = "+".join([CURRENT] * current + [str(prompt)] * (prompt is not None))
    if isinstance(options.criterion, StaticHeads):
        found["criterion"] = "static heads"
    return found


def _path(model: PreTrainedModel) -> Path:
    return files.home() / FOLDER / f"{model.config.model_type}-tuned-{identity.digest(model)}.safetensors"
