"""Kernels in C++, for CPUs: `attention.cpp` built for each shape when it is first met, and partial attention by it.

Building takes a second and a C++ compiler; the library is kept in the user's cache folder. Without a compiler, or if it
fails, torch's own kernel serves, at a fraction of the memory's speed.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.utils import logging

from ... import files
from ...sketch import HADAMARD, WORD_BITS, codec, selection
from ...sketch.coded import RecordLayout

logger = logging.get_logger(__name__)

MIN_TOKENS = 1024  # fewer keys are not worth a build
MAX_QUERIES = 16  # a power of two; more are compute enough for torch's kernel, which multiplies matrices
THREAD_TOKENS = 512  # a thread's part of a head's keys is at least this long
ELEMENTS = {torch.bfloat16: "BFLOAT16", torch.float16: "FLOAT16", torch.float32: "FLOAT32"}
FOLDER = "kernels"  # of `files.find_home()`
DIGEST_BYTES = 32
# Sums may be reordered, as vectors need. Not -ffast-math: loading a library linked with it changes the rounding of the
# whole process.
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-w"),
    *("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fassociative-math", "-fno-signed-zeros"),
)
SOURCE = Path(__file__).with_name("attention.cpp")
# What the definition in Python says of a sketch.
CONSTANTS = {
    "QUERY_LEVELS": codec.QUERY_LEVELS, "MIN_PEAK": codec.MIN_PEAK, "HADAMARD": HADAMARD, "WORD_BITS": WORD_BITS,
    "HOPELESS": selection.HOPELESS,
}  # fmt: skip


def supports(query: Tensor, key: Tensor, value: Tensor, beside: int = 0) -> bool:
    """Whether `compiled_partial_attention` computes this call, but for the build (shapes as there). So many tokens are
    elsewhere."""
    return (
        query.device.type == key.device.type == value.device.type == "cpu"
        and query.dtype == key.dtype == value.dtype
        and query.dtype in ELEMENTS
        and 1 <= query.shape[2] <= MAX_QUERIES
        and key.shape[2] + beside >= MIN_TOKENS
        and query.shape[3] % 8 == value.shape[3] % 8 == 0
        and (query.shape[:2], query.shape[3]) == (key.shape[:2], key.shape[3])
        and key.shape[:3] == value.shape[:3]
        and all(map(has_contiguous_rows, (key, value)))
    )


def compiled_partial_attention(
    query: Tensor, key: Tensor, value: Tensor, *, scaling: float
) -> tuple[Tensor, Tensor] | None:
    """Same contract as `reference.partial_attention`, for the calls that `supports` admits; None if it cannot be built.
    Threads share the work evenly for any number of heads, by splitting keys if needed."""
    batch, heads, queries, dim = query.shape
    room = 1 << (queries - 1).bit_length()  # calls of 1, 2, 3... tokens would each need a build of their own
    kernels = build(query.dtype, dim, value.shape[3], room)
    if kernels is None:
        return None
    query = functional.pad(query, (0, 0, 0, room - queries)).contiguous()
    out = torch.empty(batch, heads, room, value.shape[3], dtype=torch.float32, device=query.device)
    lse = torch.empty(batch, heads, room, dtype=torch.float32, device=query.device)
    kernels.partial_attention(
        *(tensor.data_ptr() for tensor in (query, key, value, out, lse)),
        *(batch, heads, key.shape[2], *key.stride()[:2], *value.stride()[:2]),
        *(THREAD_TOKENS, torch.get_num_threads(), scaling),
    )
    return out[:, :, :queries], lse[:, :, :queries]


def has_contiguous_rows(tensor: Tensor) -> bool:
    """Whether the tokens of each head of `[batch, heads, tokens, dim]` lie one after the other."""
    return tensor.stride()[2:] == (tensor.shape[3], 1)


def define(
    element: str, dim: int, value_dim: int, queries: int, records: RecordLayout | None = None
) -> tuple[str, ...]:
    """The macros that `SOURCE` is built with, `element` being one of `ELEMENTS`."""
    values = CONSTANTS | {"DIM": dim, "VALUE_DIM": value_dim, "QUERIES": queries}
    bits = (records.key_bits, records.value_bits, records.size) if records else (0, 0, 1)
    values |= dict(zip(("KEY_BITS", "VALUE_BITS", "RECORD_SIZE"), bits, strict=True))
    return f"-D{element}", *(f"-D{name}={value}" for name, value in values.items())


@functools.cache
def build(
    dtype: torch.dtype, dim: int, value_dim: int, queries: int, records: RecordLayout | None = None
) -> ctypes.CDLL | None:
    """The kernels for these sizes, and bulks of such records, built if need be; None, with one warning, if they cannot
    be built."""
    try:
        kernels = load(SOURCE, define(ELEMENTS[dtype], dim, value_dim, queries, records))
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning_once(
            f"the fast attention kernel for CPUs could not be built, torch's slower one serves: {error}"
        )
        return None
    tensors, counts = [ctypes.c_void_p] * 5, [ctypes.c_int64] * 8
    kernels.partial_attention.argtypes = [*tensors, *counts, ctypes.c_int, ctypes.c_float]
    kernels.partial_attention.errcheck = kernels.fused_decode.errcheck = check_memory
    return kernels


def check_memory(failed: Any, *_: Any) -> Any:
    """The `errcheck` of a function that returns 1 where memory ran out."""
    if failed:
        raise MemoryError("there is no memory for the temporaries of attention on the CPU")
    return failed


def load(source: Path, macros: tuple[str, ...]) -> ctypes.CDLL:
    """`source` and the headers beside it built with `macros` (`-DNAME=VALUE`), before or now; OSError or
    SubprocessError, if that fails. The library is kept in a folder that only the user can write to, if there is one."""
    compiler = _find_compiler()
    texts = [path.read_text(encoding="utf-8") for path in (source, *sorted(source.parent.glob("*.h")))]
    # What `-march=native` means: different machines may share the cache folder.
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    processor = sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
    built_from = (*texts, *FLAGS, *macros, compiler, _read_version(compiler), *processor)
    name = hashlib.sha256("\0".join(built_from).encode()).hexdigest()[:32] + ".so"
    if (kept := _load_kept(name)) is not None:
        return kept
    with tempfile.TemporaryDirectory(prefix="qada-kernels-") as temporary:
        library = Path(temporary, "library.so")
        done = _run([compiler, *FLAGS, *macros, str(source), "-o", str(library)], timeout=300)
        if done.returncode:
            raise OSError(f"{compiler} failed with {(done.stderr.splitlines() or [str(done.returncode)])[0]}")
        built = library.read_bytes()
        try:
            with files.open_folder(FOLDER, make=True) as folder:
                files.write(name, (built, hashlib.sha256(built).digest()), folder=folder)
                return _link(folder, name)
        except OSError as error:  # a cache folder that cannot be used is no reason to be slow
            where = files.find_home() / FOLDER
            logger.warning_once(f"kernels cannot be kept in {where} ({error}): they will be built in every process")
        return ctypes.CDLL(str(library))  # which needs no file once it is loaded


def _load_kept(name: str) -> ctypes.CDLL | None:
    """The kept library of this name, if its bytes are those that were built: loading others may end the process. Its
    digest follows it in its file, where no loader looks."""
    with (
        contextlib.suppress(OSError),
        files.open_folder(FOLDER) as folder,
    ):  # a warning comes with the first write to it
        try:
            content = files.read(folder, name)
            if hashlib.sha256(content[:-DIGEST_BYTES]).digest() == content[-DIGEST_BYTES:]:
                return _link(folder, name)
            raise OSError("it is damaged")
        except FileNotFoundError:
            pass
        except OSError as error:
            logger.warning_once(f"the kernel {files.find_home() / FOLDER / name} is built again: {error}")
    return None


def _link(folder: int, name: str) -> ctypes.CDLL:
    # By the descriptor, as the folder's path may lead to another folder by now. Loaded libraries are told apart by such
    # paths; equal names are equal libraries.
    return ctypes.CDLL(f"/proc/self/fd/{folder}/{name}")


def _run(command: list[str], timeout: int) -> subprocess.CompletedProcess[str]:
    # Compilers speak the user's language, in whatever encoding.
    return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=timeout)


def _find_compiler() -> str:
    """The path of a C++ compiler; OSError, if there is none, or none is known to build for this system."""
    if not sys.platform.startswith("linux"):
        raise OSError(f"it is built on Linux only, not on {sys.platform}")
    for candidate in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if candidate and (path := shutil.which(candidate)):
            return path
    raise OSError("there is no C++ compiler (install g++, or name one in CXX)")


def has_compiler() -> bool:
    """Whether kernels can be built here, as far as can be told without building one."""
    try:
        _find_compiler()
    except OSError:
        return False
    return True


@functools.cache
def _read_version(compiler: str) -> str:
    return _run([compiler, "--version"], timeout=60).stdout
