"""Compile the decode kernels for CUDA devices that need not be there: `python tests/helpers/compile_for_cuda.py few`.

The interpreter accepts kernels that the compiler refuses. Prints, for each, the shared memory a program takes; exits
with an error if one does not compile, spills registers to memory, takes more than the device has, or reads the bulk in
copies of less than 16 bytes.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from decode_scene import step_of
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia
from triton.compiler import ASTSource

from qada_cache.kernels import triton as triton_decode
from qada_cache.sketch import Layout
from qada_cache.sketch.codec import Sketch, sketch_fields

TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
TYPES |= {torch.int64: "i64", torch.int32: "i32", torch.uint8: "u8", torch.int8: "i8", torch.bool: "i1"}
KERNELS = ("local_kernel", "bulk_kernel", "estimate_kernel", "selected_kernel", "merge_kernel")
SHARED = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}  # bytes a program may take, by compute capability
ALIGNED = [["tt.divisibility", 16]]  # what Triton assumes of pointers and multiples of 16


class Recorder:
    """Stands in for a kernel: takes launches, and computes nothing."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.arguments: dict[str, Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            self.arguments = dict(zip(self.kernel.arg_names, args, strict=False)) | kwargs

        return launch


def source(recorder: Recorder) -> ASTSource:
    """The kernel specialised to the recorded launch, as Triton's launcher would."""
    kernel, signature, constants, attributes = recorder.kernel, {}, {}, {}
    fixed = {parameter.name: parameter.is_constexpr for parameter in kernel.params}
    general = {parameter.name: parameter.do_not_specialize for parameter in kernel.params}
    unaligned = {parameter.name: parameter.do_not_specialize_on_alignment for parameter in kernel.params}
    for index, name in enumerate(kernel.arg_names):
        value = recorder.arguments[name]
        if fixed[name] or value is None or (isinstance(value, int) and value == 1 and not general[name]):
            signature[name], constants[(index,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name], attributes[(index,)] = "*" + TYPES[value.dtype], ALIGNED
        else:
            signature[name] = "i32" if isinstance(value, int) else "fp32"
            if isinstance(value, int) and value % 16 == 0 and not (general[name] or unaligned[name]):
                attributes[(index,)] = ALIGNED
    return ASTSource(kernel, signature, constants, attributes)


def launches(
    *, dim: int, value_dim: int, group: int, dtype: torch.dtype, capacity: int, options: dict[str, Any]
) -> list[Recorder]:
    """What one decode step launches."""
    batch, kv_heads, columns = 2, 2, 70
    recorders = {name: Recorder(getattr(triton_decode, name)) for name in KERNELS}
    mask = torch.zeros(batch, 1, 1, columns, dtype=torch.bool)
    shapes = [(batch, kv_heads, tokens, size) for tokens in (columns, capacity) for size in (dim, value_dim)]
    for name, recorder in recorders.items():
        setattr(triton_decode, name, recorder)
    names = ("local_keys", "local_values", "bulk_keys", "bulk_values")
    call = step_of(
        query=torch.zeros(batch, kv_heads * group, 1, dim, dtype=dtype),
        **{name: torch.zeros(shape, dtype=dtype) for name, shape in zip(names, shapes, strict=True)},
        local=mask, pending=mask, bulk_lengths=torch.zeros(batch, dtype=torch.int64),
        bulk_tokens=torch.zeros(batch, 1, 1, dtype=torch.int64), decided=torch.ones(batch, 1, 1, dtype=torch.bool),
        scaling=0.1, logit_threshold=0.4, log_bulk=torch.zeros(batch, kv_heads, group, 1), **options,
    )  # fmt: skip
    triton_decode.fused_decode(*call)
    for name, recorder in recorders.items():
        setattr(triton_decode, name, recorder.kernel)
    return [recorder for recorder in recorders.values() if recorder.arguments]


def sketch(*, kv_heads: int, dim: int, value_dim: int, capacity: int, bits: float) -> Sketch:
    fields = sketch_fields(dim, value_dim, Layout.from_bits(dim, bits).count, capacity).items()
    return Sketch(**{name: torch.zeros(2, kv_heads, *shape, dtype=dtype) for name, (dtype, shape) in fields})


def check(recorder: Recorder, capability: int, label: str) -> None:
    target = GPUTarget("cuda", capability, 32)
    options = {name: value for name, value in recorder.arguments.items() if name == "num_stages"}
    compiled = triton.compile(source(recorder), target=target, options=options)
    shared = compiled.metadata.shared
    print(f"sm_{capability} {label} {recorder.kernel.__name__}: {shared} bytes of shared memory")
    assert shared <= SHARED[capability], "more shared memory than the device has"
    if recorder.kernel in (triton_decode.bulk_kernel, triton_decode.selected_kernel):
        copies = set(re.findall(r"cp\.async\.c\w\.shared\.global \[.*?\], \[.*?\], (\w+)", compiled.asm["ptx"]))
        indices = {"0x4"} if recorder.kernel is triton_decode.selected_kernel else set()
        assert copies == {"0x10"} | indices, f"copies of {sorted(copies)} bytes"
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
        usage = subprocess.run([tool, "-res-usage", cubin], check=True, capture_output=True, text=True).stdout
    for kind in ("STACK", "LOCAL"):
        assert f" {kind}:0 " in usage, f"spills registers: {usage}"


def main() -> None:
    """Some of the many combinations: every group rule and dtype, the largest sizes, odd sizes, no bulk; each with a
    sketch and without. The first argument says whether the "few" that most people meet, or the "rest"."""
    few, kv_heads = sys.argv[1] == "few", 2
    count = {"bulk_read_bytes": torch.zeros((), dtype=torch.int64)}
    placed = {
        "resident_pointers": torch.zeros(2, kv_heads, 2, dtype=torch.int64),
        "resident_hit_bytes": torch.zeros((), dtype=torch.int64),
    }
    usual: list[tuple[Any, ...]] = [
        (90, torch.bfloat16, 128, 128, 4, 40_000, 0, {**count, **placed}),
        (90, torch.bfloat16, 128, 128, 4, 40_000, 2, {**count, **placed}),
        (89, torch.float32, 64, 64, 1, 2000, 1, {}),
        (89, torch.bfloat16, 96, 80, 3, 2000, 2, {"group_rule": "any"}),
    ]
    rest: list[tuple[Any, ...]] = [
        (80, torch.float16, 256, 256, 8, 2000, 0, {**count, "group_rule": "any"}),
        (80, torch.float16, 256, 256, 8, 2000, 4, count),
        (89, torch.float32, 64, 64, 1, 2000, 0, {"group_rule": "any"}),
        (80, torch.float32, 256, 256, 2, 2000, 0, {}),
        (80, torch.float32, 256, 256, 2, 2000, 1, {}),
        (89, torch.bfloat16, 96, 80, 3, 0, 2, {"group_rule": "any"}),
        (90, torch.bfloat16, 64, 64, 64, 2000, 2, {}),
    ]
    for capability, dtype, dim, value_dim, group, capacity, bits, options in usual if few else rest:
        if bits:
            options |= {
                "sketch": sketch(kv_heads=kv_heads, dim=dim, value_dim=value_dim, capacity=capacity, bits=bits),
                "sketch_read_bytes": torch.zeros((), dtype=torch.int64),
                "token_threshold": 1.0,
            }
        label = f"{dtype} dim {dim}, {value_dim} group {group} bits {bits}"
        for recorder in launches(
            dim=dim, value_dim=value_dim, group=group, dtype=dtype, capacity=capacity, options=options
        ):
            check(recorder, capability, label)


if __name__ == "__main__":
    main()
