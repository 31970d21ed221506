"""Safetensors files that this package can tell from any others: written whole or not at all, checked when read."""

import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import private, private_map
from .private_map import PrivateMap

FORMAT_VERSION = 2
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
    with _found(path, kind).open("rb") as file:
        content = bytearray(os.fstat(file.fileno()).st_size)
        del content[file.readinto(content) :]
    return decoded(content, kind, Path(path))


def mapped(path: str | os.PathLike, kind: str) -> tuple[dict[str, Tensor], dict[str, Any], PrivateMap | None]:
    """As `read`, but not copied into memory: the tensors are views of the map. None: they are copies, as the file is
    too small to be mapped, or the system does not do that.

    Raises:
        FileNotFoundError, ValueError: as `read`.
    """
    found = _found(path, kind)
    if not private_map.AVAILABLE or found.stat().st_size < private_map.WORTH:
        return *read(path, kind), None
    source = PrivateMap(private_map.opened(found))
    return *_parsed(source.content, kind, found), source


def _found(path: str | os.PathLike, kind: str) -> Path:
    if not Path(path).is_file():
        raise FileNotFoundError(f"no {kind} file at {path}")
    return Path(path)


def decoded(content: bytes | bytearray, kind: str, path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """As `read`, of a file that was read already; `path` is only named in errors.

    Raises:
        ValueError: as `read`.
    """
    if len(content) < 8:
        raise _broken(path, "no header")
    content = content if isinstance(content, bytearray) else bytearray(content)  # torch's tensors are writable
    tensors, state = _parsed(torch.frombuffer(content, dtype=torch.uint8), kind, path)
    return {name: tensor.clone() for name, tensor in tensors.items()}, state


def _parsed(content: Tensor, kind: str, path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What a file of these bytes, uint8 `[size]`, holds; the tensors are views of them."""
    start = 8 + int.from_bytes(_content(content[:8]), "little")
    if start > content.numel():
        raise _broken(path, "its header is not all there")
    try:
        header = json.loads(bytes(_content(content[8:start])))
        about = {name: str(value) for name, value in header.pop("__metadata__", {}).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise _broken(path, error) from error
    _check_kind(path, kind, about)
    tensors, data, end = {}, content[start:], 0
    try:
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            first, last = entry["data_offsets"]
            if not first == end <= last:
                raise ValueError(f"{name} does not follow what comes before it")
            tensors[name], end = data[first:last].view(_TYPES[entry["dtype"]]).view(entry["shape"]), last
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise _broken(path, error) from error
    if end != data.numel():
        raise _broken(path, f"it has tensors of {end} bytes, and {data.numel()} bytes")
    if about.get("sha256") != _digest(about.get("state", ""), tensors):
        raise ValueError(f"{path} was altered after it was written (checksum mismatch)")
    return tensors, json.loads(about["state"])


def _broken(path: Path, error: object) -> ValueError:
    return ValueError(f"{path} is not a safetensors file, or is truncated: {error}")


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
