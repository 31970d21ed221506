"""Generation that keeps conversations between requests, for `generate(custom_generate=FOLDER)` and `serve`.

`generate` here keeps each call's QAdACache for the conversation's next turn, and otherwise calls `model.generate`.
transformers loads a custom `generate` from a folder that holds `custom_generate/generate.py`; this is such a folder.
"""

import contextlib
import functools
import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import utils
from transformers.generation.configuration_utils import GenerationMode
from transformers.utils import CHAT_TEMPLATE_DIR

from ..cache import QAdACache
from ..models import forgets_states, identity
from ..prefix_store.filling import keep_as_made
from ..said_once import warn_once
from ..versions import CACHE_NAMES, pass_cache
from .conversations import CONVERSATIONS, MEMORY, SECONDS, AllConversations, Limits, counters, find_conversations
from .memory import estimate_bytes, reserve_memory
from .storing import Store, Stored, find_store

__all__ = ["CONVERSATIONS", "FOLDER", "MEMORY", "SECONDS", "counters", "generate", "make_folder"]

FOLDER = str(Path(__file__).parent)  # `generate(custom_generate=...)` takes a str, and passes over a Path silently

# One of transformers' own loggers, so that `transformers serve --log-level info` shows its messages.
logger = logging.getLogger("transformers.qada_cache")

# Arguments of `generate` that change no keys or values: with them a cache still depends on the row's tokens alone.
_HARMLESS = {
    *("input_ids", "attention_mask", "tokenizer", "streamer", "logits_processor", "stopping_criteria"),
    *("prefix_allowed_tokens_fn", "negative_prompt_ids", "negative_prompt_attention_mask"),
}
_KINDS = ("mm_token_type_ids", "token_type_ids")  # per token, made by processors of models that read images: 0 is text


