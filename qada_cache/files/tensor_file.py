"""Safetensors files that this package can tell from any others: written whole or not at all, checked when read."""

import errno
import hashlib
import io
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from . import private_map
from . import write as write_whole
from .private_map import PrivateMap

FORMAT_VERSION = 4
_TYPES = {  # by safetensors' names
    **{"BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32},
    **{"I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64},
}
_DTYPES = {dtype: name for name, dtype in _TYPES.items()}
_MISSING = (LookupError, TypeError, AttributeError)  # of a header that lacks a field, or has another type of it
_LONGEST_HEADER = 100_000_000  # bytes, safetensors' own limit
_ALIGNMENT = 64  # bytes, as torch aligns memory on the CPU


@dataclass(frozen=True, eq=False)
class PaddedTensor:
    """A tensor as a file has it, `[rows, heads, room, dim]`: `lengths[row]` tokens of each row, then zeros."""

    tensor: Tensor  # [rows, heads, tokens, dim] on any device, from which it comes to the host one head at a time
    lengths: list[int]
    room: int

    @property
    def dtype(self) -> torch.dtype:
        """The tensor's dtype."""
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the file has."""
        rows, heads, _, dim = self.tensor.shape
        return rows, heads, self.room, dim

    def cut(self) -> Iterator[Tensor | int]:
        """The tensor's pieces in order; a number stands for that many bytes of zeros."""
        token = self.tensor.shape[3] * self.tensor.element_size()
        for row, length in enumerate(self.lengths):
            for head in self.tensor[row]:
                yield head[:length]
                yield (self.room - length) * token


FileTensor = Tensor | PaddedTensor


def write(path: str | os.PathLike, kind: str, tensors: Mapping[str, FileTensor], state: dict[str, Any]) -> None:
    """Write `tensors` and the JSON-able `state` to `path`, whole or not at all; a symbolic link is written through. The
    file's `kind`, e.g. "qada-cache", is asked for by `read`. An OSError, which names the path, if it cannot be written,
    or is no regular file; a NotImplementedError at a dtype that these files do not hold."""
    target = os.path.realpath(path)
    if os.path.lexists(target) and not os.path.isfile(target):
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    try:
        write_whole(target, encode(kind, tensors, state))
    except OSError as error:  # its own path may be missing, or the unfinished file's
        raise OSError(error.errno, error.strerror or str(error), os.fspath(path)) from error


def encode(kind: str, tensors: Mapping[str, FileTensor], state: dict[str, Any]) -> Iterator[bytes | memoryview | int]:
    """The bytes of a file for `write`, piece by piece, numbers standing for that many zeros. Tensors on a device are
    copied twice, as the checksum stands before them. (safetensors' own copies all first, and ignores the umask.)"""
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            raise NotImplementedError(
                f"{name} is of {tensor.dtype}, which files of qada-cache do not hold: they hold {', '.join(_TYPES)}"
            )
    about = {"kind": kind, "version": str(FORMAT_VERSION), "state": json.dumps(state)}
    about["sha256"] = _digest(about["state"], tensors)
    header: dict[str, Any] = {"__metadata__": about}
    sizes = {name: math.prod(tensor.shape) * tensor.dtype.itemsize for name, tensor in tensors.items()}
    # Those whose neighbours stay aligned as torch aligns memory come first, the others as their elements need it.
    # The alignment of a tensor decides the last bit of what is computed from it, and maps and copies have to agree.
    names = sorted(tensors, key=lambda name: (sizes[name] % _ALIGNMENT > 0, -tensors[name].dtype.itemsize, name))
    end = 0
    for name in names:
        tensor = tensors[name]
        start, end = end, end + sizes[name]
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    yield len(text).to_bytes(8, "little")
    yield text
    for name in names:
        yield from _cut(tensors[name])


def read(path: str | os.PathLike, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors (on the CPU) and state that `write` put into `path`. A FileNotFoundError if there is no such file; a
    ValueError if it is truncated, altered, of another kind, or of another format, as the message says."""
    tensors, state, _ = map_file(path, kind, mmap=False)
    return tensors, state


def map_file(
    path: str | os.PathLike, kind: str, empty: Callable[..., Tensor] = torch.empty, *, mmap: bool = True
) -> tuple[dict[str, Tensor], dict[str, Any], PrivateMap | None]:
    """As `read`, with tensors that are views of the mapped file, and its map. If the map is None, tensors are copies:
    `empty` makes them as `torch.empty`, and the file is read once, from first byte to last. The map is None if `mmap`
    is False, the file is small, or the system cannot map it or cannot tell whether somebody writes to it."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"no {kind} file at {path}")
    source: PrivateMap | None = None
    tensors: dict[str, Tensor] = {}
    with open(path, "rb") as file:
        number = file.fileno()
        very_file = f"/proc/self/fd/{number}" if private_map.AVAILABLE else path
        with _refuse_incomplete(path), safe_open(very_file, framework="pt"):
            about, entries = _read_header(path, kind, file)
        if mmap and private_map.AVAILABLE and os.fstat(number).st_size >= private_map.WORTH:
            held = private_map.OpenFile(os.dup(number), os.fspath(path))
            source = PrivateMap(held) if held.quiet else None
        begin = file.tell()
        for name, entry in sorted(entries.items(), key=lambda named: named[1]["data_offsets"]):
            shape, dtype = tuple(entry["shape"]), _TYPES[entry["dtype"]]
            if source is not None:
                tensors[name] = source.view_tensor(begin + entry["data_offsets"][0], shape, dtype)
                continue
            tensors[name] = empty(shape, dtype=dtype, device=torch.device("cpu"))
            if file.readinto(_view_bytes(tensors[name])) != tensors[name].nbytes:
                raise ValueError(f"{path} was truncated while it was read")
    return tensors, _check(path, about, tensors), source


def decode(content: bytes, kind: str, path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """As `read`, of a file that was read already; `path` is only named in errors."""
    with _refuse_incomplete(path):
        tensors = safetensors.torch.load(content)
        about, _ = _read_header(path, kind, io.BytesIO(content))
    return tensors, _check(path, about, tensors)


def view(content: bytearray, kind: str, path: str | os.PathLike) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """As `decode`, with tensors that are views of `content`."""
    with _refuse_incomplete(path):
        about, entries = _read_header(path, kind, file := io.BytesIO(content))
        tensors = {name: _view(content, file.tell(), entry) for name, entry in entries.items()}
    return tensors, _check(path, about, tensors)


def read_state(file: BinaryIO, kind: str, path: str | os.PathLike) -> dict[str, Any]:
    """The state of an open file of this kind, not compared with the checksum."""
    with _refuse_incomplete(path):
        about, _ = _read_header(path, kind, file)
        return json.loads(about["state"])


def _view(content: bytearray, begin: int, entry: dict[str, Any]) -> Tensor:
    (start, stop), dtype, shape = entry["data_offsets"], _TYPES[entry["dtype"]], tuple(entry["shape"])
    if stop - start != math.prod(shape) * dtype.itemsize or min((start, *shape)) < 0:
        raise ValueError(f"a tensor of {shape} {dtype} cannot lie in {start}..{stop}")
    if start == stop:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(content, dtype=dtype, count=math.prod(shape), offset=begin + start).view(shape)


@contextmanager
def _refuse_incomplete(path: str | os.PathLike) -> Iterator[None]:
    """Inside, an error of safetensors, also for an incomplete file, becomes a ValueError that names the file."""
    try:
        yield
    except (SafetensorError, ArithmeticError, RuntimeError, ValueError, *_MISSING) as error:
        if isinstance(error, ValueError) and str(error).startswith(f"{path} "):
            raise
        raise ValueError(f"{path} is not a safetensors file, or is truncated: {error}") from error


def _read_header(path: str | os.PathLike, kind: str, file: BinaryIO) -> tuple[dict[str, str], dict[str, Any]]:
    """Metadata and entries of a file of this kind. Afterwards `file` is at the first byte of its tensors."""
    size = int.from_bytes(file.read(8), "little")
    if size > _LONGEST_HEADER:
        raise ValueError(f"{path} is not a safetensors file, or is truncated: its header has {size} bytes")
    entries = json.loads(file.read(size))
    about = entries.pop("__metadata__", None) or {}
    if about.get("kind") != kind:
        raise ValueError(f"{path} is not a {kind} file (it says {about.get('kind', 'nothing about what it is')!r})")
    version = about.get("version", "")
    if version != str(FORMAT_VERSION):
        old = version.isdigit() and int(version) < FORMAT_VERSION
        way_out = "make it again" if old else "upgrade qada-cache"
        raise ValueError(f"{path} has format version {version!r}, this qada-cache reads {FORMAT_VERSION}: {way_out}")
    if others := {entry["dtype"] for entry in entries.values()} - _TYPES.keys():
        raise ValueError(f"{path} was altered after it was written (it holds {min(others)})")
    return about, entries


def _check(path: str | os.PathLike, about: dict[str, str], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The state of a file. ValueError, unless its tensors and state are what was written, by the checksum."""
    if about.get("sha256") != _digest(about.get("state", ""), tensors):
        raise ValueError(f"{path} was altered after it was written (checksum mismatch)")
    with _refuse_incomplete(path):
        return json.loads(about["state"])


def _digest(state: str, tensors: Mapping[str, FileTensor]) -> str:
    digest = hashlib.sha256(state.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        for piece in _cut(tensor):
            digest.update(bytes(piece) if isinstance(piece, int) else piece)
    return digest.hexdigest()


def _cut(tensor: FileTensor) -> Iterator[memoryview | int]:
    for piece in tensor.cut() if isinstance(tensor, PaddedTensor) else (tensor,):
        yield piece if isinstance(piece, int) else _view_bytes(piece.detach().cpu().contiguous())


def _view_bytes(tensor: Tensor) -> memoryview:
    # Not `flatten`: it keeps the stride of a dimension of one number, which may be any, and bytes need a stride of 1.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data
