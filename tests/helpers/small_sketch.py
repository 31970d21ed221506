"""Sketches of shorter bulks, in shorter segments, than the package makes."""

import importlib.util
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from unittest import mock

KERNELS = ["coding", "decode_reference", "decode_trial", "query_adaptive", "cpu.compiled_decode"]
KERNELS += ["cpu.quantizing", "cpu.recording"]
KERNELS += ["triton", "triton.sizing"] * bool(importlib.util.find_spec("triton"))
MODULES = [
    *("sketch", "sketch.codec", "sketch.coded", "sketch.selection", "storage.bulk_sketch", "storage.coded_bulk"),
    "storage.reopened",
    *(f"kernels.{name}" for name in KERNELS),
]


@contextmanager
def small_sketch(min_tokens: int = 6, segment_tokens: int = 512) -> Iterator[None]:
    """Inside, bulks of at least `min_tokens` have a sketch, in segments of `segment_tokens`, the last of at least a
    quarter of that. Patches the constants in all `MODULES`."""
    sizes = {"MIN_TOKENS": min_tokens, "SEGMENT_TOKENS": segment_tokens, "LAST_TOKENS": segment_tokens // 4}
    modules = [import_module(f"qada_cache.{name}") for name in MODULES]  # all before any is patched: imports copy it
    modules.append(import_module("sketch_reference"))
    with ExitStack() as stack:
        for module in modules:
            for constant, tokens in sizes.items():
                if hasattr(module, constant):
                    stack.enter_context(mock.patch.object(module, constant, tokens))
        yield
