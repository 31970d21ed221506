"""The folder of a store: files of segments, found by their names. The least recently used ones are removed."""

import os
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import files
from ..files import tensor_file
from ..sketch import SEGMENT_TOKENS
from ..sketch.codec import CODES
from .naming import EXACT, STATES, Name, name_segment

KIND = "qada-prompt"
CODED = "coded"  # for a sketch: the file holds a segment in few bits
FOLDER = "prompts"  # of `files.find_home()`
# One dict per layer, on the host: "keys" and "values" [kv_heads, tokens, dim]; the sketch of a segment, by `CODES`; and
# for a layer with an indexer that indexer's keys [1, tokens, dim], which are never in few bits.
Layers = list[dict[str, Tensor]]
INDEXER = "indexer_keys"


class Header(NamedTuple):
    """The header of a segment's file."""

    tokens: list[int]
    reading: str  # how tokens were read, `naming.EXACT` if all of them exactly
    exact: int  # number of first tokens that were read exactly
    sketch: str  # digest of the codes' options, by `sketches.digest_sketch`, or `CODED`; empty: the file has no codes
    about: dict[str, Any]  # the model, for people

    @property
    def has_states(self) -> bool:
        """Whether the file holds no segment, but states of sliding and linear layers after its tokens."""
        return self.reading.startswith(STATES)

    def count_usable(self, reading: str) -> int:
        """The number of first tokens that a cache may use if it reads by `reading`."""
        return len(self.tokens) if self.reading in (EXACT, reading) else self.exact


@dataclass(frozen=True)
class File:
    """A segment's file in the folder."""

    name: Name
    bytes: int
    used: int  # time of last use, in nanoseconds since the epoch


@dataclass
class Listing:
    """The files of a folder at one moment."""

    files: dict[Name, File] = field(default_factory=dict)
    following: dict[str, list[Name]] = field(default_factory=lambda: defaultdict(list))  # by their parents

    @property
    def bytes(self) -> int:
        """The bytes of all files."""
        return sum(file.bytes for file in self.files.values())

    def add(self, file: File) -> None:
        """Add a file, or replace the one of this name."""
        self.remove(file.name)
        self.files[file.name] = file
        self.following[file.name.parent].append(file.name)

    def remove(self, name: Name) -> None:
        """Remove a file from the listing, if it is there."""
        if self.files.pop(name, None) is not None:
            self.following[name.parent].remove(name)

    def find_behind(self, name: Name) -> list[Name]:
        """This segment and all segments whose chains contain it, the ends of chains first."""
        names = [name]
        for each in names:  # grows meanwhile
            names += self.following.get(each.own, [])
        return names[::-1]

    def find_orphans(self) -> list[Name]:
        """The segments that no chain from a first segment reaches."""
        present = {name.own for name in self.files}
        broken = [name for name in self.files if name.number and name.parent not in present]
        return [each for name in broken for each in self.find_behind(name)]

    def sort_by_use(self) -> list[File]:
        """All files, the least recently used first; a segment comes after all segments whose chains contain it."""
        used = {name.own: file.used for name, file in self.files.items()}
        for name in sorted(self.files, key=lambda name: -name.number):
            if name.parent in used:
                used[name.parent] = max(used[name.parent], used[name.own])
        return sorted(self.files.values(), key=lambda file: (used[file.name.own], -file.name.number))


