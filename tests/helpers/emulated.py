"""A plugin of pytest that runs the C++ kernels on an emulated 64-bit Arm processor, so that the kernels' own tests
compare them with float64 there (`make check-arm`).

A cross compiler builds the libraries. Each call of a kernel goes to `runner.cpp` under QEMU, with copies of the memory
of all tensors whose addresses are among its arguments.
"""

import ctypes
import functools
import os
import platform
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from qada_cache.kernels.cpu import building, compiler, prompt

HERE = Path(__file__).parent
TOOLS = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
SYSTEM = "/usr/aarch64-linux-gnu"  # folder of the cross compiler's libraries
ARM = frozenset({"asimd", "asimddp", "bf16"})
_folder: tempfile.TemporaryDirectory[str] | None = None  # of the runner
_seen: dict[int, torch.UntypedStorage] = {}  # by address: memory of tensors whose address was asked for


class Runner:
    """A process that runs kernels: the program `runner.cpp`, built by `compiler` and started by `command`."""

    def __init__(self, compiler: str, folder: Path, command: tuple[str, ...] = ()) -> None:
        runner = folder / "runner"
        subprocess.run([compiler, "-std=c++17", "-O1", str(HERE / "runner.cpp"), "-o", str(runner), "-ldl"], check=True)
        self._process = subprocess.Popen([*command, str(runner)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def call(self, path: str, name: str, arguments: bytes, pointers: dict[int, int]) -> int:
        """Call the function `name` of the library at `path`; return its result. `pointers` maps byte offsets in
        `arguments` to addresses of tensors, whose memory is then as the function left it."""
        storages, placed = list[torch.UntypedStorage](), []
        for place, pointer in pointers.items():
            storage = find_storage(pointer)
            known = next((i for i, other in enumerate(storages) if other.data_ptr() == storage.data_ptr()), None)
            if known is None:
                known = len(storages)
                storages.append(storage)
            placed.append((place, known, pointer - storage.data_ptr()))
        blocks = [(storage.data_ptr(), storage.nbytes()) for storage in storages]
        out, back = self._process.stdin, self._process.stdout
        assert out is not None
        assert back is not None
        for part in (path.encode(), name.encode()):
            out.write(struct.pack("q", len(part)) + part)
        out.write(struct.pack("qq", len(arguments), len(arguments)) + arguments + struct.pack("q", len(blocks)))
        for address, size in blocks:
            out.write(struct.pack("q", size) + ctypes.string_at(address, size))
        out.write(struct.pack("q", len(placed)) + b"".join(struct.pack("qqq", *each) for each in placed))
        out.flush()
        (returned,) = struct.unpack("q", back.read(8))
        for address, size in blocks:
            ctypes.memmove(address, back.read(size), size)
        return int(returned)

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


class Library:
    """Stands in for the `ctypes.CDLL` of a kernel's library that `runner` has loaded."""

    def __init__(self, runner: Runner, path: str) -> None:
        self._runner, self._path = runner, os.path.realpath(path)

    def __getattr__(self, name: str) -> "Function":
        function = Function(lambda *call: self._runner.call(self._path, name, *call))
        setattr(self, name, function)
        return function


class Function:
    """Stands in for a function of a library, which takes one structure, or numbers."""

    argtypes: Any = None
    errcheck: Callable[..., Any] | None = None

    def __init__(self, call: Callable[[bytes, dict[int, int]], int]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        pointers: dict[int, int] = {}
        if self.argtypes:
            given = b"".join(struct.pack("d" if isinstance(each, float) else "q", each or 0) for each in arguments)
            pointers = {8 * i: each for i, each in enumerate(arguments) if self.argtypes[i] is ctypes.c_void_p}
        else:
            given = bytes(arguments[0]._obj) if arguments else b""
            pointers = dict(list_pointers(arguments[0]._obj)) if arguments else {}
        returned = self._call(given, {place: pointer for place, pointer in pointers.items() if pointer})
        return self.errcheck(returned, self, arguments) if self.errcheck else returned


def list_pointers(structure: ctypes.Structure, start: int = 0) -> Iterator[tuple[int, int]]:
    """The byte offset in the structure and the address of each pointer that is not null."""
    for name, kind, *_ in structure._fields_:
        place, value = start + getattr(type(structure), name).offset, getattr(structure, name)
        if isinstance(value, ctypes.Structure):
            yield from list_pointers(value, place)
        elif kind is ctypes.c_void_p and value:
            yield place, value


def find_storage(pointer: int) -> torch.UntypedStorage:
    """The storage that has this address, among tensors whose `data_ptr` was called."""
    for address, storage in _seen.items():
        if address <= pointer < address + max(1, storage.nbytes()):
            return storage
    raise LookupError(f"no tensor has the address {pointer:#x}")


def use(runner: Runner, patch: Callable[[Any, str, Any], None]) -> None:
    """Have `runner` run the libraries that are loaded from now on. Keep the storage of every tensor whose `data_ptr` is
    called, for `find_storage`."""
    find_address = torch.Tensor.data_ptr

    def data_ptr(tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        _seen[storage.data_ptr()] = storage
        return find_address(tensor)

    patch(torch.Tensor, "data_ptr", data_ptr)
    patch(building, "ctypes", SimpleNamespace(**vars(ctypes) | {"CDLL": functools.partial(Library, runner)}))


def pytest_load_initial_conftests() -> None:
    """Emulate from here on, before any code asks which processor this is."""
    if not all(map(shutil.which, TOOLS)):
        sys.exit(f"this needs {' and '.join(TOOLS)}: apt-get install g++-aarch64-linux-gnu qemu-user-static")
    platform.machine = lambda: "aarch64"
    os.environ["CXX"] = str(HERE / "arm-c++")
    building.FLAGS = compiler.list_flags()
    prompt.read_instructions = lambda: ARM
    global _folder
    _folder = tempfile.TemporaryDirectory(prefix="qada-runner-")  # until the process ends
    use(Runner(TOOLS[0], Path(_folder.name), (TOOLS[1], "-L", SYSTEM, "-cpu", "max")), setattr)


def pytest_runtest_setup() -> None:
    """Forget the storages of earlier tests."""
    _seen.clear()