def generate(
    inputs: Tensor | None = None,
    generation_config: GenerationConfig | None = None,
    *,
    model: PreTrainedModel,
    cache_options: Mapping[str, Any] | None = None,
    conversations: int = CONVERSATIONS,
    conversations_memory: int | float = MEMORY,
    conversations_seconds: float = SECONDS,
    conversation_key: str | None = None,
    one_user: bool = True,
    conversations_store: Store = False,
    **arguments: Any,
) -> Any:
    """`model.generate` with a QAdACache, kept for the next call on the same text.

    A cache is kept if the call has one row of tokens and an attention mask of ones, decodes greedily or samples, and
    returns token ids alone. The next such call reads the new tokens of its prompt alone. Every other call gets a cache
    of its own, unless it brings one or wants none (`use_cache=False`): those are handed through as they are.

    A cache that was kept is passed over if weights have been replaced or written to since, as far as torch counts
    that. After a change of active adapters or of `weight.data`, call this once with `conversations=0`.

    A call that fails, or is stopped by its streamer, leaves what its cache holds of the prompt if it was whole then,
    else nothing. One that there is no memory for, although conversations made room, is refused before it begins.

    Args:
        inputs: as for `model.generate`.
        generation_config: as for `model.generate`.
        model: the model that generates.
        **arguments: as for `model.generate`.
        cache_options: of `QAdACache`.
        conversations: number of kept caches of this model, in memory by `cache_options`; 0: none, and kept ones are
            dropped.
        conversations_memory: bytes that they may take: an int, or a float in [0, 1], that share of the host's memory.
        conversations_seconds: for how long one is kept that nobody goes on with.
        conversation_key: of the conversation's owner. A call goes on with those of its own key alone. A request names
            it as an attribute of its generation config.
        one_user: whether all calls without a key are one user's, and may go on with each other's conversations. False:
            nothing of them is kept.
        conversations_store: a `PrefixStore` or its folder, True for the user's own: each turn is written to it before
            the call returns, and found by later processes. False: nothing is.

    Raises:
        ValueError: `conversations` or another limit is no such number, or the key no str; or the call decodes in a mode
            that is code of the Hub, without `trust_remote_code`, which transformers does not pass on to a folder.
        TypeError: `conversations_store` is nothing that can be a store.
        MemoryError: the call would take more memory than this process may still have.
        TypeError, ValueError, FileNotFoundError, NotImplementedError, RuntimeError: as `QAdACache` and
            `model.generate`.
    """
    limits = Limits(conversations, conversations_memory, conversations_seconds)
    kind: Any = type(model)  # the model's own `generate` may be this very function
    stock = functools.partial(kind.generate, model, inputs, generation_config)
    given_arguments = {name: value for name, value in arguments.items() if value is not None}
    if (prepare := getattr(kind, "_prepare_generation_config", None)) is None:
        warn_once(logger, "no conversations are kept: this transformers lacks _prepare_generation_config")
        return stock(**arguments)
    settings, others = prepare(model, generation_config, **given_arguments)
    mode = settings.get_generation_mode(arguments.get("assistant_model"))
    # Calls by a folder come without `trust_remote_code`, which transformers' `generate` would ask for again.
    if "/" in getattr(utils, "GENERATION_MODES_MAPPING", {}).get(mode, "") and not arguments.get("trust_remote_code"):
        raise ValueError(
            f"this folder's generation does not serve {mode.value}, which is code of the Hub: call generate without "
            "this custom_generate"
        )
    if given_arguments.keys() & set(CACHE_NAMES) or not settings.use_cache:
        return stock(**arguments)
    config, kind_name = model.config.get_text_config(decoder=True), model.config.model_type
    if getattr(config, "num_attention_heads", None) is None:  # older transformers pass such models no cache
        warn_once(logger, f"no conversations of {kind_name} are kept, which has no attention")
        return stock(**arguments)
    pool = find_conversations(model)
    kept = AllConversations(pool)
    key = getattr(settings, "conversation_key", None) if conversation_key is None else conversation_key
    if key is not None and not isinstance(key, str):
        raise ValueError(f"conversation_key must be a str, got {type(key).__name__}")
    if not conversations:
        pool.forget()
    ids = others.get("input_ids") if inputs is None else inputs
    keeps_cache = conversations and (one_user or key is not None)
    if keeps_cache and forgets_states(config):
        warn_once(logger, f"no conversations of {kind_name} are kept, whose linear layers forget states")
        keeps_cache = False
    prompt = _find_row(model, ids, settings, others) if keeps_cache else None
    conversation, store = None, find_store(conversations_store)
    if prompt is None:
        cache = QAdACache(model, **(cache_options or {}))
        rows, tokens = ids.shape[:2] if isinstance(ids, Tensor) and ids.dim() == 2 else (1, 0)
        rows *= max(settings.num_beams or 1, settings.num_return_sequences or 1)
    else:
        options = cache_options or {}
        terms: dict[str, Any] = {"options": keep_as_made(options) if store else options, "key": key}
        with identity.sample_once():
            stored = Stored(store, model, prompt, **terms)
            conversation = pool.take(model, prompt, limits=limits, stored=stored.tokens, **terms)
            if stored.tokens > conversation.cache.get_seq_length():
                conversation.cache = stored.restore(kept)
                pool.count_restored(conversation.cache.get_seq_length())
        cache, rows, tokens = conversation.cache, 1, len(prompt) - conversation.cache.get_seq_length()
        logger.info("%d of %d prompt tokens were kept from an earlier call", len(prompt) - tokens, len(prompt))
    chunk_tokens = min(tokens, settings.prefill_chunk_size or tokens)
    given_tokens = ids.shape[-1] if isinstance(ids, Tensor) else 0
    new_tokens = settings.max_new_tokens or max(0, (settings.max_length or 0) - given_tokens)
    all_tokens = rows * (tokens + new_tokens)
    needed = estimate_bytes(
        model,
        all_tokens,
        rows * chunk_tokens,
        cache.options.bulk_bits,
        offloading=cache.options.offloading,
        device_budget=cache.options.device_budget,
        held=0 if prompt is None else len(prompt) - tokens,
        rows=rows,
        snapshots=cache._shared.snapshots is not None,
    )
    try:
        with reserve_memory(tokens, needed, kept):
            output = stock(**arguments | pass_cache(cache))
    except BaseException:
        # The generated tokens are unknown here, so the cache is cropped to the prompt, or the part of it that was read.
        read = 0 if prompt is None else min(cache.get_seq_length(), len(prompt))
        if conversation is not None and prompt is not None and read:
            with contextlib.suppress(RuntimeError):  # its layers differ in tokens, or cannot be cropped: it is dropped
                if generated := cache.get_seq_length() - read:
                    cache.crop(-generated)
                else:  # some layers refuse even a crop of nothing
                    cache._check_whole()
                stored.keep(cache, prompt[:read])
                pool.keep(conversation, prompt[:read], limits)
        raise
    if conversation is not None:
        token_ids = output[0, : cache.get_seq_length()].cpu()
        stored.keep(cache, token_ids)  # before another thread may take it
        pool.keep(conversation, token_ids, limits)
    return output


