"""Finds the longest stored beginning of a prompt. A segment's name holds its parent's, so names alone give a chain."""

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from torch import Tensor

from ..sketch.codec import CODES
from ..state import Options
from .coded import describe_coded, find_edge
from .folder import CODED, Folder, Header, Layers, Listing
from .naming import EXACT, FILE_TOKENS, STATES, Name, describe_reading, name_segment
from .sketches import digest_sketch

logger = logging.getLogger(__name__)

# Tokens. Shorter beginnings, as chats share by their template, are read faster by the model than from a file.
WORTH = 32
READERS = 4  # threads that read files
Step = tuple[Name, int]  # a segment of a chain, and the number of its first tokens that are taken


@dataclass
class Beginning:
    """The stored beginning of one row."""

    pieces: list[tuple[Layers, int]] = field(default_factory=list)  # as for `filling.fill`
    exact: int = 0  # the number of first tokens that were read exactly
    # States of sliding and linear layers after the tokens, as for `filling.restore_states`.
    states: dict[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """The number of its tokens."""
        return sum(taken for _, taken in self.pieces)

    def crop(self, tokens: int) -> None:
        """Keep the first `tokens`."""
        before, self.exact = 0, min(self.exact, tokens)
        cropped = []
        for layers, taken in self.pieces:
            if before < tokens:
                cropped.append((layers, min(taken, tokens - before)))
            before += taken
        self.pieces = cropped


class Finder:
    """Looks for the beginnings of several rows, and reads each file once."""

    def __init__(
        self,
        folder: Folder,
        listing: Listing,
        options: Options,
        *,
        root: str,
        fits: Callable[[Layers], bool],
        read_states: Callable[[Name, Any, dict[str, Tensor]], dict[int, dict[str, Any]]],
        needs_states: bool,
        coded: bool,
    ) -> None:
        """`options` are those of the cache to fill, and `fits(layers)` returns whether stored layers fit it.
        `read_states` is `filling.read_states` for it. With `needs_states` the cache has sliding or linear layers too,
        so a beginning counts only with their states. With `coded`, tokens in few bits count too, if the cache's bulk is
        in few bits."""
        self.folder, self.listing, self.root, self._fits = folder, listing, root, fits
        self._read_states = read_states
        self.reading = EXACT if options.codes_tokens else describe_reading(options)
        self._coded = describe_coded(options) if coded and options.codes_tokens else None
        self._sketch, self._sinks, self.needs_states = digest_sketch(options), options.sink_tokens, needs_states
        self._read: dict[Name, tuple[Header, Layers]] = {}

    def find(self, tokens: Sequence[int], most: int) -> Beginning:
        """The longest stored beginning of `tokens`, at most `most` of them. Removes damaged files and the segments
        after them, with a warning."""
        while True:
            beginning = Beginning()
            path, states = self._find(tokens, most)
            self.folder.touch(self.listing, [name for name, _ in path if name in self.listing.files])
            if states is not None:
                try:
                    _, tensors, fields = self.folder.read_whole(states)
                    beginning.states = self._read_states(states, fields.get("states"), tensors)
                    self.folder.touch(self.listing, [states])
                except (OSError, ValueError) as error:
                    self._drop(states, error)
                    continue
            missing = [name for name, _ in path if name not in self._read]
            with ThreadPoolExecutor(READERS) as pool:
                read = [
                    self._take(name, result)
                    for name, result in zip(missing, pool.map(self._load, missing), strict=True)
                ]
            if all(read):
                break  # else `_take` removed a damaged segment from the listing, and the next try ends before it
        for name, taken in path:
            header, layers = self._read[name]
            if beginning.exact == beginning.tokens:
                beginning.exact += min(header.exact, taken)
            beginning.pieces.append((layers, taken))
        return beginning

    def count(self, tokens: Sequence[int], most: int) -> int:
        """The number of tokens of the longest stored beginning. Reads only headers."""
        return sum(taken for _, taken in self._find(tokens, most)[0])

    def _find(self, tokens: Sequence[int], most: int) -> tuple[list[Step], Name | None]:
        """The chain of the longest stored beginning, and the file of states after it if states are needed."""
        candidates = [self._end_at_states(self._find_longest(tokens, most), tokens, {self.reading, EXACT})]
        if self._coded is not None:
            for path in self._find_coded(tokens[:most], self._coded):
                candidates.append(self._end_at_states(path, tokens, {self._coded}))
        return max(candidates, key=lambda each: sum(taken for _, taken in each[0]))

    def _end_at_states(
        self, path: list[Step], tokens: Sequence[int], readings: set[str]
    ) -> tuple[list[Step], Name | None]:
        """If states are needed, `path` up to the last position for which states of one of the `readings` are stored,
        and their file. Else `path` and None."""
        if not self.needs_states:
            return path, None
        starts = [0, *accumulate(taken for _, taken in path)]
        longest, states = 0, None
        for start, parent in zip(starts, [self.root, *(name.own for name, _ in path)], strict=True):
            for name in list(self.listing.following.get(parent, [])):
                if (header := self._read_header(name)) is None or not header.has_states:
                    continue
                end = start + len(header.tokens)
                fits = header.reading.removeprefix(STATES) in readings and longest < end <= starts[-1]
                if fits and list(tokens[start:end]) == header.tokens:
                    longest, states = end, name
        if longest < WORTH:
            return [], None
        cropped = [(name, min(taken, longest - start)) for start, (name, taken) in zip(starts, path, strict=False)]
        return [step for step in cropped if step[1] > 0], states

    def _find_longest(self, tokens: Sequence[int], most: int) -> list[Step]:
        """The longest chain of at least `WORTH` tokens; among equally long ones, one that was read exactly."""
        longest: list[Step] = []
        most_tokens, stack = 0, [(self.root, list[Step]())]  # depth first: chains of whole segments
        while stack:
            parent, path = stack.pop()
            length = len(path) * FILE_TOKENS
            rest = tokens[length:most]
            following = self.listing.following.get(parent, [])
            whole = []
            if len(rest) >= FILE_TOKENS:
                by_own = {name.own: name for name in following}
                # The exact reading comes last, so it is popped first.
                wanted = [name_segment(parent, rest[:FILE_TOKENS], reading) for reading in (self.reading, EXACT)]
                whole = [by_own[own] for own in dict.fromkeys(wanted) if own in by_own]
            if whole:
                stack += [(name.own, [*path, (name, FILE_TOKENS)]) for name in whole]
                continue
            # No whole segment goes on: the chain ends with the one that shares most of the remaining tokens.
            shared = {name: self._count_shared(name, rest, self.reading) for name in list(following)} if rest else {}
            last = max(shared, key=lambda name: shared[name], default=None)
            if last is not None and shared[last]:
                path, length = [*path, (last, shared[last])], length + shared[last]
            if length > most_tokens and length >= WORTH:
                longest, most_tokens = path, length
        return longest

    def _find_coded(self, tokens: Sequence[int], reading: str) -> Iterator[list[Step]]:
        """Chains of at least `WORTH` tokens: segments in few bits, then the beginning of one more file. Yields one for
        each number of segments, as fewer segments with a longer last part may hold more tokens."""
        path, parent = list[Step](), self.root
        while True:
            start, stop = (find_edge(self._sinks, len(path) + more) for more in (0, 1))
            following = list(self.listing.following.get(parent, []))
            rest = tokens[start:]
            shared = {name: self._count_shared(name, rest, reading) for name in following} if rest else {}
            last = max(shared, key=lambda name: shared[name], default=None)
            chain = [*path, (last, shared[last])] if last is not None and shared[last] else list(path)
            if sum(taken for _, taken in chain) >= WORTH:
                yield chain
            own = name_segment(parent, tokens[start:stop], reading) if stop <= len(tokens) else ""
            name = next((name for name in following if name.own == own), None)
            if name is None or (header := self._read_header(name)) is None or header.sketch != CODED:
                return
            path.append((name, stop - start))
            parent = own

    def _read_header(self, name: Name) -> Header | None:
        """A file's header. If it cannot be read, None, and the file leaves the listing."""
        try:
            return self.folder.read_header(name)
        except (OSError, ValueError) as error:
            self._drop(name, error)
            return None

    def _count_shared(self, name: Name, rest: Sequence[int], reading: str) -> int:
        """The number of first tokens that a segment and `rest` share and a cache of this `reading` may take; 0 if the
        segment cannot be read."""
        if (header := self._read_header(name)) is None:
            return 0
        usable = header.tokens[: header.count_usable(reading)]
        pairs = enumerate(zip(usable, rest, strict=False))
        return next((place for place, (one, other) in pairs if one != other), min(len(usable), len(rest)))

    def _load(self, name: Name) -> tuple[Header, Layers] | Exception:
        """A segment, or why it cannot be read."""
        try:
            known = self.folder.read_header(name)
            header, layers = self.folder.read(name)
            if (header.exact, header.sketch) != (known.exact, known.sketch):
                raise FileNotFoundError(f"{name} was replaced by a file that was read otherwise")
            if header.sketch not in (self._sketch, CODED):
                layers = [{part: tensor for part, tensor in layer.items() if part not in CODES} for layer in layers]
            if not self._fits(layers):
                raise ValueError(f"{name} holds keys or values of another shape or dtype than the model's")
            return header, layers
        except (OSError, ValueError) as error:
            return error

    def _take(self, name: Name, result: tuple[Header, Layers] | Exception) -> bool:
        """Keep the segment that `_load` read. If it could not, False, and the segment leaves the listing."""
        if isinstance(result, Exception):
            self._drop(name, result)
            return False
        self._read[name] = result
        return True

    def _drop(self, name: Name, error: Exception) -> None:
        """Remove a segment that cannot be read from the listing. If it is damaged, its file goes too, and all segments
        after it, so that the prompt can be stored again."""
        if isinstance(error, ValueError):
            logger.warning("a stored prompt is read again from segment %d on: %s", name.number, error)
            for each in self.listing.find_behind(name):
                self.folder.remove(self.listing, each)
            return
        self.listing.remove(name)
        if not isinstance(error, FileNotFoundError):  # which another process removed
            logger.warning("a stored prompt is read again from segment %d on: %s", name.number, error)
