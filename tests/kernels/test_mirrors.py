"""Structures that Python passes to C++ have the same fields of the same types in the same order on both sides."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest

from qada_cache.kernels.cpu import (
    addresses,
    compiled_decode,
    correlating,
    latent,
    prompt,
    quantizing,
    recording,
    selected_prompt,
)

FOLDER = Path(prompt.__file__).parent
KINDS = {"int64_t": ctypes.c_int64, "int": ctypes.c_int, "float": ctypes.c_float, "double": ctypes.c_double}
MIRRORS = {
    ("elements.h", "View"): addresses.View,
    ("decide.h", "Rows"): compiled_decode.RowViews,
    ("moments.h", "Moments"): compiled_decode.MomentViews,
    ("decide.h", "Decode"): compiled_decode.Decode,
    ("prompt.cpp", "Call"): prompt.Call,
    ("selecting.h", "Call"): selected_prompt.Call,
    ("quantize.cpp", "Quantizing"): quantizing.Quantizing,
    ("correlate.cpp", "Correlating"): correlating.Correlating,
    ("coding.h", "Coding"): recording.Coding,
    ("latent.cpp", "Call"): latent.Call,
}


def fields(file: str, name: str) -> list[tuple[str, str, str]]:
    """The kind, name and length of each field that a C++ struct declares, before its functions."""
    text = re.sub(r"//.*", "", (FOLDER / file).read_text("utf-8"))
    body = re.search(rf"struct {name} {{(.*?)^}};", text, re.MULTILINE | re.DOTALL)
    assert body is not None
    declared = re.match(r"((?:\s*[\w<> ]+[ *][\w\[\], *]+;)*)", body[1])
    assert declared is not None
    found = []
    for kind, names in re.findall(r"([\w<> ]+?)( \*?[\w\[\]]+(?:, \*?[\w\[\]]+)*|\* \w+);", declared[1]):
        for each in names.split(","):
            pointer, word, length = re.fullmatch(r"\s*(\*?)\s*(\w+)(?:\[(\d+)\])?", each).groups()
            found.append(("*" if pointer else re.sub(r"^\s*const |<.*>", "", kind).strip(), word, length or ""))
    return found


@pytest.mark.parametrize(("file", "name"), MIRRORS, ids=str)
def test_fields(file: str, name: str) -> None:
    mirror, told = MIRRORS[file, name], fields(file, name)
    assert [word for _, word, _ in told] == [word for word, _ in mirror._fields_]
    for (kind, word, length), (_, ours) in zip(told, mirror._fields_, strict=True):
        if kind == "*":
            assert ours is ctypes.c_void_p, word
        elif kind in KINDS:
            wanted = KINDS[kind] * int(length) if length else KINDS[kind]
            assert ctypes.sizeof(ours) == ctypes.sizeof(wanted), word
            assert getattr(ours, "_type_", ours) in (KINDS[kind], wanted._type_), word
        elif kind in ("Strides", "Words"):  # of as many numbers as an array has
            assert issubclass(ours, ctypes.Array), word
        else:
            whole = {"View": addresses.View, "Rows": compiled_decode.RowViews, "Moments": compiled_decode.MomentViews}
            assert ours is whole[kind] or (length and issubclass(ours, whole[kind] * int(length))), word
