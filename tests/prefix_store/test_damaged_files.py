"""Stored files, cut, changed or gone: no wrong token, no crash, and nothing left over after the next start."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kept_text import OPTIONS, TEXT, check_served, model, segments
from torch import Tensor

from qada_cache import PrefixStore
from qada_cache.files import tensor_file
from qada_cache.prefix_store.folder import KIND
from qada_cache.prefix_store.naming import FILE_TOKENS

CUTS = [0, 1, 7, 8, 100, 1000, 3000, 4096, -4096, -64, -1]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_truncated_files(path: Path, place: int, cut: int) -> None:
    file = segments(path)[place]
    os.truncate(file, cut if cut >= 0 else file.stat().st_size + cut)
    check_served(path, place * FILE_TOKENS)


FLIPS = [0, 3, 7, 8, 9, 30, 200, 900, 1500, 3000, 5000, 9000, -9000, -5000, -3000, -700, -9, -1]


# Anywhere in a file, in each file of a prompt: how a flip is noticed does not depend on which it is.
@pytest.mark.parametrize(
    ("at", "bit", "place"), [(at, 6 * high, (index + high) % 3) for index, at in enumerate(FLIPS) for high in (0, 1)]
)
def test_flipped_bits(path: Path, place: int, at: int, bit: int) -> None:
    file = segments(path)[place]
    content = bytearray(file.read_bytes())
    content[at] ^= 1 << bit
    file.write_bytes(content)
    check_served(path, place * FILE_TOKENS)


def forge(file: Path, change: Callable[[dict[str, Tensor], dict[str, Any]], object]) -> None:
    """Write a file anew, whose checksum is right."""
    tensors, state = tensor_file.read(file, KIND)
    change(tensors, state)
    tensor_file.write(file, KIND, tensors, state)


FORGERIES: dict[str, Callable[[dict[str, Tensor], dict[str, Any]], object]] = {
    "another token": lambda tensors, state: state["tokens"].__setitem__(3, 96 - state["tokens"][3]),
    "fewer tokens": lambda tensors, state: state["tokens"].pop(),
    "more tokens": lambda tensors, state: state["tokens"].append(1),
    "no tokens": lambda tensors, state: state.update(tokens=[]),
    "tokens that are none": lambda tensors, state: state.update(tokens=["a"] * FILE_TOKENS),
    "tokens of any size": lambda tensors, state: state.update(tokens=[2**70] * FILE_TOKENS),
    "tokens by name": lambda tensors, state: state.update(tokens={"0": 1}),
    "another reading": lambda tensors, state: state.update(reading="0" * 32),
    "no reading": lambda tensors, state: state.update(reading=None),
    "more exact tokens than there are": lambda tensors, state: state.update(exact=10**9),
    "a negative count": lambda tensors, state: state.update(exact=-1),
    "half a count": lambda tensors, state: state.update(exact=0.5),
    "a missing field": lambda tensors, state: state.pop("exact"),
    "another field": lambda tensors, state: state.update(more=1),
    "another sketch": lambda tensors, state: state.update(sketch="0" * 32),
    "no word of a sketch": lambda tensors, state: state.update(sketch=None),
    "a missing layer": lambda tensors, state: [tensors.pop(name) for name in ("keys 1", "values 1")],
    "another layer": lambda tensors, state: tensors.update(
        {"keys 2": tensors["keys 1"], "values 2": tensors["keys 1"]}
    ),
    "missing values": lambda tensors, state: tensors.pop("values 0"),
    "a stray tensor": lambda tensors, state: tensors.update(stray=torch.zeros(2), other=torch.zeros(2)),
    "fewer keys": lambda tensors, state: tensors.update({"keys 0": tensors["keys 0"][:, 1:].clone()}),
    "fewer heads": lambda tensors, state: tensors.update({name: each[:1].clone() for name, each in tensors.items()}),
    "narrower keys": lambda tensors, state: tensors.update({"keys 0": tensors["keys 0"][..., 1:].clone()}),
    "flat keys": lambda tensors, state: tensors.update({"keys 0": tensors["keys 0"][0].clone()}),
    "keys in int64": lambda tensors, state: tensors.update({"keys 0": tensors["keys 0"].long()}),
    "all in float64": lambda tensors, state: tensors.update({name: each.double() for name, each in tensors.items()}),
    "no tensors": lambda tensors, state: tensors.clear(),
}


@pytest.mark.parametrize("forgery", FORGERIES)
@pytest.mark.parametrize("place", [0, 2])
def test_forged_numbers(path: Path, place: int, forgery: str) -> None:
    forge(segments(path)[place], FORGERIES[forgery])
    check_served(path, place * FILE_TOKENS)


def header(content: bytes) -> tuple[dict[str, Any], bytes]:
    size = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + size]), content[8 + size :]


HEADERS: dict[str, Callable[[dict[str, Any]], object]] = {
    "offsets beyond the end": lambda found: found["keys 0"].update(data_offsets=[0, 10**12]),
    "offsets far beyond": lambda found: found["keys 0"].update(data_offsets=[10**12, 10**12 + 16384]),
    "offsets that are no int64": lambda found: found["keys 0"].update(data_offsets=[2**70, 2**70 + 16384]),
    "negative offsets": lambda found: found["keys 0"].update(data_offsets=[-16384, 0]),
    "offsets by name": lambda found: found["keys 0"].update(data_offsets="ab"),
    "one offset": lambda found: found["keys 0"].update(data_offsets=[0]),
    "a shape of any size": lambda found: found["keys 0"].update(shape=[2**62, 2**62]),
    "a negative shape": lambda found: found["keys 0"].update(shape=[-2, FILE_TOKENS, -8]),
    "a shape by name": lambda found: found["keys 0"].update(shape={"a": 1}),
    "another dtype": lambda found: found["keys 0"].update(dtype="C64"),
    "no dtype": lambda found: found["keys 0"].pop("dtype"),
    "an entry that is none": lambda found: found.update({"keys 0": 7}),
    "no metadata": lambda found: found.pop("__metadata__"),
    "metadata that are none": lambda found: found.update(__metadata__=[1]),
    "a version that is none": lambda found: found["__metadata__"].update(version=4),
    "a later version": lambda found: found["__metadata__"].update(version="99"),
    "another kind": lambda found: found["__metadata__"].update(kind="qada-moments"),
    "a state that is none": lambda found: found["__metadata__"].update(state="[1, 2"),
    "a state of a list": lambda found: found["__metadata__"].update(state="[1, 2]"),
}


@pytest.mark.parametrize("forgery", HEADERS)
@pytest.mark.parametrize("place", [0, 2])
def test_forged_headers(path: Path, place: int, forgery: str, caplog: pytest.LogCaptureFixture) -> None:
    file = segments(path)[place]
    found, rest = header(file.read_bytes())
    HEADERS[forgery](found)
    text = json.dumps(found).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + rest)
    check_served(path, place * FILE_TOKENS)
    assert f"read again from segment {place} on: " in caplog.text
    assert f"{file.name} " in caplog.text


def test_a_file_under_another_name(path: Path) -> None:
    first, second, _ = segments(path)
    shutil.copy(second, first)
    check_served(path, 0)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_missing_files(path: Path, place: int) -> None:
    segments(path)[place].unlink()
    check_served(path, place * FILE_TOKENS)


@pytest.mark.parametrize("kind", ["a folder", "a link", "a pipe", "open to all", "unreadable"])
def test_files_that_are_none(path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    file = segments(path)[1]
    if kind == "open to all":
        file.chmod(0o666)
    elif kind == "unreadable" and os.geteuid():
        file.chmod(0)
    else:
        content = file.read_bytes()
        file.unlink()
        if kind == "a link":
            (path.parent / "elsewhere").write_bytes(content)
            file.symlink_to(path.parent / "elsewhere")
        elif kind == "a pipe":
            os.mkfifo(file)
        else:
            file.mkdir()
    cache = PrefixStore(path).cache(model(), TEXT, **OPTIONS)
    assert cache.get_seq_length() == FILE_TOKENS
    assert "read again from segment 1 on" in caplog.text
