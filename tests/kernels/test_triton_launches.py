"""The host's work for a step of Triton's kernels, launches and torch's operations, and memory that steps share."""

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from decode_scene import Scene, step_of
from operations import Operations
from record_scene import RecordScene
from small_sketch import small_sketch

pytest.importorskip("triton", reason="triton is not installed: pip install triton", exc_type=ModuleNotFoundError)
from steps import Launched, interpreter

from eval.shared import launch_time
from qada_cache.decode_graph.capturing import GRAPHS
from qada_cache.kernels import choice, decode_reference
from qada_cache.kernels import triton as triton_decode
from qada_cache.kernels.triton import scratch, storing
from qada_cache.kernels.triton.scratch import Scratch

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small() -> Iterator[None]:
    """Rows of few tokens have a sketch."""
    with small_sketch(40):
        yield


@pytest.mark.parametrize(
    ("kind", "sizes", "expected"),
    [
        (Scene, {"bulk": []}, ["local_kernel"]),  # no room for a bulk
        (Scene, {}, ["local_kernel", "bulk_kernel"]),
        (Scene, {"bits": 2}, ["local_kernel", "estimate_kernel", "selected_kernel"]),
        (RecordScene, {"bits": 2}, ["local_kernel", "estimate_kernel", "selected_kernel"]),
    ],
)
def test_what_a_step_launches_and_allocates(
    kind: type[Scene], sizes: dict[str, Any], expected: list[str], launched: list[Any]
) -> None:
    """Three kernels at most; from the second step on nothing but the two tensors that are handed out."""
    made = kind(**({"bulk": [(777, 9), (39, 0)]} | sizes)).step_arguments()
    call = step_of(**made)
    triton_decode.fused_decode(*call)
    assert [name for name, _ in launched] == expected
    call = *step_of(**made)[:2], call[2]
    with Operations() as found:
        triton_decode.fused_decode(*call)
    assert [name for name, _ in launched] == 2 * expected
    assert list(map(str, found.called)) == ["aten.empty_like.default"] * 2


@pytest.mark.usefixtures("launched")
def test_a_layer_holds_no_memory_like_a_steps() -> None:
    """A turn of many queries has large outputs, and a model has many layers."""
    query, rows, layer = step_of(**Scene(bulk=[(777, 9), (39, 0)]).step_arguments())
    handed_out = triton_decode.fused_decode(query, rows, layer)
    held = [part for part in vars(layer.bound).values() if isinstance(part, torch.Tensor)]
    assert all(part.is_contiguous() for part in handed_out)
    assert sum(part.untyped_storage().nbytes() for part in held) < handed_out[0].nbytes / 10


@interpreter
def test_layers_take_turns() -> None:
    """At the same memory: layers of other sizes, and other queries of one that was bound before."""
    held = []
    for scene in (
        Scene(bulk=[(111, 9), (63, 0)], short=(), bits=2),
        RecordScene(bulk=[(777, 9)], short=(2,), bits=2, group=4, kv_heads=1),
        Scene(bulk=[(63, 1)], short=(2,), dim=64),
    ):
        made = scene.step_arguments(threshold=scene.threshold())
        held.append((made, step_of(**made)[2]))
    for factor in (1.0, 0.8):
        for made, layer in held:
            given = made | {"query": made["query"] * factor}
            out, flags = triton_decode.fused_decode(*step_of(**given)[:2], layer)
            wanted, wanted_flags = decode_reference.decode_step(*step_of(**given))
            assert torch.equal(flags, wanted_flags)
            torch.testing.assert_close(out, wanted, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(("sketch", "launches"), [("0", 3), ("1.5", 4), ("1.5+8", 4)])
@torch.no_grad()
def test_a_layers_whole_step(sketch: str, launches: int, launched: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Storing, the criterion and the kernels, as a model asks for them; and that a graph leaves none of it."""
    monkeypatch.setattr(storing, "store_kernel", Launched("store_kernel", launched))
    monkeypatch.setattr(launch_time, "LAYERS", 2)
    monkeypatch.setattr("qada_cache.attention.plan.CHECKS", False)
    monkeypatch.setattr(choice, "explain_unsupported", lambda *_: None)
    monkeypatch.setitem(GRAPHS, "cpu", launch_time.NoGraph)
    decoder = launch_time.make_ours(*launch_time.SKETCHES[sketch])
    operations = decoder.counted[1] = launch_time.Operations()
    launched.clear()
    launch_time.make_step(decoder, None)()
    assert len(launched) == 2 * launches
    # Torch's only operations are views; outputs and decisions take memory.
    assert (operations.computed, operations.allocated) == (0, 2)
    decoder.counted.clear()
    graph, before = launch_time.DecodeGraph(asked=True), decoder.cache.get_seq_length()
    step = launch_time.make_step(decoder, graph)
    for _ in range(4):
        step()
    launched.clear()
    step()
    assert not launched
    assert decoder.cache.get_seq_length() == before + 5


def test_memory_of_a_thread_is_one() -> None:
    """For all layers, as much as the one with the most needs; gone with them. Another thread has its own."""
    scratch._buffers.by_stream.clear()
    small, large = Scratch(numbers=(torch.float32, 10), counts=(torch.int64, 3)), Scratch(numbers=(torch.float32, 1000))
    first = small.find(CPU)
    assert {name: (part.dtype, part.numel()) for name, part in first.items()} == {
        "numbers": (torch.float32, 10),
        "counts": (torch.int64, 3),
    }
    assert first["counts"].data_ptr() % 16 == 0
    assert first["counts"].data_ptr() >= first["numbers"].data_ptr() + first["numbers"].nbytes
    assert small.find(CPU)["numbers"] is first["numbers"]
    grown = large.find(CPU)["numbers"].data_ptr()
    assert small.find(CPU)["numbers"].data_ptr() == grown
    assert large.find(CPU)["numbers"].data_ptr() == grown
    elsewhere: list[int] = []
    thread = threading.Thread(
        target=lambda: elsewhere.append(Scratch(one=(torch.uint8, 1)).find(CPU)["one"].data_ptr())
    )
    thread.start()
    thread.join()
    assert elsewhere[0] != grown
    assert large.find(CPU)["numbers"].data_ptr() == grown
    del small, large, first
    gc.collect()
    assert not len(scratch._buffers.by_stream)
