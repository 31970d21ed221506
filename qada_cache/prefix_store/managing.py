"""Summarises for its user what a store's folder holds."""

import time
from collections import defaultdict
from dataclasses import dataclass

from .folder import File, Folder, Listing


@dataclass(frozen=True)
class StoreStats:
    """Counts of one `PrefixStore` since it was made, and what its folder holds now.

    Attributes:
        prompts: rows that `cache` was asked for; hits: rows of them whose beginning was stored.
        prompt_tokens: tokens of all these rows; saved_tokens: those of them that need not be read again.
        written_bytes: of files that `keep` wrote.
        segments: number of files in the folder; bytes: of their contents.
    """

    prompts: int
    hits: int
    prompt_tokens: int
    saved_tokens: int
    written_bytes: int
    segments: int
    bytes: int


@dataclass(frozen=True)
class StoredPrompts:
    """Prompts of one model and owner.

    Attributes:
        id: a word for the model and the owner.
        model: the path or repository that it was loaded from; type: its config's; dtype: its own.
        keyed: whether the prompts were kept under a key.
        tokens: in all segments, common beginnings once; segments: number of files; bytes: of these.
        used: time of the last use of any, in seconds since the epoch.
    """

    id: str
    model: str
    type: str
    dtype: str
    keyed: bool
    tokens: int
    segments: int
    bytes: int
    used: float

    def make_row(self) -> dict[str, str]:
        """The row of a table that lists stored prompts: texts by column."""
        return {
            "id": self.id,
            "model": self.model or self.type,
            "dtype": self.dtype.removeprefix("torch."),
            "key": "yes" if self.keyed else "no",
            "tokens": f"{self.tokens:,}",
            "MiB": f"{self.bytes / 2**20:,.1f}",
            "used": time.strftime("%Y-%m-%d %H:%M", time.localtime(self.used)),
        }


def summarise(folder: Folder, listing: Listing) -> list[StoredPrompts]:
    """Stored prompts by model and owner, without files that cannot be read."""
    groups: dict[str, list[File]] = defaultdict(list)
    for file in listing.files.values():
        groups[file.name.root].append(file)
    found = []
    for root, files in groups.items():
        headers = []
        for file in files:
            try:
                headers.append(folder.read_header(file.name))
            except (OSError, ValueError):
                continue
        if headers:
            about = {name: headers[0].about.get(name, "") for name in ("model", "type", "dtype", "keyed")}
            tokens = sum(len(header.tokens) for header in headers if not header.has_states)
            size = sum(file.bytes for file in files)
            used = max(file.used for file in files) / 1e9
            found.append(StoredPrompts(root, **about, tokens=tokens, segments=len(files), bytes=size, used=used))
    return sorted(found, key=lambda each: -each.used)


def verify(folder: Folder, listing: Listing) -> tuple[int, list[str]]:
    """Read every segment; remove damaged ones and the segments behind them. Returns the number of whole segments, and
    the faults of the others."""
    whole, wrong = 0, []
    for name in sorted(listing.files, key=lambda name: name.number):
        if name not in listing.files:  # it was behind a damaged one
            continue
        try:
            (folder.read_whole if folder.read_header(name).has_states else folder.read)(name)
            whole += 1
        except FileNotFoundError:  # another process removed it
            listing.remove(name)
        except OSError as error:
            wrong.append(str(error))
        except ValueError as error:
            wrong.append(str(error))
            for each in listing.find_behind(name):
                folder.remove(listing, each)
    return whole, wrong
