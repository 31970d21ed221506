"""Safetensors files that this package can tell from any others: written whole or not at all, checked when read."""

import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from . import private, private_map
from .private_map import PrivateMap

FORMAT_VERSION = 3
_DTYPES = {  # as safetensors calls them
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}
_TYPES = {name: dtype for dtype, name in _DTYPES.items()}


def write(path: str | os.PathLike, kind: str, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    """Write `tensors` and the JSON-able `state` to `path`, whole or not at all; a symbolic link is written through.

    `kind` names what the file is, e.g. "qada-cache"; `read` asks for it.

    Raises:
        OSError: it cannot be written, or is something else than a regular file; the message names the path.
        NotImplementedError: a tensor is of a dtype that these files do not hold.
    """
    target = os.path.realpath(path)
    if os.path.lexists(target) and not stat.S_ISREG(os.stat(target).st_mode):
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    try:
        private.write(target, encoded(kind, tensors, state))
    except OSError as error:  # which may name nothing, or the unfinished file
        raise OSError(error.errno, error.strerror or str(error), os.fspath(path)) from error


def encoded(kind: str, tensors: dict[str, Tensor], state: dict[str, Any]) -> Iterator[bytes | memoryview]:
    """The bytes of a file, piece by piece. (safetensors' own function copies all of them first, and ignores the umask.)

    Raises:
        NotImplementedError: as `write`.
    """
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    about = {"kind": kind, "version": str(FORMAT_VERSION), "state": json.dumps(state)}
    about["sha256"] = _digest(about["state"], tensors)
    header: dict[str, Any] = {"__metadata__": about}
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # every one aligned to its elements
    end = 0
    for name in names:
        tensor = tensors[name]
        if tensor.dtype not in _DTYPES:
            raise NotImplementedError(f"{name} is of {tensor.dtype}, which files of qada-cache do not hold")
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little")
    yield text
    for name in names:
        yield _content(tensors[name])


def read(path: str | os.PathLike, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors (on the CPU) and state that `write` put into `path`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is truncated, altered, of another kind, or of another format; the message says which.
    """
    path = _found(path, kind)
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except SafetensorError as error:
        raise _broken(path, error) from error
    return _checked(path, kind, about, tensors)


def mapped(path: str | os.PathLike, kind: str) -> tuple[dict[str, Tensor], dict[str, Any], PrivateMap | None]:
    """As `read`, but not copied into memory: the tensors are views of the map. None: they are copies, as the file is
    too small to be mapped, or the system does not do that.

    Raises:
        FileNotFoundError, ValueError: as `read`.
    """
    path = _found(path, kind)
    if not private_map.AVAILABLE or path.stat().st_size < private_map.WORTH:
        return *read(path, kind), None
    source = PrivateMap(private_map.opened(path))
    try:
        with safe_open(source.file.link, framework="pt") as file:  # which refuses what is not all there
            about = file.metadata() or {}
    except SafetensorError as error:
        raise _broken(path, error) from error
    _check_kind(path, kind, about)
    begin, _, entries = _header(_content(source.content))
    tensors = {
        name: source.tensor(begin + entry["data_offsets"][0], tuple(entry["shape"]), _TYPES[entry["dtype"]])
        for name, entry in entries.items()
    }
    return *_checked(path, kind, about, tensors), source


def decoded(content: bytes, kind: str, path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """As `read`, of a file that was read already; `path` is only named in errors.

    Raises:
        ValueError: as `read`.
    """
    try:
        tensors = safetensors.torch.load(content)
    except SafetensorError as error:
        raise _broken(path, error) from error
    return _checked(path, kind, _header(content)[1], tensors)


def _header(content: bytes | memoryview) -> tuple[int, dict[str, str], dict[str, Any]]:
    """Of a file that safetensors has read: where its tensors begin, what it says of itself, and of every tensor."""
    begin = 8 + int.from_bytes(content[:8], "little")
    entries = json.loads(bytes(content[8:begin]))
    return begin, entries.pop("__metadata__", {}), entries


def _found(path: str | os.PathLike, kind: str) -> Path:
    if not Path(path).is_file():
        raise FileNotFoundError(f"no {kind} file at {path}")
    return Path(path)


def _broken(path: Path, error: SafetensorError) -> ValueError:
    return ValueError(f"{path} is not a safetensors file, or is truncated: {error}")


def _checked(
    path: Path, kind: str, about: dict[str, str], tensors: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    _check_kind(path, kind, about)
    if about.get("sha256") != _digest(about.get("state", ""), tensors):
        raise ValueError(f"{path} was altered after it was written (checksum mismatch)")
    return tensors, json.loads(about["state"])


def _check_kind(path: Path, kind: str, about: dict[str, str]) -> None:
    if about.get("kind") != kind:
        raise ValueError(f"{path} is not a {kind} file (it says {about.get('kind', 'nothing about what it is')!r})")
    if (version := about.get("version", "")) != str(FORMAT_VERSION):
        old = version.isdigit() and int(version) < FORMAT_VERSION
        way_out = "make it again" if old else "upgrade qada-cache"
        raise ValueError(f"{path} has format version {version!r}, this qada-cache reads {FORMAT_VERSION}: {way_out}")


def _digest(state: str, tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(state.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(_content(tensor))
    return digest.hexdigest()


def _content(tensor: Tensor) -> memoryview:
    return tensor.flatten().view(torch.uint8).numpy().data
