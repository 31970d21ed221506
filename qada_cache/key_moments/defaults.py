"""A model's default key moments: collected once, then cached in memory and in a file of the user's cache folder."""

import logging
import os
import re
import threading
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from .. import files
from ..files import find_home, tensor_file
from ..forked import renew
from ..models import identity
from ..models.asking import UntoldWeightsError
from ..models.identity import find_tokenizer
from ..models.sharding import HeadShard
from ..names import PROMPTS, WITHOUT_TEXT
from ..said_once import warn_once
from . import KIND, KeyMoments
from .collecting import LEFT
from .prompts import TOKENS_FOR_WORDS, choose_prompt

logger = logging.getLogger(__name__)

REMEMBERED = 8  # files, those used last: one for a model and prompt
CURRENT = "current"  # the prompt being read
DEFAULT_MOMENTS = f"{CURRENT}+random-tokens"
FOLDER = "moments"  # of `files.find_home()`
# Limits of that folder's key moments, as every state of the weights has a file of its own: 17 MB for the sizes of an
# 8B Llama, 1.5 MB for SmolLM2's. The one used least recently goes first, when another one is written.
KEPT_FILES = 128  # several prompts of as many models as one person works with
KEPT_BYTES = 1 << 30  # the 64 states of an 8B model that were used last
KEPT_SECONDS = 90 * 24 * 3600.0  # unused; to collect them again takes one pass over 1,024 tokens
_NAMES = re.compile(rf".+-({'|'.join(PROMPTS)})-[0-9a-f]{{16}}\.safetensors")  # of `_find_path`, and of no other file
_remembered: dict[Path, KeyMoments] = {}
# By prompt the moments, and the path that the weights then had, of models whose moments other models must not get: no
# file name identifies their weights, or functions other than the weights took part.
_by_model: "weakref.WeakKeyDictionary[PreTrainedModel, dict[str, tuple[Path | None, KeyMoments]]]"
_by_model = weakref.WeakKeyDictionary()
_remembering = renew(threading.RLock())  # one thread collects, others that ask for the same moments wait

MomentsSource = str | os.PathLike | KeyMoments | tuple[str, str | os.PathLike | KeyMoments]


def split_sources(moments: MomentsSource) -> tuple[bool, str | os.PathLike | KeyMoments | None]:
    """The parts of `QAdACache(moments=...)`: whether the current prompt's moments are used, and the source of another
    prompt's (None: no other). TypeError or ValueError for any other argument."""
    parts: Any = moments
    if isinstance(moments, str) and moments.startswith(f"{CURRENT}+"):
        parts = moments.split("+", 1)
    parts = parts if isinstance(parts, (tuple, list)) else [parts]
    other = parts[-1] if parts else None
    if not isinstance(other, (str, os.PathLike, KeyMoments)):
        raise TypeError(
            f'moments must be one of {", ".join(PROMPTS)}, "{CURRENT}", a KeyMoments, or the path or hf://owner/name '
            f'of a moments file; or "{CURRENT}" and one of the others, got {type(other).__name__}'
        )
    if len(parts) == 1:
        return other == CURRENT, None if other == CURRENT else other
    if len(parts) != 2 or parts[0] != CURRENT or other in (CURRENT, ""):
        raise ValueError(f'two moments must be "{CURRENT}" and one of another prompt, got {moments!r}')
    return True, other


def resolve_moments(
    moments: MomentsSource, *, model: PreTrainedModel | None, config: PreTrainedConfig, used: bool, shard: HeadShard
) -> tuple[bool, KeyMoments | None]:
    """Load or collect `QAdACache(moments=...)`: whether the current prompt's moments are used, and another prompt's.

    If another prompt's cannot be loaded or collected, the current prompt's are used. `model` is None if a cache has
    only its config. `moments` that name a prompt are not collected unless they are `used`. TypeError,
    FileNotFoundError or ValueError, if `moments` is none of the allowed, or the file or the pass fails.
    """
    current, other = split_sources(moments)
    if other is None or isinstance(other, KeyMoments):
        return current, other
    if other not in PROMPTS:
        return current, KeyMoments.load(other)
    if not used:
        return True, None
    if model is not None:
        return current, load_default_moments(model, str(other), None, shard)
    key_moments = find_moments(config, str(other))
    if key_moments is None:
        whose = getattr(config, "_name_or_path", "") or "this model"
        warn_once(
            logger,
            f"of {other} moments of {whose} none, or several (its weights changed), are kept in {find_home()}, and a "
            "cache built with config= has no model to collect or choose them by: it goes by the current prompt's "
            "alone, which miss facts in repetitive text. Pass the model, or moments=FILE (`qada moments` makes one)",
        )
    return current or key_moments is None, key_moments


def combine_sources(current: bool, other: KeyMoments | None) -> MomentsSource:
    """The inverse of `resolve_moments`."""
    if other is None:
        return CURRENT
    return (CURRENT, other) if current else other


def load_default_moments(
    model: PreTrainedModel, prompt: str, tokenizer: PreTrainedTokenizerBase | None, shard: HeadShard
) -> KeyMoments:
    """This model's moments on one of `prompts.PROMPTS`: from memory, else from the file, else collected and saved.

    If the folder cannot be written to, or is not the user's alone (`files.open_folder`), there is a warning, and no
    file. Without a tokenizer for words (`prompts.choose_prompt`) the prompt is one of tokens, with a warning, and so is
    the file's name. Processes that share a model collect together: each saves a file named by its part of the weights,
    and if one lacks it, all collect. Without `tokenizer` the model's own is loaded (`identity.find_tokenizer`). If
    nothing identifies the weights (`UntoldWeightsError`), moments stay in memory alone, with a warning.
    ValueError for "wiki" without a tokenizer, or with one that does not know its words; or as by `KeyMoments.collect`.
    """
    with _remembering:
        path = _find_path(model, prompt)
        moments = _find_cached(model, prompt, path)
        if moments is not None and tokenizer is not None and moments.prompt != prompt:
            # These are of tokens, as there was no tokenizer for words; now there is.
            moments = None if path is None else _read_moments(path)
        if not shard.holds_everywhere(moments is not None):
            moments = _collect(model, prompt, tokenizer, path, shard)
        assert moments is not None  # cached, or collected above
        return _remember(model, prompt, path, moments)


