"""Writes segments of a cache's tokens that the folder does not have yet."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from ..said_once import warn_once
from .folder import CODES, Folder, Header, Layers, Listing
from .naming import EXACT, SEGMENT_TOKENS, Name, name_segment

logger = logging.getLogger(__name__)


def store_row(
    folder: Folder,
    listing: Listing,
    *,
    root: str,
    tokens: Sequence[int],  # of a row, that are to be kept
    exact: int,  # of them, the first ones, that were read exactly
    reading: str,  # how the others were
    sketch: str,  # of the cache
    about: dict[str, Any],
    copy: Callable[[int, int], Layers],  # the row's tokens `start..stop`
    max_bytes: int,
) -> tuple[int, int]:
    """Write missing segments, from the first on; returns how many of the row's tokens are stored now, and the bytes
    written. A longer segment replaces a shorter one that it begins with. An OSError if a file cannot be written."""
    parent, chain, written = root, list[Name](), 0
    try:
        for start in range(0, len(tokens), SEGMENT_TOKENS):
            part = list(tokens[start : start + SEGMENT_TOKENS])
            known = min(max(exact - start, 0), len(part))
            header = Header(part, EXACT if known == len(part) else reading, known, "", about)
            name = Name(root[:16], len(chain), parent, name_segment(parent, part, header.reading))
            shorter: list[Name] = []
            if name not in listing.files:
                covering, shorter = _compare(folder, listing, header, parent)
                if covering is not None:  # the last segment, which others may follow in another text
                    return start + len(part), written
                layers = copy(start, start + len(part))
                if all(layer.keys() >= {*CODES} for layer in layers):
                    header = header._replace(sketch=sketch)
                size = _write(folder, listing, name, header, layers, max_bytes, chain)
                if not size:
                    warn_once(
                        logger,
                        f"of a prompt of {len(tokens)} tokens {start} are kept, as its max_bytes ({max_bytes}) hold no "
                        f"more: give more to the PrefixStore of {folder.path}",
                    )
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
    """A segment behind `parent` that holds the tokens of `new`, which is shorter than a whole one, if there is one; and
    those that hold less."""
    shorter: list[Name] = []
    for name in list(listing.following.get(parent, [])):
        try:
            old = folder.read_header(name)
        except (OSError, ValueError):  # it goes when it is looked for
            continue
        fewer = min(len(old.tokens), len(new.tokens))
        if old.tokens[:fewer] != new.tokens[:fewer]:
            continue
        if _serves(old, new) and len(new.tokens) < SEGMENT_TOKENS:
            folder.touch(listing, [name])
            return name, []
        if _serves(new, old) and len(old.tokens) < SEGMENT_TOKENS:
            shorter.append(name)
    return None, shorter


def _serves(one: Header, other: Header) -> bool:
    """Whether whoever may go on with tokens of `other` may go on with as many of `one`, which begins with the same."""
    return all(
        one.count_usable(reading) >= other.count_usable(reading) for reading in ("no other", other.reading, one.reading)
    )


def _write(
    folder: Folder, listing: Listing, name: Name, header: Header, layers: Layers, max_bytes: int, chain: list[Name]
) -> int:
    """Write a segment and make room for it; 0 if there is none."""
    size = sum(part.nbytes for layer in layers for part in layer.values())
    if not folder.make_room(listing, max_bytes - size, set(chain)):
        return 0
    size = folder.write(listing, name, header, layers)
    if not folder.make_room(listing, max_bytes, {*chain, name}):  # its header came on top
        folder.remove(listing, name)
        return 0
    return size
