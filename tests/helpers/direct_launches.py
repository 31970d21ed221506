"""Checks that a bound step launches what Triton would: `python tests/helpers/direct_launches.py`.

The driver is a stand-in that launches nothing. Exits with an error unless a kernel that the package calls directly gets
the same arguments in the same order as through Triton, in a later step too, of which all arguments that may change are
others. Nor may a step call kernels directly if Triton would compile another variant, or if a profiler looks at
launches. Kernels of a step have to be compiled side by side, each once. Direct launches have to give addresses for
tensors on the device, and not for those in host memory.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from eval.shared.compiling import BATCH, COLUMNS, KV_HEADS, Step
from eval.shared.launch_time import DRIVER, Launcher
from qada_cache.kernels.operands import Operands, Query, Rows
from qada_cache.kernels.triton import fused_decode, launching
from qada_cache.kernels.triton.storing import Storer

Launched = list[tuple[str, list[Any]]]


def compute(query: Query, rows: Rows, layer: Operands) -> Callable[[], set[int]]:
    """A decode step, which returns the addresses of tensors that each step makes."""
    return lambda: {tensor.data_ptr() for tensor in fused_decode(query, rows, layer)}


def launch(work: Callable[[], set[int]]) -> tuple[Launched, list[bool], int]:
    """Do `work`. Return the names and arguments of launched kernels, with "new" for what it returned; for each kernel
    that was called through Triton, whether Triton was to launch it at once; and the number of tensors as arguments."""
    Launcher.launched.clear()
    compiles = {"autospec": True, "side_effect": JITFunction._do_compile}
    looked_for = mock.patch.object(JITFunction, "run", autospec=True, side_effect=JITFunction.run)
    with looked_for as run, mock.patch.object(JITFunction, "_do_compile", **compiles) as compiled:
        new = work()
    assert all(call.args[-1] is True for call in compiled.call_args_list)  # side by side: not to be launched
    found, tensors = [], 0
    for name, arguments in Launcher.launched:
        tensors += sum(isinstance(one, torch.Tensor) for one in arguments)
        told = [one.data_ptr() if isinstance(one, torch.Tensor) else one for one in arguments]
        found.append((name, ["new" if one in new else one for one in told]))
    return found, [not call.kwargs["warmup"] for call in run.call_args_list], tensors


@contextmanager
def watched() -> Iterator[None]:
    """Inside, launches are done by Triton, as if a profiler looked at them."""
    with mock.patch.object(launching, "are_watched", return_value=True):
        yield


def make_others(query: Query) -> tuple[Query, Rows]:
    """A later step's: nothing that may change between steps is as in `Step.make_operands`, but what Triton compiles
    for."""
    local, decided = torch.ones(BATCH, 1, 1, COLUMNS - 6, dtype=torch.bool), torch.ones(BATCH, 1, 1, dtype=torch.bool)
    counts, lengths = (torch.full(shape, 900, dtype=torch.int64) for shape in ((BATCH, 1, 1), (BATCH,)))
    assert query.log_bulk is not None
    other = replace(query, states=query.states.clone(), log_bulk=query.log_bulk.clone())
    return other, Rows(local, ~local, counts, lengths, decided)


def check_decode() -> int:
    """The kernels of a decode step; returns their number."""
    counted = {"bulk_read_bytes": torch.zeros((), dtype=torch.int64)}
    query, rows, layer = Step(32, 32, 2, torch.float32, 3000, 1.5, 16, counted).make_operands()
    first, asked, _ = launch(compute(query, rows, layer))
    names = [name for name, _ in first]
    together = [False] * 3 + [True] * 3
    assert (names, asked) == (["local_kernel", "estimate_kernel", "selected_kernel"], together)
    assert launch(compute(query, rows, layer)) == (first, [], 0)
    later = *make_others(query), layer
    directly, asked, tensors = launch(compute(*later))
    assert (asked, tensors) == ([], 0)
    with watched():
        by_triton, _, tensors = launch(compute(*later))
    assert directly == by_triton
    assert directly != first
    assert tensors > 0
    elsewhere = torch.zeros(query.states.numel() + 1)[1:].view_as(query.states)  # at no multiple of 16
    again, asked, _ = launch(compute(replace(query, states=elsewhere), rows, layer))
    assert ([name for name, _ in again], asked) == (names, together)
    assert again != first
    assert launch(compute(query, rows, layer)) == (first, [], 0)
    return len(names)


def check_bulk_in_host_memory() -> None:
    """Tensors elsewhere than the query stay tensors: their addresses on the device may be others."""
    query, rows, layer = Step(32, 32, 2, torch.float32, 3000).make_operands()
    layer = replace(layer, bulk_keys=layer.bulk_keys.to("meta"), bulk_values=layer.bulk_values.to("meta"))
    launch(compute(query, rows, layer))
    launched, asked, tensors = launch(compute(query, rows, layer))
    assert ([name for name, _ in launched], asked, tensors) == (["local_kernel", "bulk_kernel"], [], 2)


def check_grown_scratch() -> None:
    """A layer whose steps need more memory replaces what they share: the next direct launches have the new one."""
    small, large = (Step(32, 32, 2, torch.float32, tokens).make_operands() for tokens in (3000, 60_000))
    for _ in range(2):
        before, _, _ = launch(compute(*small))
    launch(compute(*large))
    for _ in range(2):  # with all arguments, and with those that change
        directly, asked, _ = launch(compute(*small))
        assert not asked
        assert directly != before
        with watched():
            by_triton, _, _ = launch(compute(*small))
        assert directly == by_triton


def store(storer: Storer, query: Query, column: int | torch.Tensor) -> Callable[[], set[int]]:
    """A token's storing, which returns no tensors."""

    def work() -> set[int]:
        storer.store(replace(query), column)  # which changes it
        return set()

    return work


