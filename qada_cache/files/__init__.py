"""Files that are whole or not there, and the user's own cache folder, from which only the user's files are read."""

import os
import re
import secrets
import stat
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

LOCKS = sys.platform != "win32"  # whether a file can be locked, and replaced while it is open
if LOCKS:
    import fcntl

UNFINISHED = ".qada-part"  # how names of files that are being written end
_KERNELS = re.compile(r"[0-9a-f]{32}\.so")
KEPT_KERNELS = 128  # of some 100 KB: a model takes three or four
KEPT_BYTES = 256 << 20
KEPT_SECONDS = 90 * 24 * 3600.0  # unused; to build one again takes seconds
STALE_SECONDS = 3600  # an older unfinished file without a writer is a killed process's
LOCK_SECONDS = 0.05  # between looks at a lock
_locked: set[int] = set()  # descriptors of `lock`


def find_home() -> Path:
    """The folder of files kept between processes: `QADA_HOME`, else "qada" in the platform's folder for caches; for a
    user without a home folder, one of their own among temporary files."""
    if home := os.environ.get("QADA_HOME"):
        return Path(os.path.expanduser(home))  # unlike Path's, it leaves a `~user` that nobody knows
    caches = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        # A relative one is to be ignored, says the XDG base directory specification.
        if caches.is_absolute() and sys.platform != "darwin":
            return caches / "qada"
        return Path("~/Library/Caches/qada" if sys.platform == "darwin" else "~/.cache/qada").expanduser()
    except RuntimeError:  # in a container, a user may be a number that nothing is known of
        return Path(tempfile.gettempdir(), f"qada-{os.geteuid()}" if LOCKS else "qada")


@contextmanager
def open_folder(name: str, *, make: bool = False) -> Iterator[int]:
    """A descriptor of the folder `name` in `find_home()`, as by `open_folder_at`; both have to be the user's alone."""
    path = find_home()
    with open_folder_at(path, make=make) as outer, _open_own(name, path / name, outer, make) as inner:
        yield inner


@contextmanager
def open_folder_at(path: Path, *, make: bool = False) -> Iterator[int]:
    """A descriptor of the folder at `path`, valid even if that is renamed. `make`: create the folder, for the user
    alone. An OSError unless it is a folder, no link, and the user's alone (FileNotFoundError: there is none)."""
    if os.mkdir not in os.supports_dir_fd:
        raise OSError(f"who can write to {path} cannot be told on {sys.platform}")
    if make:
        path.parent.mkdir(parents=True, exist_ok=True)
    with _open_own(path, path, None, make) as folder:
        yield folder


@contextmanager
def _open_own(name: str | Path, path: Path, within: int | None, make: bool) -> Iterator[int]:
    if make:
        with suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=within)
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=within)
    except NotADirectoryError as error:
        raise NotADirectoryError(f"{path} is a link or no folder: give a folder (QADA_HOME)") from error
    try:
        _check_own(os.fstat(descriptor), path)
        yield descriptor
    finally:
        os.close(descriptor)


def _check_own(status: os.stat_result, path: str | Path) -> None:
    if status.st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to another user: give a folder of your own (QADA_HOME)")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"others than you can write to {path} (chmod go-w it if they did not)")


def read(folder: int, name: str) -> bytes:
    """The content of the file `name` of a folder, as by `open_file`. The file is marked as used."""
    with open_file(folder, name) as file:
        if os.utime in os.supports_fd:
            with suppress(OSError):  # a read-only file system
                os.utime(file.fileno())
        return file.read()


@contextmanager
def open_file(folder: int, name: str) -> Iterator[BinaryIO]:
    """The file `name` of a folder of `open_folder`, for reading; an OSError unless it is a file, and the user's
    alone."""
    # Not blocking: opening a pipe would wait for a writer.
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(f"{name} is not a regular file")
        _check_own(found, name)
        yield file


