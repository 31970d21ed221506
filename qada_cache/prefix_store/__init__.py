"""PrefixStore: prompts that were read once, kept in a folder for later prompts with a common beginning.

`naming` names stored tokens, `folder` has their files, `filling` copies tokens out of caches and into them. A file
holds the unchanged keys and values of one segment of tokens. Each cache makes sinks, window and moments from them,
under its own options. Codes of the sketch take longest to make, so `sketches` stores those of whole segments. States
of sliding and linear layers, after some beginnings, have files of their own.
"""

import logging
import os
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..cache import QAdACache
from ..models import unwrap_model
from ..models.asking import UntoldWeightsError
from ..said_once import warn_once
from ..state.snapshots import EVERY
from .checking import check, find_real_rows
from .filling import fill, flush, has_shapes, keep_as_made, list_layers, read_states, restore_states, store_tokens
from .finding import Beginning, Finder
from .folder import Folder, Header, Listing, open_store
from .managing import StoredPrompts, StoreStats, summarise, verify
from .naming import Name, name_root

logger = logging.getLogger(__name__)

MAX_BYTES, MAX_AGE = 16 * 2**30, 30 * 24 * 3600.0  # bytes of all files; seconds since a file was last used


class PrefixStore:
    """Prompts that were read once, kept in a folder: a later prompt, in any process, reads only what differs.

        store = PrefixStore()
        cache = store.cache(model, inputs.input_ids)  # holds the longest stored beginning
        out = model.generate(**inputs, cache=cache)
        store.keep(cache, out)  # for later prompts

    A prompt's keys and values are found by its tokens, the model (config, dtype, sampled weights, adapters) and `key`.
    A file that cannot be read or written costs a warning and the time to read the prompt. Answers stay right.

    Args:
        folder: None: "prompts" in the user's cache folder (`QADA_HOME`). It is made for the user alone, and is not used
            if it is another user's, or if others can write to it.
        max_bytes: limit of its files together; the least recently used ones are removed.
        max_age: seconds after which an unused file is removed; None: never.
        snapshot_tokens: how far apart states of sliding and linear layers are stored near the end of a long prompt.

    Raises:
        ValueError: a limit is out of its range.
    """

    def __init__(
        self,
        folder: str | os.PathLike | None = None,
        *,
        max_bytes: int = MAX_BYTES,
        max_age: float | None = MAX_AGE,
        snapshot_tokens: int = EVERY,
    ) -> None:
        if type(max_bytes) is not int or max_bytes < 0:
            raise ValueError(f"max_bytes must be an int, 0 or more, got {max_bytes!r}")
        if max_age is not None and (type(max_age) not in (int, float) or not max_age >= 0):
            raise ValueError(f"max_age must be seconds, 0 or more, or None, got {max_age!r}")
        if type(snapshot_tokens) is not int or snapshot_tokens < 1:
            raise ValueError(f"snapshot_tokens must be an int, 1 or more, got {snapshot_tokens!r}")
        self.snapshot_tokens = snapshot_tokens
        self.folder = None if folder is None else Path(folder).absolute()
        self.max_bytes, self.max_age = max_bytes, max_age
        self._headers: dict[Name, Header] = {}
        self._counters: Counter[str] = Counter()
        self._lock = threading.RLock()
        self._cleaned = False

    def cache(
        self,
        model: PreTrainedModel,
        input_ids: Tensor | Sequence[int],
        *,
        attention_mask: Tensor | None = None,
        key: str | None = None,
        **options: Any,
    ) -> QAdACache:
        """A cache that holds the longest stored beginning of `input_ids`, or an empty one.

        At least the last token is left to be read. Rows of a batch may have different beginnings, and left padding.
        `generate` reads the same columns of every row, so reading starts in the first column where a beginning ends.

        Args:
            model: as for `QAdACache`.
            input_ids: `[tokens]` or `[rows, tokens]`, as for `generate`.
            attention_mask: `[rows, tokens]`, 0 at padding, which has to be on the left.
            key: the owner's, any text. Only prompts that were kept under this key are found.
            options: of `QAdACache`.

        Raises:
            ValueError: `input_ids` are not of these shapes, the mask is of another, or padding is not on the left.
            TypeError: `key` is no str.
            NotImplementedError: a model or prompt whose keys depend on more than the tokens before them, or a model
                that is split over processes.
            TypeError, ValueError, FileNotFoundError, NotImplementedError: as `QAdACache`.
        """
        rows, columns = find_real_rows(input_ids, attention_mask)
        return self.begin(model, rows, columns, most=columns - 1, key=key, **options)

    def begin(
        self,
        model: PreTrainedModel,
        rows: Sequence[Sequence[int]],
        columns: int,
        *,
        most: int,
        key: str | None = None,
        **options: Any,
    ) -> QAdACache:
        """As `cache`, for `rows` of real tokens, right-aligned in `columns`, of which it holds at most `most`."""
        model = unwrap_model(model)
        cache, beginnings = QAdACache(model, **keep_as_made(options)), [Beginning() for _ in rows]
        cache.keep_snapshots(self.snapshot_tokens)
        alone = [*map(len, rows)] == [columns]  # without padding
        with self._make_finder(cache, model, rows, key, coded=alone) as finder:
            if finder is not None and (alone or not finder.needs_states):
                beginnings = [finder.find(row, most - columns + len(row)) for row in rows]
        ends = [columns - len(row) + each.tokens for row, each in zip(rows, beginnings, strict=True)]
        columns_held = min(ends, default=0)
        tokens_held = [max(columns_held - columns + len(row), 0) for row in rows]
        for each in beginnings:
            restore_states(cache, each.states)
        if any(tokens_held):
            for each, tokens in zip(beginnings, tokens_held, strict=True):
                each.crop(tokens)
            fill(cache, [each.pieces for each in beginnings], [each.exact for each in beginnings], columns_held)
        with self._lock:
            self._counters.update(prompts=len(rows), hits=sum(map(bool, tokens_held)))
            self._counters.update(prompt_tokens=sum(map(len, rows)), saved_tokens=sum(tokens_held))
        return cache

    def count(self, model: PreTrainedModel, tokens: Sequence[int], *, key: str | None = None, **options: Any) -> int:
        """How many tokens of one row `cache` would hold if no file is damaged. Reads only headers."""
        model = unwrap_model(model)
        cache = QAdACache(model, **keep_as_made(options))
        with self._make_finder(cache, model, [tokens], key, coded=True) as finder:
            return 0 if finder is None else finder.count(tokens, len(tokens) - 1)

    def keep(self, cache: QAdACache, token_ids: Tensor | Sequence[int], *, key: str | None = None) -> int:
        """Keep a cache's tokens for later prompts; returns how many are now stored of all rows, earlier ones included.

        Tokens that are already stored are not written again. Tokens that were decoded, or read in calls of at most a
        window, depend on the cache's decisions: only caches of the same deciding options find them, and those of a
        `fork` are not kept. `cache` then goes on as these do: tokens that wait beside its window go to the bulk. If the
        disk or `max_bytes` has no room for a whole prompt, its beginning is kept.

        Args:
            cache: of one row, or of rows without padding.
            token_ids: `[tokens]` or `[rows, tokens]`: the cache's tokens from the first on; more may follow, as in the
                output of `generate`.
            key: as for `PrefixStore.cache`.

        Raises:
            RuntimeError: a forward pass was interrupted, so there is no whole state.
            ValueError: `token_ids` have another number of rows than the cache, or fewer tokens.
            NotImplementedError: padding, or as for `PrefixStore.cache`.
        """
        rows, columns = find_real_rows(token_ids, None)
        cache._check_whole()
        layers = list_layers(cache, rows=len(rows))
        seen, store = cache.get_seq_length(), layers[0].store
        if store is None:
            return 0
        if columns < seen or len(rows) != store.batch:
            raise ValueError(
                f"token_ids are {len(rows)} rows of {columns} tokens, and the cache holds {store.batch} rows of {seen}"
            )
        if layers[0].padding.known.numel() or (layers[0].stores_padding and seen and 0 in store.alike):
            raise NotImplementedError(
                "PrefixStore keeps no caches with padding, as it may have moved positions, and of models with an "
                "indexer none whose mask was the caller's own, or compiled: keep rows one by one"
            )
        return self.keep_rows(cache, {place: row[:seen] for place, row in enumerate(rows)}, key=key)

    def keep_rows(self, cache: QAdACache, rows: dict[int, Sequence[int]], *, key: str | None = None) -> int:
        """As `keep`, for some rows of the cache: `rows` has their first real tokens, by the row's index."""
        model = cache._shared.model.get()
        if model is None:
            raise ValueError("a cache that was built with config= cannot be kept: build it with the model")
        check(cache, model, list(rows.values()), key)
        store, stored_tokens = list_layers(cache)[0].store, 0
        if store is None:
            return 0
        if unlike := {*store.dtypes} - {model.dtype}:
            warn_once(
                logger,
                f"prompts are not kept whose keys are in {min(map(str, unlike))}, as under autocast, and not in the "
                f"model's {model.dtype}: load the model in that dtype",
            )
            return 0
        try:
            root = name_root(model, key)
        except UntoldWeightsError as error:
            warn_once(logger, f"prompts of this model are not kept: {error}")
            return 0
        flush(cache)
        origin, kind = getattr(model.config, "_name_or_path", ""), model.config.model_type
        about = {"model": origin, "type": kind, "dtype": str(model.dtype), "keyed": key is not None}
        try:
            with self._open(make=True) as folder:
                listing = folder.list(self.max_age)
                arguments: dict[str, Any] = {"root": root, "about": about, "max_bytes": self.max_bytes}
                for place, row in rows.items():
                    tokens, written = store_tokens(folder, listing, cache, place, row, **arguments)
                    stored_tokens += tokens
                    with self._lock:
                        self._counters["written_bytes"] += written
        except OSError as error:
            warn_once(logger, f"prompts cannot be kept: {error}")
        return stored_tokens

    def stats(self) -> StoreStats:
        """Counts of this store, and its folder's files and bytes: 0 if the folder cannot be read."""
        try:
            with self._open() as folder:
                listing = folder.list()
        except OSError:
            listing = Listing()
        names = ("prompts", "hits", "prompt_tokens", "saved_tokens", "written_bytes")
        with self._lock:
            counted = {name: self._counters[name] for name in names}
        return StoreStats(**counted, segments=len(listing.files), bytes=listing.bytes)

    def prompts(self) -> list[StoredPrompts]:
        """Stored prompts by model and owner, the last used first. An OSError if the folder cannot be read."""
        with self._open() as folder:
            return summarise(folder, folder.list())

    def drop(self, ids: Iterable[str] | None = None) -> int:
        """Remove the prompts with these `StoredPrompts.id`, None: all; returns the number of files. Caches that hold
        them do not change. An OSError if the folder cannot be read, or files are left."""
        wanted = None if ids is None else set(ids)
        with self._open() as folder:
            listing = folder.list()
            removed = [name for name in listing.files if wanted is None or name.root in wanted]
            for name in sorted(removed, key=lambda name: -name.number):  # no chain is broken meanwhile
                folder.remove(listing, name)
            if left := folder.list().files.keys() & {*removed}:
                raise OSError(f"{len(left)} of {len(removed)} files of {folder.path} could not be removed")
        return len(removed)

    def verify(self) -> tuple[int, list[str]]:
        """Read every file; remove damaged ones and the segments behind them. Returns the number of whole files, and the
        faults of the others. An OSError if the folder cannot be read."""
        with self._open() as folder:
            listing = folder.list()
            return verify(folder, listing)

    @contextmanager
    def _make_finder(
        self, cache: QAdACache, model: PreTrainedModel, rows: Sequence[Sequence[int]], key: str | None, *, coded: bool
    ) -> Iterator[Finder | None]:
        """A `Finder` of beginnings of `rows` for an empty cache, with `coded` in few bits too; None if no stored prompt
        can be used."""
        check(cache, model, rows, key)
        with ExitStack() as stack:
            finder = None
            try:
                if not torch.is_autocast_enabled(model.device.type):  # keys may be of another dtype then
                    folder = stack.enter_context(self._open())
                    listing, root = folder.list(self.max_age), name_root(model, key)
                    ours = [layer.index for layer in list_layers(cache)]
                    fits, needs_states = partial(has_shapes, model, cache.options, ours), len(ours) < len(cache.layers)
                    arguments: Any = {"root": root, "needs_states": needs_states, "coded": coded}
                    arguments |= {"fits": fits, "read_states": partial(read_states, cache)}
                    finder = Finder(folder, listing, cache.options, **arguments)
            except FileNotFoundError:
                pass  # nothing was kept yet
            except UntoldWeightsError as error:
                warn_once(logger, f"no stored prompts of this model are used: {error}")
            except OSError as error:
                warn_once(logger, f"no stored prompts are used: {error}")
            yield finder

    @contextmanager
    def _open(self, *, make: bool = False) -> Iterator[Folder]:
        """The folder. When it is first opened, remains of killed processes are removed."""
        with open_store(self.folder, self._headers, make=make) as folder:
            with self._lock:
                clean, self._cleaned = not self._cleaned, True
            if clean:
                folder.clean()
            yield folder