def check_storer() -> int:
    """The kernel that stores a token; returns the number of kinds of calls."""
    near = [torch.zeros(BATCH, KV_HEADS, COLUMNS, 32) for _ in range(2)]
    storer = Storer(near[0], near[1], 2 * KV_HEADS)
    place = torch.zeros(1, dtype=torch.int64)

    def draw(rows: int, prompts: int) -> Query:
        token, key, value = (torch.randn(BATCH, heads, 1, 32) for heads in (2 * KV_HEADS, KV_HEADS, KV_HEADS))
        moments = torch.zeros(rows * KV_HEADS, 1, 32), torch.zeros(rows * KV_HEADS, 32, 32), torch.zeros(rows, 1, 1, 1)
        return Query(token, 0.1, unstored=(key, value), moments=[moments] * prompts)

    def lay_out(query: Query) -> Query:
        """The same with keys farther apart: calls of another kind."""
        assert query.unstored is not None
        key, value = query.unstored
        return replace(query, unstored=(torch.cat([key, key], dim=3)[..., :32], value))

    kinds: list[tuple[int, int, Any]] = [(1, 0, 7), (1, 1, 7), (BATCH, 1, 7), (BATCH, 2, 7), (1, 2, place)]
    for rows, prompts, column in kinds:
        store(storer, draw(rows, prompts), column)()  # compiles it
        other = column if column is place else column + 1
        given = list[int]()  # how many arguments are tensors, which they are for the first ones of a kind
        drawn = [draw(rows, prompts) for _ in range(4)]
        for later in (drawn[0], lay_out(drawn[1]), lay_out(drawn[2]), drawn[3]):
            directly, asked, tensors = launch(store(storer, later, other))
            assert (len(directly), asked) == (1, [])
            given.append(tensors)
            with watched():
                by_triton, _, _ = launch(store(storer, later, other))
            assert directly == by_triton
        assert [count > 0 for count in given] == [False, True, False, False]
    return len(kinds)


def main() -> None:
    driver.set_active(DRIVER)
    check_bulk_in_host_memory()
    check_grown_scratch()
    print(f"{check_decode()} kernels are called directly, and one for {check_storer()} kinds of calls")


if __name__ == "__main__":
    main()