def remove_unused(folder: int, names: re.Pattern[str], *, count: int, size: int, seconds: float) -> None:
    """Remove the least recently used files of these names from a folder of `open_folder`, until at most `count` are
    left, of at most `size` bytes together, each used within the last `seconds`. The one used last stays in any case.
    Links and folders stay, and so does what cannot be removed. Other processes may do the same at once."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if names.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                with suppress(FileNotFoundError):  # another process was faster
                    about = entry.stat(follow_symlinks=False)
                    found.append((about.st_mtime, entry.name, about.st_size))
    together, oldest = 0, time.time() - seconds
    for place, (used, name, own) in enumerate(sorted(found, reverse=True)):
        together += own
        if place and (place >= count or together > size or used < oldest):
            with suppress(OSError):
                os.unlink(name, dir_fd=folder)


def remove_unused_kernels(folder: int) -> None:
    """`remove_unused` of the folder of compiled kernels. They are named by all that they were built from, so an upgrade
    of this package, of the compiler or of the processor leaves the old ones behind."""
    remove_unused(folder, _KERNELS, count=KEPT_KERNELS, size=KEPT_BYTES, seconds=KEPT_SECONDS)


def write(path: str | Path, content: Iterable[bytes | memoryview | int], *, folder: int | None = None) -> None:
    """Put `content` into the file `path`, whole or not at all; whoever reads meanwhile sees the old file or the new. A
    number in `content` is that many zeros, a hole if the file system has holes. A new file has the permissions of the
    umask, an old one keeps its own. In `folder`, a descriptor that `open_folder` gave, it is for the user alone."""
    head, name = os.path.split(path)
    beginning = f".{name[:100]}."
    if LOCKS:
        _sweep(folder if folder is not None else head or ".", beginning)
    # Beside the target, so that the rename cannot cross file systems.
    descriptor, unfinished = _begin(os.path.join(head, beginning), folder)
    try:
        with open(descriptor, "wb", closefd=not LOCKS) as file:
            if folder is None:
                with suppress(FileNotFoundError):
                    os.chmod(unfinished, stat.S_IMODE(os.stat(path).st_mode))
            for piece in content:
                if isinstance(piece, int):
                    file.seek(piece, os.SEEK_CUR)
                else:
                    file.write(piece)
            file.truncate()  # the file ends here, even if zeros were only sought past
        os.replace(unfinished, path, src_dir_fd=folder, dst_dir_fd=folder)  # while it is locked
    except BaseException:
        os.unlink(unfinished, dir_fd=folder)
        raise
    finally:
        if LOCKS:
            os.close(descriptor)


@contextmanager
def lock(folder: int, name: str, *, seconds: float) -> Iterator[None]:
    """Inside, the caller alone makes the file `name` of a folder of `open_folder`, among processes and threads. Waits
    until others have made it, for at most `seconds`, and goes on in either case. A killed process keeps nobody waiting.
    OSError, if nothing can be locked there."""
    if not LOCKS:
        raise OSError(f"files are not locked on {sys.platform}")
    unfinished, end = f".{name}.lock{UNFINISHED}", time.monotonic() + seconds
    while (descriptor := _try_lock(unfinished, folder)) is None and time.monotonic() < end:
        time.sleep(LOCK_SECONDS)
    try:
        yield
    finally:
        if descriptor is not None:
            _locked.discard(descriptor)
            with suppress(OSError):
                os.unlink(unfinished, dir_fd=folder)
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a forked process may have it, too
            os.close(descriptor)


def _try_lock(unfinished: str, folder: int) -> int | None:
    """A descriptor of this file, locked; None, if somebody else has locked it."""
    descriptor = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600, dir_fd=folder)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_nlink:  # else it was removed before it was locked
            _locked.add(descriptor)
            return descriptor
    except BlockingIOError:
        pass
    except OSError:  # a file system without locks
        os.unlink(unfinished, dir_fd=folder)
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _let_go() -> None:
    """Close all locks' descriptors in a forked process: else the locks would outlast the process that took them."""
    while _locked:
        os.close(_locked.pop())


if LOCKS:
    os.register_at_fork(after_in_child=_let_go)


def _begin(beginning: str, folder: int | None) -> tuple[int, str]:
    """A new unfinished file, locked for as long as this process lives and writes, and its name."""
    while True:
        name = f"{beginning}{secrets.token_hex(8)}{UNFINISHED}"
        flags, mode = os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if folder is None else 0o600
        descriptor = os.open(name, flags, mode, dir_fd=folder)
        if LOCKS:
            with suppress(OSError):  # a file system without them
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return descriptor, name
        os.close(descriptor)  # before it was locked, another process removed it as a killed one's


def sweep(folder: int) -> None:
    """Remove the unfinished files of killed processes from a folder of `open_folder`."""
    if LOCKS:
        _sweep(folder, ".")


def _sweep(folder: str | int, beginning: str) -> None:
    """Remove unfinished files of killed processes: those that no process has locked and whose name has this beginning,
    or which are older than `STALE_SECONDS`."""
    within = folder if isinstance(folder, int) else None
    with suppress(OSError), os.scandir(folder) as entries:  # a folder may be written to and not listed
        for entry in entries:
            if entry.name.startswith(".") and entry.name.endswith(UNFINISHED):
                with suppress(OSError):  # another user's, gone meanwhile, or being written
                    old = time.time() - entry.stat(follow_symlinks=False).st_mtime > STALE_SECONDS
                    if old or entry.name.startswith(beginning):
                        _remove(entry.path, within, old=old)


def _remove(path: str, within: int | None, *, old: bool) -> None:
    """Remove an unfinished file. OSError if its process lives: the file is locked; or, on a file system without locks,
    is not `old`."""
    with open(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=within), "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if isinstance(error, BlockingIOError) or not old:  # else a file system without locks
                raise
        os.unlink(path, dir_fd=within)
