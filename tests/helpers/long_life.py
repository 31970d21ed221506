"""Checks that a process in use for long compiles no kernel again: `python tests/helpers/long_life.py`.

Texts of many lengths are read and continued, as on a GPU, in caches of some kinds. Nothing is compiled or computed:
Triton says for what it would compile each launch. Prints the number of variants of each kind of cache. Exits with an
error if later texts need a variant that earlier ones did not, or if a launch would use a kernel that was compiled for
other arguments: `Launches` looks for it by the `variant` that it is told.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from models import prompt, tiny
from stand_in import accelerator
from triton import knobs
from triton.runtime import driver

from eval.shared.launch_time import DRIVER
from qada_cache import QAdACache
from qada_cache.attention import joined
from qada_cache.kernels import choice, coding, copying, correlating, decode_trial, prompt_choice, storing
from qada_cache.kernels.cpu import building
from qada_cache.kernels.triton import launching, turn
from qada_cache.storage import row_tensors
from qada_cache.versions import pass_cache

# Options of caches.
KINDS: dict[str, dict[str, Any]] = {
    "16 bits": {"offloading": False},
    "16 bits, offloaded": {},
    "8 bits": {"bulk_bits": 8, "offloading": False},
    "prompts by selection": {"prefill_threshold": 1.0, "offloading": False},
}
# Rows, and the tokens of calls behind each other; below 0, how many are cropped. First texts with and without a sketch;
# then also single ones without a bulk, and ones whose buffers move.
Text = tuple[int, tuple[int, ...]]
EARLIER: list[Text] = [(2, (60, 1)), (2, (300, 1)), (2, (1300, 1, 5)), (1, (300, 1, 2, 130))]
EARLIER += [(1, (1500, *[1] * 140, 2, 16, 300, 1, -200, 5, 1))]
LATER: list[Text] = [(1, (60, 1, 5, 1, 200, 1)), (2, (700, 1, 3, 1, 600, *[1] * 20, 8, 1))]
LATER += [(1, (1536, 16, 64, 256, 100, 512, 513, 1, 3, 7, 129, 600, -1, 1, -128, 31, 2, 1))]
LATER += [(1, (2049, *[1] * 17, 600, 8, 128, 1, -300, 77, 1, 256, 300))]
HEADS, SCORES = 4, 1 << 14  # estimates that are computed at once: of several queries of a turn at first, then of one

seen: set[tuple[str, str]] = set()  # a kernel's name, and for what Triton would compile it
newest: list[tuple[str, str]] = []
launch_by_triton = launching.Launches.launch


def note(*, key: str, fn: Any, **_: Any) -> bool:
    """Triton's hook before it compiles a kernel, which it then does not."""
    newest[:] = [(fn.name, key)]
    seen.add(newest[0])
    return True


def launch(launches: launching.Launches, kernel: Any, grid: Any, variant: tuple[Any, ...], *args: Any) -> None:
    """`Launches.launch`, which finds nothing compiled and so asks Triton each time. A variant is one of Triton's."""
    launch_by_triton(launches, kernel, grid, variant, *args)
    known = launches.__dict__.setdefault("known", {})
    assert known.setdefault((kernel, variant), newest[0]) == newest[0], f"{variant}: {newest[0]}"


def build_nothing(*_: Any) -> None:
    """Stands in for the build of C++ kernels, which would take longer than all else here."""
    raise OSError("they are not looked at")


@contextmanager
def as_on_gpu() -> Iterator[None]:
    """Inside, caches on the CPU launch what they launch on a GPU, where no kernel is found to be at fault."""
    with ExitStack() as stack:
        for module in (choice, coding, copying, correlating, prompt_choice):
            stack.enter_context(mock.patch.object(module, "explain_unsupported", return_value=None))
        for module in (choice, coding, copying, correlating, prompt_choice, storing):
            stack.enter_context(mock.patch.object(module, "AUTO_DEVICES", ("cpu",)))
        faults = {coding: "coding", copying: "copying", correlating: "correlating", storing: "storing"}
        for module, name in (faults | {decode_trial: "decode"}).items():
            stack.enter_context(mock.patch.object(module, f"find_{name}_fault", return_value=None))
        stack.enter_context(mock.patch.object(prompt_choice, "_find_prompt_fault", return_value=None))
        stack.enter_context(mock.patch.object(choice.compiled_decode, "supports", return_value=False))
        stack.enter_context(mock.patch.object(building, "_load", build_nothing))
        stack.enter_context(mock.patch.object(joined, "DEVICES", ("cpu",)))
        stack.enter_context(mock.patch.object(row_tensors, "REPLAYING", ("cpu",)))
        stack.enter_context(mock.patch.object(turn, "BLOCK_SCORES", SCORES))
        stack.enter_context(mock.patch.object(launching.Launches, "launch", launch))
        yield


@torch.inference_mode()
def use(model: Any, options: dict[str, Any], rows: int, calls: tuple[int, ...]) -> None:
    """Let the model read texts in these calls."""
    cache = QAdACache(model, kernels="auto", moments="current", **options)
    for tokens in calls:
        if tokens < 0:
            cache.crop(tokens)
        else:
            model(prompt(*[tokens] * rows)[0], **pass_cache(cache), logits_to_keep=1)


def main() -> None:
    driver.set_active(DRIVER)
    knobs.runtime.jit_cache_hook = note
    sizes = {"head_dim": 32, "num_attention_heads": HEADS, "num_key_value_heads": 2}
    model = tiny(num_hidden_layers=1, max_position_embeddings=2**14, dtype=torch.bfloat16, **sizes)
    with as_on_gpu():
        for name, options in KINDS.items():
            with accelerator() if options.get("offloading", True) else nullcontext():
                for text in EARLIER:
                    use(model, options, *text)
                earlier = set(seen)
                for text in LATER:
                    use(model, options, *text)
            assert seen == earlier, f"{name}: {seen - earlier}"
            print(f"{name}: {len(seen)} variants so far")


if __name__ == "__main__":
    main()
