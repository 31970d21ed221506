"""What the commands that time a model have in common: their options and report, and what the machine can do at best."""

import argparse
import contextlib
import gc
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

from eval.shared import tables
from eval.shared.graphed import GraphedStaticCache
from eval.shared.language_model import add_device, check_loading, label
from eval.shared.workloads import MODEL_HELP, Work, load
from qada_cache.process_memory import trim
from qada_cache.versions import pass_cache

SIZE = 1 << 30  # bytes that are read: more than any processor's cache


def wait(device: torch.device) -> None:
    """For what the device still has to do."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def measure_best(work: Callable[[], object], device: torch.device, size: int) -> float:
    """Bytes a second, the best of several."""
    best = 0.0
    for _ in range(6):
        wait(device)
        begin = time.perf_counter()
        work()
        wait(device)
        best = max(best, size / (time.perf_counter() - begin))
    return best


def measure_speeds(device: torch.device) -> dict[str, float]:
    """In bytes a second: "read", by a plain reduction; and to an accelerator from pinned memory, "copy", and
    "zero_copy", by a kernel that reads the host's memory in place."""
    data = torch.ones(SIZE // 4, device=device)
    found = {"read": measure_best(data.sum, device, SIZE)}
    if device.type == "cuda":
        host = torch.ones(SIZE // 4, pin_memory=True)
        found["copy"] = measure_best(lambda: data.copy_(host, non_blocking=True), device, SIZE)
        with contextlib.suppress(ImportError):  # without Triton there is no kernel that could
            found["zero_copy"] = _measure_zero_copy(host, data)
    return found


def _measure_zero_copy(host: torch.Tensor, data: torch.Tensor) -> float:
    """Bytes a second that a decode step's kernel reads of a bulk in pinned memory, every head flagged."""
    from qada_cache.kernels.operands import Operands, Query, Rows
    from qada_cache.kernels.triton import fused_decode

    dim, heads = 128, 8
    tokens = host.numel() * 2 // (2 * heads * dim)  # keys and values as half-precision numbers
    keys, values = host.view(torch.bfloat16).view(2, 1, heads, tokens, dim)
    near = torch.zeros(1, heads, 16, dim, dtype=torch.bfloat16, device=data.device)
    columns, count = torch.ones(1, 1, 1, 16, dtype=torch.bool, device=data.device), torch.tensor([tokens])
    rows = Rows(
        *(columns, ~columns, count[:, None, None].to(data.device), count.to(data.device)),
        decided=columns[..., 0],
    )
    query = Query(
        torch.ones(1, 4 * heads, 1, dim, dtype=torch.bfloat16, device=data.device), scaling=0.1,
        log_bulk=torch.full((1, heads, 4, 1), torch.inf, device=data.device),
    )  # fmt: skip
    read = torch.zeros((), dtype=torch.int64, device=data.device)
    layer = Operands(near, near, keys, values, logit_threshold=0.0, bulk_read_bytes=read)
    return measure_best(lambda: fused_decode(query, rows, layer), data.device, host.nbytes)


def decode_token(model: PreTrainedModel, cache: Cache, ids: Tensor) -> Tensor:
    """Logits `[batch, 1, vocabulary]` of one token `[batch, 1]` more."""
    if isinstance(cache, GraphedStaticCache):
        return cache.decode(model, ids)
    return model(input_ids=ids, **pass_cache(cache)).logits


@torch.inference_mode()
def decode(work: Work, *caches: Cache, steps: int | None = None) -> tuple[list[float], Tensor]:
    """Seconds of every timed step, and the last step's logits `[batch, vocabulary]`; `steps` is all of the inputs'.

    Caches take turns, token by token.
    """
    seconds, device = [], work.model.device
    for step, cache in itertools.product(range(work.inputs.shape[1] if steps is None else steps), caches):
        wait(device)
        begin = time.perf_counter()
        logits = decode_token(work.model, cache, work.inputs[:, step : step + 1])[:, -1]
        wait(device)
        if step >= work.warm_up:
            seconds.append(time.perf_counter() - begin)
    return seconds, logits


class Peak:
    """The most memory held since this was made, above what was held then: `device` and `host` in bytes.

    On the host it is the process's resident memory, which Linux lets us watch; elsewhere it stays 0. What malloc holds
    for nobody goes first: the next method would be faster for it, and seem to need less.
    """

    def __init__(self, device: torch.device) -> None:
        gc.collect()
        trim()
        self._device, self._status = device, Path("/proc/self/status")
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._held = torch.cuda.memory_allocated(device)
        self._watched = False
        with contextlib.suppress(OSError, ValueError):  # a system without these files, or that keeps them to itself
            Path("/proc/self/clear_refs").write_text("5")  # the highest mark starts anew
            self._resident = self._read_highest()
            self._watched = True

    def _read_highest(self) -> int:
        (line,) = (line for line in self._status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024

    @property
    def device(self) -> int:
        """Bytes on an accelerator."""
        if self._device.type != "cuda":
            return 0
        return torch.cuda.max_memory_allocated(self._device) - self._held

    @property
    def host(self) -> int:
        """Bytes of the process."""
        return self._read_highest() - self._resident if self._watched else 0


def add_options(parser: argparse.ArgumentParser, *columns: str) -> Callable[..., argparse.Action]:
    """Give it the options that all these commands have; what adds more. `columns` are as for `tables.table_of`."""
    add = parser.add_argument
    add("--model", default="llama-3.2-1b", help=f"{MODEL_HELP} (default: %(default)s)")
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="(default: %(default)s)")
    add_device(parser)
    add("--seed", type=int, default=0, help="(default: %(default)s)")
    add("--out", type=tables.table_of(*columns), help="CSV table to write")
    return add


def load_model(
    parser: argparse.ArgumentParser, options: argparse.Namespace, *, tokens: int, latents: bool = True
) -> tuple[PreTrainedModel, Callable, PreTrainedTokenizerBase | None]:
    """As `workloads.load`; ends the program where that raises."""
    dtype, device = getattr(torch, options.dtype), torch.device(options.device)
    with check_loading(parser):
        return load(options.model, dtype=dtype, device=device, tokens=tokens, latents=latents)


def report(options: argparse.Namespace, rows: list[dict[str, Any]], **everywhere: object) -> None:
    """As `tables.report`; `everywhere` are columns with the same value in all rows, beside those that all have."""
    told = {"model": label(options.model), "dtype": options.dtype, **everywhere, "seed": options.seed}
    tables.report(rows, options.out, **told, threads=torch.get_num_threads())