def _find_row(model: PreTrainedModel, ids: Any, settings: GenerationConfig, others: Mapping[str, Any]) -> Tensor | None:
    """The call's token ids `[tokens]`, on the host, if its cache can be kept, else None. `settings` are the call's
    generation config, `others` its other arguments."""
    mask: Any = others.get("attention_mask")
    reads_images = model.config is not model.config.get_text_config(decoder=True)
    kinds = {name: others.get(name) for name in _KINDS if reads_images}
    text_only = {name for name, kind in kinds.items() if isinstance(kind, Tensor) and not kind.any()}  # no images
    plain = (
        settings.get_generation_mode() in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
        and settings.num_return_sequences in (None, 1)
        and not settings.return_dict_in_generate  # its result would hold the cache
        and settings.cache_implementation is None  # refused by `model.generate` beside a cache
        and not settings.token_healing  # it changes the prompt that a conversation would be found and kept by
        and others.keys() <= _HARMLESS | text_only
    )
    masked = plain and isinstance(ids, Tensor) and isinstance(mask, Tensor) and mask.shape == ids.shape
    if not masked or ids.dim() != 2 or len(ids) != 1 or not ids.numel() or ids.is_floating_point() or not mask.all():
        return None
    return ids[0].cpu()


def make_folder(model: str | os.PathLike, out: str | os.PathLike) -> None:
    """Make the folder `out`: links to the files of the model's folder, none of its code, and our `generate.py`.

    `--trust-remote-code` trusts all the code that a folder holds or names. So Python files are left out, and configs
    that name code are copied without these names.

    Raises:
        FileNotFoundError: `model` is no folder with a config.
        FileExistsError: `out` is there.
        ValueError: a config of the model is no JSON.
    """
    source, target = Path(model).resolve(), Path(out)
    if not (source / "config.json").is_file():
        which, way = (
            ("GGUF file", "python -m eval.convert") if source.is_file() else ("model of the Hub", "hf download")
        )
        raise FileNotFoundError(f"no model's folder at {model}: of a {which}, `{way}` makes one")
    target.mkdir(parents=True)  # must be new, as an older folder may hold code
    try:
        _fill_folder(source, target)
    except BaseException:
        shutil.rmtree(target)
        raise


def _fill_folder(source: Path, target: Path) -> None:
    code = "custom_generate"
    shutil.copytree(Path(FOLDER, code), target / code, ignore=shutil.ignore_patterns("__pycache__"))
    for file in sorted(source.iterdir()):
        if file.suffix == ".json" and (without_code := _drop_code(file)) is not None:
            (target / file.name).write_text(json.dumps(without_code, indent=2), encoding="utf-8")
        elif file.is_file() and not file.name.startswith(".") and file.suffix not in (".py", ".pyc", ".so"):
            (target / file.name).symlink_to(file)
    for file in sorted((source / CHAT_TEMPLATE_DIR).glob("*.jinja")):  # those for tools, and others by name
        (target / CHAT_TEMPLATE_DIR).mkdir(exist_ok=True)
        (target / CHAT_TEMPLATE_DIR / file.name).symlink_to(file)


def _drop_code(file: Path) -> Any:
    """The config in `file` without `auto_map`, which names code in the folder or on the Hub; None if it has none."""
    text = file.read_text(encoding="utf-8")
    try:
        config = json.loads(text, object_hook=lambda each: {name: each[name] for name in each if name != "auto_map"})
        return None if config == json.loads(text) else config
    except json.JSONDecodeError as error:
        if '"auto_map"' in text:  # without it, it is no config: transformers cannot read it either
            raise ValueError(f"{file} is no JSON: {error}") from error
        return None
