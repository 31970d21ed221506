"""The tuned setting of a model: `qada tune` keeps it beside the key moments, and caches take it if they are asked to.

It counts only under the other options of its measurement that outputs depend on, and is found by the model's weights,
config and dtype. Caches of a config alone, or of a split model, whose processes see parts of the weights, do without.
"""

import logging
from collections.abc import Collection
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from . import files
from .criterion import StaticHeads
from .files import tensor_file
from .key_moments import KeyMoments
from .key_moments.defaults import CURRENT, FOLDER, split_sources
from .models import identity
from .said_once import warn_once
from .state import CONDITIONS, DEFAULT_BITS, THRESHOLD, TOKEN_THRESHOLD, ManagedModel, Options

logger = logging.getLogger(__name__)

KIND = "qada-choice"
LEFT_OPEN = ("bulk_bits", "prefill_threshold")  # keywords that a setting has too, unless they are given


@dataclass(frozen=True)
class Thresholds:
    """What a setting is: options of these names."""

    token_threshold: float = TOKEN_THRESHOLD
    threshold: float = THRESHOLD

    @staticmethod
    def of(options: Options) -> "Thresholds":
        """Those of a cache's options."""
        return Thresholds(options.token_threshold, options.threshold)

    def __str__(self) -> str:
        threshold = "" if self.threshold == THRESHOLD else f", threshold={self.threshold:g}"
        return f"token_threshold={self.token_threshold:g}{threshold}"


_THRESHOLDS = tuple(each.name for each in fields(Thresholds))


def describe(options: Options) -> str:
    """The setting of options that are `tuned`, in words."""
    bits = f", bulk_bits={options.bulk_bits}" if options.bulk_bits < DEFAULT_BITS else ""
    prompts = f", prefill_threshold={options.prefill_threshold:g}" if options.prefill_threshold else ""
    return f"{Thresholds.of(options)}{bits}{prompts}"


def keep(model: PreTrainedModel, options: Options, figures: dict[str, Any]) -> Path:
    """Keep what these options have of `Thresholds` and `LEFT_OPEN`, as measured, as the model's own. Returns the
    path. The `figures`, measurements behind the choice, are JSON-able and for people. An OSError if the user's cache
    folder cannot be written to, or is not the user's alone; a LookupError if weights cannot be told apart."""
    path = _find_path(model)
    chosen = asdict(Thresholds.of(options)) | {name: getattr(options, name) for name in LEFT_OPEN}
    state = {"chosen": chosen, "under": _list_conditions(options), "figures": figures}
    with files.open_folder(FOLDER, make=True) as folder:
        files.write(path.name, tensor_file.encode(KIND, {}, state), folder=folder)
    return path


def check_left_out(options: Options) -> None:
    """Raise ValueError if options ask for the tuned setting and have thresholds of their own."""
    if options.tuned and (own := Thresholds.of(options)) != Thresholds():
        raise ValueError(
            f"tuned=True takes token_threshold and threshold from qada tune, and {own} was given: leave out one or the "
            "other"
        )


def apply_tuned(options: Options, managed: ManagedModel, left_open: Collection[str] = LEFT_OPEN) -> Options:
    """The options with the model's tuned setting if they ask for it; of `LEFT_OPEN` those in `left_open` alone, which
    were not given. Without, and with a warning, if none is kept, or the one kept does not count. `check_left_out` comes
    first."""
    if not options.tuned or not managed.layers:  # of which there is another warning
        return replace(options, tuned=False)
    try:
        return replace(options, **_read_kept(options, managed, left_open))
    except FileNotFoundError:
        reason = "qada tune has kept none"
    except (KeyError, TypeError) as error:
        reason = f"it does not hold what this version keeps ({error})"
    except (LookupError, OSError, ValueError) as error:
        reason = str(error)
    warn_once(
        logger,
        f"the tuned setting of this {managed.model_type} model is not used: {reason}. This cache goes by "
        f"{Thresholds.of(options)}; run qada tune, or give token_threshold and threshold by hand",
    )
    return replace(options, tuned=False)


def _read_kept(options: Options, managed: ManagedModel, left_open: Collection[str]) -> dict[str, Any]:
    """The options kept of this model; of the bulk's bits the fewer. A FileNotFoundError if there are none; a
    LookupError if they do not count here; other errors if the file cannot be believed."""
    model = managed.get()
    if model is None:
        raise LookupError("a cache built with config= has no weights to find it by")
    if managed.shard.size > 1:
        raise LookupError("it is found by all of the model's weights, and this process has a part of them")
    path = _find_path(model)
    with files.open_folder(FOLDER) as folder:
        kept = tensor_file.decode(files.read(folder, path.name), KIND, path)[1]
    ours = _list_conditions(options)
    differing = [name for name in ours if kept["under"][name] != ours[name]]
    if differing:
        measured, own = (", ".join(f"{name}={held[name]}" for name in differing) for held in (kept["under"], ours))
        raise LookupError(f"it was measured with {measured}, and this cache has {own}")
    chosen, bits = kept["chosen"], options.bulk_bits
    if bits < min(chosen["bulk_bits"], DEFAULT_BITS):  # beyond the default's nothing is lost
        raise LookupError(f"it was measured with bulk_bits={chosen['bulk_bits']}, and this cache has bulk_bits={bits}")
    if "bulk_bits" in left_open and options.codes_tokens:
        bits = min(bits, chosen["bulk_bits"])
    return {name: chosen[name] for name in (*_THRESHOLDS, *left_open)} | {"bulk_bits": bits}


def _list_conditions(options: Options) -> dict[str, Any]:
    """The options that a setting was measured under, JSON-able."""
    chosen = {*LEFT_OPEN, *_THRESHOLDS}
    found = {name: getattr(options, name) for name in CONDITIONS if name not in chosen}
    current, other = split_sources(options.moments)
    prompt = other.prompt if isinstance(other, KeyMoments) else other
    found["moments"] = "+".join([CURRENT] * current + [str(prompt)] * (prompt is not None))
    if isinstance(options.criterion, StaticHeads):
        found["criterion"] = "static heads"
    return found


def _find_path(model: PreTrainedModel) -> Path:
    return files.find_home() / FOLDER / f"{model.config.model_type}-tuned-{identity.digest(model)}.safetensors"
