"""Ways in which others may have come to what the cache folder holds."""

from collections.abc import Callable
from pathlib import Path


def link_away(path: Path) -> None:
    """A link to what was there."""
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


OPEN_TO_OTHERS: dict[str, Callable[[Path], object]] = {
    "written by all": lambda folder: folder.chmod(0o777),
    "written by a group": lambda folder: folder.chmod(0o770),
    "the outer one": lambda folder: folder.parent.chmod(0o777),
    "a link": link_away,
    "the outer one a link": lambda folder: link_away(folder.parent),
}