def find_moments(config: PreTrainedConfig, prompt: str) -> KeyMoments | None:
    """The moments that `load_default_moments` saved for the model that this config was loaded with; None without
    exactly one file. A config does not identify weights. So one that was built by hand has none, and several files for
    one source (weights changed in memory) count as none. If those of words are missing, those of tokens are returned,
    with a warning."""
    source, names = identity.find_source(config), []
    try:
        with files.open_folder(FOLDER) as folder:
            names = [name for name in os.listdir(folder) if source and name.startswith(f"{source}-{prompt}-")]
    except FileNotFoundError:
        pass
    except OSError as error:
        warn_once(logger, f"key moments kept in {find_home() / FOLDER} are not used: {error}")
    if not names and prompt in TOKENS_FOR_WORDS:
        instead = find_moments(config, TOKENS_FOR_WORDS[prompt])
        if instead is not None:
            _say_tokens(prompt, f"no others are kept in {find_home()}")
        return instead
    return _read_moments(find_home() / FOLDER / names[0]) if len(names) == 1 else None


def _collect(
    model: PreTrainedModel, prompt: str, tokenizer: PreTrainedTokenizerBase | None, path: Path | None, shard: HeadShard
) -> KeyMoments:
    """Collect moments, in every process of the shard, and save them: without a file if `path` is None."""
    reason = "the tokenizer does not know the words of our article"
    if prompt in WITHOUT_TEXT:
        tokenizer = None  # so that the same tokens are drawn in any case
    elif tokenizer is None:
        try:
            tokenizer = find_tokenizer(model)
        except LookupError as error:
            reason = str(error)
            if prompt not in TOKENS_FOR_WORDS:
                raise ValueError(
                    f"moments={prompt!r} are those of a text, which takes the model's tokenizer, and {reason}: call "
                    f"qada_cache.prepare(model, tokenizer, moments={prompt!r}) first, or give moments="
                    f"KeyMoments.collect(model, tokenizer, prompt={prompt!r})"
                ) from error
    if not shard.holds_everywhere(choose_prompt(prompt, tokenizer) == prompt):
        _say_tokens(prompt, reason)
        return load_default_moments(model, TOKENS_FOR_WORDS[prompt], None, shard)
    moments = KeyMoments.collect(model, tokenizer, prompt)
    if left := moments.origin.get(LEFT):
        warn_once(
            logger,
            f"key moments are not kept, and every process collects them: functions were put into {', '.join(left)}, "
            "and without them it is not known what the model computes",
        )
    if left or path is None:
        return moments
    try:
        with files.open_folder(FOLDER, make=True) as folder:
            files.write(path.name, tensor_file.encode(KIND, moments.to_tensors(), moments.to_header()), folder=folder)
            files.remove_unused(folder, _NAMES, count=KEPT_FILES, size=KEPT_BYTES, seconds=KEPT_SECONDS)
    except OSError as error:
        warn_once(
            logger, f"key moments cannot be kept in {path.parent} ({error}): they will be collected in every process"
        )
    return moments


def _say_tokens(prompt: str, reason: str) -> None:
    """Warn that moments are those of tokens instead of words."""
    warn_once(
        logger,
        f"moments={prompt!r} are those of ordinary tokens instead of words, which is moments="
        f"{TOKENS_FOR_WORDS[prompt]!r}: {reason}. qada_cache.prepare(model, tokenizer, moments={prompt!r}) takes "
        "another tokenizer",
    )


def _find_cached(model: PreTrainedModel, prompt: str, path: Path | None) -> KeyMoments | None:
    """Moments from memory, else from the file; None if there are none."""
    own = _by_model.get(model, {}).get(prompt)
    if own is not None and own[0] == path:
        return own[1]
    return None if path is None else _remembered.get(path) or _read_moments(path)


def _remember(model: PreTrainedModel, prompt: str, path: Path | None, moments: KeyMoments) -> KeyMoments:
    """`moments`, after they were put into memory."""
    if path is None or moments.origin.get(LEFT):
        _by_model.setdefault(model, {})[prompt] = path, moments
        return moments
    _remembered.pop(path, None)  # the newest is the last
    _remembered[path] = moments
    if len(_remembered) > REMEMBERED:
        del _remembered[next(iter(_remembered))]
    return moments


def _read_moments(path: Path) -> KeyMoments | None:
    with suppress(OSError), files.open_folder(FOLDER) as folder:  # a warning comes with the first write to the folder
        try:
            moments = KeyMoments.from_file(*tensor_file.decode(files.read(folder, path.name), KIND, path), path)
            return None if moments.is_unchecked else moments
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            logger.warning("%s; collecting the moments again", error)
    return None


def _find_path(model: PreTrainedModel, prompt: str) -> Path | None:
    """The file of a model's moments; None, with a warning, if nothing identifies its weights."""
    start = identity.find_source(model.config) or model.config.model_type  # `find_moments` looks for files by it
    try:
        return find_home() / FOLDER / f"{start}-{prompt}-{identity.digest(model)}.safetensors"
    except UntoldWeightsError as error:
        warn_once(logger, f"key moments of this model are not kept, and every process collects them: {error}")
        return None
