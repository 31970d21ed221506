"""The tuned setting of a model: `qada tune` writes it to the folder of key moments, caches with `tuned=True` read it.

Its file is named by the model's weights, config and dtype. A cache uses it only if its other options that outputs
depend on are those of the measurement. A cache without a model has no weights to find it by, and a process of a split
model has only parts of them: these use no tuned setting.
"""

import logging
import os
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from . import files
from .criterion import StaticHeads
from .files import tensor_file
from .key_moments import KeyMoments
from .key_moments.defaults import CURRENT, FOLDER, split_sources
from .models import find_inputs_device, identity
from .said_once import warn_once
from .state import CONDITIONS, DEFAULT_BITS, THRESHOLD, TOKEN_THRESHOLD, ManagedModel, Options

logger = logging.getLogger(__name__)

KIND = "qada-choice"
LEFT_OPEN = ("bulk_bits", "prefill_threshold")  # options of a setting that apply only if the caller gave none


@dataclass(frozen=True)
class Thresholds:
    """The thresholds of a setting, named as in `Options`."""

    token_threshold: float = TOKEN_THRESHOLD
    threshold: float = THRESHOLD

    @staticmethod
    def of(options: Options) -> "Thresholds":
        """The thresholds in a cache's options."""
        return Thresholds(options.token_threshold, options.threshold)

    def __str__(self) -> str:
        threshold = "" if self.threshold == THRESHOLD else f", threshold={self.threshold:g}"
        return f"token_threshold={self.token_threshold:g}{threshold}"


_THRESHOLDS = tuple(each.name for each in fields(Thresholds))


def describe(options: Options) -> str:
    """The setting in `options`, in words: thresholds, and `LEFT_OPEN` where they are not the defaults."""
    bits = f", bulk_bits={options.bulk_bits}" if options.bulk_bits < DEFAULT_BITS else ""
    prompts = f", prefill_threshold={options.prefill_threshold:g}" if options.prefill_threshold else ""
    return f"{Thresholds.of(options)}{bits}{prompts}"


def keep(model: PreTrainedModel, options: Options, figures: dict[str, Any]) -> Path:
    """Write `Thresholds` and `LEFT_OPEN` of these options to the model's file; returns its path. The `figures`,
    measurements behind the choice, are JSON-able and for people. An OSError if the user's cache folder cannot be
    written to, or others can write to it; a LookupError if the weights cannot be told apart."""
    path = _find_path(model)
    chosen = asdict(Thresholds.of(options)) | {name: getattr(options, name) for name in LEFT_OPEN}
    device = find_inputs_device(model).type
    state = {"chosen": chosen, "under": _list_conditions(options), "device": device, "figures": figures}
    with files.open_folder(FOLDER, make=True) as folder:
        files.write(path.name, tensor_file.encode(KIND, {}, state), folder=folder)
    return path


def check_folder() -> None:
    """Raise an OSError, if `keep` could not write to the user's cache folder, which is made if there is none."""
    if not files.LOCKS:  # on Windows nothing is kept, and what was measured can be given by hand
        return
    try:
        with files.open_folder(FOLDER, make=True) as folder:
            files.write(".check", (), folder=folder)
            with suppress(FileNotFoundError):  # another process checks, too
                os.unlink(".check", dir_fd=folder)
    except OSError as error:
        raise OSError(f"no choice could be kept in {files.find_home() / FOLDER}: {error}") from error


def check_left_out(options: Options) -> None:
    """Raise ValueError if options have both `tuned` and thresholds other than the defaults."""
    if options.tuned and (own := Thresholds.of(options)) != Thresholds():
        raise ValueError(
            f"tuned=True takes token_threshold and threshold from qada tune, and {own} was given: leave out one or the "
            "other"
        )


def apply_tuned(options: Options, managed: ManagedModel, left_open: Collection[str] = LEFT_OPEN) -> Options:
    """The options with the model's tuned setting if they are `tuned`. `left_open` names the options of `LEFT_OPEN` that
    the caller did not give. If no setting is stored, or it was measured under other options, the options without it and
    a warning. Call `check_left_out` first."""
    if not options.tuned or not managed.layers:  # a model without full attention has a warning of its own
        return replace(options, tuned=False)
    try:
        return replace(options, **_read_setting(options, managed, left_open))
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


def _read_setting(options: Options, managed: ManagedModel, left_open: Collection[str]) -> dict[str, Any]:
    """The options in the model's file, and `bulk_bits`: the smaller of the file's and these options'. A
    FileNotFoundError if there is no file; a LookupError if it does not apply to these options; other errors if it is
    damaged."""
    model = managed.get()
    if model is None:
        raise LookupError("a cache built with config= has no weights to find it by")
    if managed.shard.size > 1:
        raise LookupError("it is found by all of the model's weights, and this process has a part of them")
    path = _find_path(model)
    with files.open_folder(FOLDER) as folder:
        state = tensor_file.decode(files.read(folder, path.name), KIND, path)[1]
    ours = _list_conditions(options)
    differing = [name for name in ours if state["under"][name] != ours[name]]
    if differing:
        measured, here = (
            ", ".join(f"{name}={conditions[name]}" for name in differing) for conditions in (state["under"], ours)
        )
        raise LookupError(f"it was measured with {measured}, and this cache has {here}")
    chosen, bits = state["chosen"], options.bulk_bits
    if state.get("device", device := find_inputs_device(model).type) != device:
        chosen = chosen | {"prefill_threshold": 0.0}  # CPUs and GPUs select differently
    if bits < min(chosen["bulk_bits"], DEFAULT_BITS):  # more bits than the default lose nothing
        raise LookupError(f"it was measured with bulk_bits={chosen['bulk_bits']}, and this cache has bulk_bits={bits}")
    if "bulk_bits" in left_open and options.codes_tokens:
        bits = min(bits, chosen["bulk_bits"])
    return {name: chosen[name] for name in (*_THRESHOLDS, *left_open)} | {"bulk_bits": bits}


def _list_conditions(options: Options) -> dict[str, Any]:
    """The options that a setting was measured under, JSON-able."""
    chosen = {*LEFT_OPEN, *_THRESHOLDS}
    conditions = {name: getattr(options, name) for name in CONDITIONS if name not in chosen}
    current, other = split_sources(options.moments)
    prompt = other.prompt if isinstance(other, KeyMoments) else other
    conditions["moments"] = "+".join([CURRENT] * current + [str(prompt)] * (prompt is not None))
    if isinstance(options.criterion, StaticHeads):
        conditions["criterion"] = "static heads"
    return conditions


def _find_path(model: PreTrainedModel) -> Path:
    digest = identity.digest(model, without=("pad_token_id",))  # users set it
    return files.find_home() / FOLDER / f"{model.config.model_type}-tuned-{digest}.safetensors"
