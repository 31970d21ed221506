"""Checks that a bound step launches what Triton would: `python tests/helpers/direct_launches.py`.

The driver is a stand-in that launches nothing. Exits with an error unless a kernel that the package calls directly gets
the same arguments in the same order as through Triton. Nor may a step call kernels directly if Triton would compile
another variant. Kernels of a step have to be compiled side by side, each once.
"""

from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from eval.shared.compiling import Step
from eval.shared.launch_time import DRIVER, Launcher
from qada_cache.kernels.operands import Operands, Query, Rows
from qada_cache.kernels.triton import fused_decode


def launch(query: Query, rows: Rows, layer: Operands) -> tuple[list[tuple[str, list[Any]]], list[bool]]:
    """Run a decode step. Return the names and arguments of launched kernels, with "new" for tensors that each step
    makes; and for each kernel that was called through Triton, whether Triton was to launch it at once."""
    Launcher.launched.clear()
    compiles = {"autospec": True, "side_effect": JITFunction._do_compile}
    looked_for = mock.patch.object(JITFunction, "run", autospec=True, side_effect=JITFunction.run)
    with looked_for as run, mock.patch.object(JITFunction, "_do_compile", **compiles) as compiled:
        new = {tensor.data_ptr() for tensor in fused_decode(query, rows, layer)}
    assert all(call.args[-1] is True for call in compiled.call_args_list)  # side by side: not to be launched
    found = []
    for name, arguments in Launcher.launched:
        told = [one.data_ptr() if isinstance(one, torch.Tensor) else one for one in arguments]
        found.append((name, ["new" if one in new else one for one in told]))
    return found, [not call.kwargs["warmup"] for call in run.call_args_list]


def main() -> None:
    driver.set_active(DRIVER)
    counted = {"bulk_read_bytes": torch.zeros((), dtype=torch.int64)}
    query, rows, layer = Step(32, 32, 2, torch.float32, 3000, 1.5, 16, counted).make_operands()
    first, asked = launch(query, rows, layer)
    names = [name for name, _ in first]
    together = [False] * 3 + [True] * 3
    assert (names, asked) == (["local_kernel", "estimate_kernel", "selected_kernel"], together)
    assert launch(query, rows, layer) == (first, [])
    elsewhere = torch.zeros(query.states.numel() + 1)[1:].view_as(query.states)  # at no multiple of 16
    again, asked = launch(replace(query, states=elsewhere), rows, layer)
    assert ([name for name, _ in again], asked) == (names, together)
    assert again != first
    print(f"{len(names)} kernels are called directly")


if __name__ == "__main__":
    main()
