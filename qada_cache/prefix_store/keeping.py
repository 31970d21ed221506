"""Writes segments of a cache's tokens that the folder does not have yet."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ..cache_file import encode_record
from ..said_once import warn_once
from ..sketch.codec import CODES
from ..state.snapshots import Snapshot
from .folder import Folder, Header, Layers, Listing
from .naming import EXACT, FILE_TOKENS, STATES, Name, name_segment, name_states

logger = logging.getLogger(__name__)


def store_row(
    folder: Folder,
    listing: Listing,
    *,
    root: str,
    tokens: Sequence[int],  # the row's tokens that are to be kept
    exact: int,  # the number of first tokens that were read exactly
    reading: str,  # how the other tokens were read, as by `describe_reading`
    sketch: str,  # of the cache, as by `sketches.digest_sketch`
    about: dict[str, Any],
    copy: Callable[[int, int], Layers],  # returns the row's tokens `start..stop`
    snapshots: Iterable[Snapshot],  # of sliding and linear layers, if these hold no other row
    max_bytes: int,
) -> tuple[int, int]:
    """Write missing segments, from the first on, and states. Returns the number of the row's tokens that are stored
    now, and the bytes written. A longer segment replaces a shorter one that it begins with. A file that cannot be
    written is the last one, with a warning."""
    chain = list[Name]()
    arguments: dict[str, Any] = {"exact": exact, "reading": reading, "about": about, "max_bytes": max_bytes}
    stored, written = _store_segments(
        folder, listing, chain, root=root, tokens=tokens, sketch=sketch, copy=copy, **arguments
    )
    whole = [root, *(name.own for name in chain[: stored // FILE_TOKENS])]
    starts = [FILE_TOKENS * number for number in range(len(whole))]
    arguments |= {"tokens": tokens[:stored], "chain": whole, "starts": starts}
    return stored, written + store_states(folder, listing, snapshots=snapshots, **arguments)


def _store_segments(
    folder: Folder,
    listing: Listing,
    chain: list[Name],
    *,
    root: str,
    tokens: Sequence[int],
    exact: int,
    reading: str,
    sketch: str,
    about: dict[str, Any],
    copy: Callable[[int, int], Layers],
    max_bytes: int,
) -> tuple[int, int]:
    """As `store_row`, without states; stored segments are added to `chain`."""
    parent, written = root, 0
    try:
        for start in range(0, len(tokens), FILE_TOKENS):
            part = list(tokens[start : start + FILE_TOKENS])
            known = min(max(exact - start, 0), len(part))
            header = Header(part, EXACT if known == len(part) else reading, known, "", about)
            name = Name(root[:16], len(chain), parent, name_segment(parent, part, header.reading))
            shorter: list[Name] = []
            if name not in listing.files:
                covering, shorter = _compare(folder, listing, header, parent)
                if covering is not None:  # `new` was the last segment of this text
                    return start + len(part), written
                layers = copy(start, start + len(part))
                if all(layer.keys() >= {*CODES} for layer in layers):
                    header = header._replace(sketch=sketch)
                size = write_segment(folder, listing, name, header, layers, max_bytes, chain, (start, len(tokens)))
                if not size:
                    return start, written
                written += size
            for each in shorter:
                folder.remove(listing, each)
            chain.append(name)
            parent = name.own
        return len(tokens), written
    finally:
        folder.touch(listing, chain)


def _compare(folder: Folder, listing: Listing, new: Header, parent: str) -> tuple[Name | None, list[Name]]:
    """Compare `new` with the stored segments after `parent`. Returns the one that holds all tokens of `new`, if `new`
    is not a whole segment. Else returns None, and the partial segments that `new` makes useless."""
    shorter: list[Name] = []
    for name, old in folder.list_following(listing, parent):
        fewer = min(len(old.tokens), len(new.tokens))
        if old.has_states or old.tokens[:fewer] != new.tokens[:fewer]:
            continue
        if _serves(old, new) and len(new.tokens) < FILE_TOKENS:
            folder.touch(listing, [name])
            return name, []
        if _serves(new, old) and len(old.tokens) < FILE_TOKENS:
            shorter.append(name)
    return None, shorter


def _serves(one: Header, other: Header) -> bool:
    """Whether each cache that may use tokens of `other` may use as many of `one`, which begins with the same tokens."""
    return all(
        one.count_usable(reading) >= other.count_usable(reading)
        for reading in ("that of neither", other.reading, one.reading)
    )


def store_states(
    folder: Folder,
    listing: Listing,
    *,
    tokens: Sequence[int],  # the row's stored tokens
    chain: Sequence[str],  # the root, then the names of the whole segments that hold these tokens
    starts: Sequence[int],  # for each name of `chain`, the number of tokens up to the end of its segment
    exact: int,
    reading: str,
    about: dict[str, Any],
    snapshots: Iterable[Snapshot],
    max_bytes: int,
) -> int:
    """Write the states of sliding and linear layers after beginnings of `tokens`; returns the bytes written. A file
    that cannot be written is the last one, with a warning."""
    written, spared, kept = 0, [name for name in listing.files if name.own in chain], list[Name]()
    if rest := list(tokens[starts[-1] :]):  # states are useless without the tokens before them, so these are spared
        behind = folder.list_following(listing, chain[-1])
        spared += [name for name, each in behind if not each.has_states and each.tokens[: len(rest)] == rest]
    for snapshot in sorted(snapshots, key=lambda each: -each.tokens):  # a next turn begins at the newest
        if snapshot.tokens > len(tokens):
            continue
        how = EXACT if snapshot.tokens <= exact else reading
        names = name_states(chain, starts, tokens[: snapshot.tokens], how)
        if (name := next((each for each in names if each in listing.files), None)) is None:
            name, parts = names[0], dict[str, Any]()
            others = {str(index): snapshot.read(index, {}) for index in snapshot.layers}
            state = encode_record(others, "states", parts)
            header = Header(list(tokens[starts[name.number] : snapshot.tokens]), STATES + how, 0, "", about)
            try:
                size = _write(folder, listing, name, header, parts, max_bytes, spared + kept, states=state)
            except OSError as error:
                size = _warn(error)
            if not size:
                break
            written += size
        kept.append(name)
    folder.touch(listing, kept)
    return written


def write_segment(
    folder: Folder,
    listing: Listing,
    name: Name,
    header: Header,
    layers: Layers,
    max_bytes: int,
    chain: list[Name],
    held: tuple[int, int],
) -> int:
    """Write a segment after `chain` and make room for it; returns its bytes, or 0, with a warning, if there is no room,
    or it cannot be written. `held` are the numbers of tokens before it, and of the whole text."""
    parts = {f"{part} {at}": each for at, layer in enumerate(layers) for part, each in layer.items()}
    try:
        size = _write(folder, listing, name, header, parts, max_bytes, chain)
    except OSError as error:
        return _warn(error)
    if not size:
        warn_once(
            logger,
            f"of a prompt of {held[1]} tokens {held[0]} are kept, as its max_bytes ({max_bytes}) hold no more: give "
            f"more to the PrefixStore of {folder.path}",
        )
    return size


def _warn(error: OSError) -> int:
    """Warn that a file could not be written; 0, its bytes."""
    warn_once(logger, f"prompts cannot be kept: {error}")
    return 0


def _write(
    folder: Folder,
    listing: Listing,
    name: Name,
    header: Header,
    parts: Mapping[str, Tensor],
    max_bytes: int,
    spared: list[Name],
    **more: Any,
) -> int:
    """Write a file and make room for it; returns its bytes, or 0 if there is no room."""
    size = sum(part.nbytes for part in parts.values())
    if not folder.make_room(listing, max_bytes - size, set(spared)):
        return 0
    size = folder.write(listing, name, header, parts, **more)
    if not folder.make_room(listing, max_bytes, {*spared, name}):  # `size` did not count the header
        folder.remove(listing, name)
        return 0
    return size
