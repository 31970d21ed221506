"""Sketches of bulks, and of segments, that are shorter than in earnest."""

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
    """Inside, bulks from `min_tokens` on have a sketch, in segments of `segment_tokens`, the last one of a quarter or
    more, wherever these are told."""
    sizes = {"MIN_TOKENS": min_tokens, "SEGMENT_TOKENS": segment_tokens, "LAST_TOKENS": segment_tokens // 4}
    modules = [import_module(f"qada_cache.{name}") for name in MODULES]  # before one of them is told: others copy it
    modules.append(import_module("sketch_reference"))
    with ExitStack() as stack:
        for module in modules:
            for constant, tokens in sizes.items():
                if hasattr(module, constant):
                    stack.enter_context(mock.patch.object(module, constant, tokens))
        yield
