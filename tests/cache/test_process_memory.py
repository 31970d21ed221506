"""The process's memory: what it takes at most, and when malloc gives free memory back."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from models import exact, forced, prompt, tiny

from qada_cache import process_memory

MIB = 2**20
of_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's malloc")

# The module alone: the package imports transformers, which takes most of a process's time.
ALONE = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("process_memory", {process_memory.__file__!r})
sys.modules["process_memory"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
"""

LOOSE = """
import torch
from process_memory import trim

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20

kept, freed = [], []
for _ in range(200):  # blocks that malloc has in its heap, with what stays between them
    freed.append(torch.ones(2**14))
    kept.append(torch.ones(2**11))
held = resident()
del freed
before = resident()
trim()
print(held - before, before - resident())
"""

PEAK = """
import mmap, sys, time
import torch
from process_memory import PeakMemory

kept = []

def fill():  # 48 MiB of malloc's heap, with what stays between them
    filled = []
    for _ in range(768):
        filled.append(torch.ones(2**14))
        kept.append(torch.ones(2**8))
    return filled

fill()
with open(sys.argv[1], "rb") as file, PeakMemory() as memory:
    filled = fill()
    while memory.nbytes < 44 * 2**20:  # until the thread has looked; pages at the ends of blocks were never free
        time.sleep(0.01)
    del filled
    pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    sum(pages[::4096])
print(memory.nbytes)
"""


@of_glibc
def test_free_memory_goes_back_to_the_system() -> None:
    done = subprocess.run([sys.executable, "-c", ALONE + LOOSE], capture_output=True, text=True, check=True)
    by_itself, by_us = map(float, done.stdout.split())
    assert by_itself < 3
    assert by_us > 6  # of 12.5 MiB, by pages


@of_glibc
def test_the_peak_is_of_what_is_taken_again_and_not_of_files(tmp_path: Path) -> None:
    """Memory that was freed before counts when it is taken again; a mapped file does not count."""
    (file := tmp_path / "mapped").write_bytes(os.urandom(32 * MIB))
    command = [sys.executable, "-c", ALONE + PEAK, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert int(done.stdout) < 52 * MIB


def test_growth_of_a_prompt_is_trimmed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is trimmed after a layer of a long call if the process has grown too much since the layer after the last
    trim. Memory that this layer allocates again is no growth: else all of it would be trimmed after every layer."""
    called: list[None] = []
    held = iter([100, 130, 133, 190, 221, 90, 123])  # 133 and 123 are too much
    monkeypatch.setattr(process_memory, "_least", 100)
    monkeypatch.setattr(process_memory, "WORTH_TRIMMING", 32)
    monkeypatch.setattr(process_memory, "_read_anonymous", lambda: next(held))
    monkeypatch.setattr(process_memory, "trim", lambda: called.append(None))
    model = tiny(num_hidden_layers=7)
    forced(model, prompt(300)[0], [300], exact(model))
    assert len(called) == 2
    assert next(held, None) is None