class Folder:
    """An open folder that only its user can write to; for one thread. Every method may raise an OSError."""

    def __init__(self, descriptor: int, path: Path, headers: dict[Name, Header]) -> None:
        """`headers`: those that were read before, by name. Another process may replace a file, `exact` included."""
        self._descriptor, self.path, self._headers = descriptor, path, headers

    def list(self, max_age: float | None = None) -> Listing:
        """All segments of the folder, after removing those that were not used for `max_age` seconds."""
        listing = Listing()
        with os.scandir(self._descriptor) as entries:
            for entry in entries:
                if (name := Name.parse(entry.name)) is not None:
                    with suppress(FileNotFoundError):  # another process removed it
                        about = entry.stat(follow_symlinks=False)
                        listing.add(File(name, about.st_size, about.st_mtime_ns))
        for name in list(self._headers):  # in one step, as other threads may add some
            if name not in listing.files:  # else a server that runs for months would collect headers of removed files
                self._headers.pop(name, None)
        if max_age is not None:
            oldest = time.time_ns() - int(max_age * 1e9)
            for file in listing.sort_by_use():
                if file.used < oldest and not listing.following.get(file.name.own):
                    self.remove(listing, file.name)
        return listing

    def clean(self) -> None:
        """Remove unfinished files of killed processes, and segments whose chain is broken."""
        files.sweep(self._descriptor)
        if self.list().find_orphans():
            # Another process may have written a chain during the first listing, which then lacks the parent alone.
            listing = self.list()
            for name in listing.find_orphans():
                self.remove(listing, name)

    def remove(self, listing: Listing, name: Name) -> None:
        """Remove a segment. A process that has its file open can still read it."""
        listing.remove(name)
        with suppress(OSError):  # another process removed it, or it cannot be removed, and is listed again
            os.unlink(str(name), dir_fd=self._descriptor)

    def touch(self, listing: Listing, names: Sequence[Name]) -> None:
        """Set the time of use of these segments to now."""
        now = time.time_ns()
        for name in names:
            with suppress(OSError):  # another process removed it, or it cannot be written to
                os.utime(str(name), ns=(now, now), dir_fd=self._descriptor)
                listing.add(File(name, listing.files[name].bytes, now))

    def read_header(self, name: Name) -> Header:
        """The file's header; a ValueError if it is no segment's file, or another segment's than its name says."""
        if (header := self._headers.get(name)) is None:  # looked up once, as another thread may drop it
            with files.open_file(self._descriptor, str(name)) as file:
                header = _read_header(name, tensor_file.read_state(file, KIND, self.path / str(name)))
            self._headers[name] = header
        return header

    def list_following(self, listing: Listing, parent: str) -> Iterator[tuple[Name, Header]]:
        """The files after `parent` with their headers. Damaged files are left out; `Finder` removes them."""
        for name in list(listing.following.get(parent, [])):
            try:
                header = self.read_header(name)
            except (OSError, ValueError):
                continue
            yield name, header

    @torch.inference_mode(False)  # later passes write to states in place
    def read_whole(self, name: Name) -> tuple[Header, dict[str, Tensor], dict[str, Any]]:
        """A file's header, its tensors, and all fields of its own header; a ValueError if it is truncated, altered or
        of another name."""
        path = self.path / str(name)
        with files.open_file(self._descriptor, str(name)) as file:
            content = bytearray(os.fstat(file.fileno()).st_size)
            if file.readinto(content) != len(content):  # type: ignore[attr-defined]
                raise ValueError(f"{path} was truncated while it was read")
        tensors, state = tensor_file.view(content, KIND, path)
        header = self._headers[name] = _read_header(name, state)
        return header, tensors, state

    def read(self, name: Name) -> tuple[Header, Layers]:
        """A segment's header and layers; a ValueError as by `read_whole`."""
        header, tensors, _ = self.read_whole(name)
        path = self.path / str(name)
        names = ["keys", "values", *(CODES if header.sketch else ()), *(["records"] if header.sketch == CODED else [])]
        try:
            places = range(sum(name.startswith("keys ") for name in tensors))
            layers = [{name: tensors[f"{name} {place}"] for name in names} for place in places]
        except KeyError as error:
            raise ValueError(f"{path} lacks {error}") from error
        for place, layer in enumerate(layers):
            if (indexer_keys := tensors.get(f"{INDEXER} {place}")) is not None:
                layer[INDEXER] = indexer_keys
        if sum(map(len, layers)) != len(tensors):
            raise ValueError(f"{path} holds other tensors than its {len(layers)} layers")
        for layer in layers:
            keys, values = layer["keys"], layer["values"]
            fits = keys.dim() == values.dim() == 3 and keys.shape[:2] == values.shape[:2]
            # In a file in few bits, records hold the segment, and keys and values hold the sinks before it, if any.
            tokens = len(header.tokens) - (SEGMENT_TOKENS if header.sketch == CODED else 0)
            if not fits or keys.shape[1] != tokens or not keys.is_floating_point():
                raise ValueError(f"{path} holds keys {list(keys.shape)} beside values {list(values.shape)}")
            if (indexer_keys := layer.get(INDEXER)) is not None:
                fits = indexer_keys.is_floating_point() and indexer_keys.shape[:-1] == (1, len(header.tokens))
                if not fits:
                    raise ValueError(f"{path} holds keys of an indexer {indexer_keys.dtype} {list(indexer_keys.shape)}")
        return header, layers

    def write(
        self, listing: Listing, name: Name, header: Header, tensors: Mapping[str, tensor_file.FileTensor], **more: Any
    ) -> int:
        """Write a file, whole or not at all, with `more` in its own header; returns its bytes."""
        files.write(str(name), tensor_file.encode(KIND, tensors, header._asdict() | more), folder=self._descriptor)
        about = os.stat(str(name), dir_fd=self._descriptor)
        listing.add(File(name, about.st_size, about.st_mtime_ns))
        self._headers[name] = header
        return about.st_size

    def make_room(self, listing: Listing, size: int, spared: set[Name]) -> bool:
        """Remove the least recently used segments, but none of `spared`, until their files have at most `size` bytes.
        False if these have more."""
        if (total := listing.bytes) <= size:  # as before most files
            return True
        for file in listing.sort_by_use():
            if total <= size:
                break
            if file.name not in spared and not listing.following.get(file.name.own):
                self.remove(listing, file.name)
                total -= file.bytes
        return total <= size


def _read_header(name: Name, state: Any) -> Header:
    """The header in a file's `state`; a ValueError if it is no header, or its tokens are not those of `name`."""
    try:
        header = Header(**{part: each for part, each in state.items() if part != "states"})
        fits = [*map(type, header)] == [list, str, int, str, dict] and {*map(type, header.tokens)} == {int}
        fits = fits and 0 <= header.exact <= len(header.tokens)
        if fits and name_segment(name.parent, header.tokens, header.reading) == name.own:
            return header
    except (AttributeError, TypeError, OverflowError, RuntimeError):  # other fields, or tokens that are no int64
        pass
    raise ValueError(f"{name} does not hold the tokens that it is named by")


@contextmanager
def open_store(folder: Path | None, headers: dict[Name, Header], *, make: bool = False) -> Iterator[Folder]:
    """The folder at a path; None: in `files.find_home()`. An OSError unless only the user can write to it."""
    if folder is None:
        with files.open_folder(FOLDER, make=make) as descriptor:
            yield Folder(descriptor, files.find_home() / FOLDER, headers)
    else:
        with files.open_folder_at(folder, make=make) as descriptor:
            yield Folder(descriptor, folder, headers)
