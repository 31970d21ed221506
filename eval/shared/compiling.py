"""What Triton compiles for one decode step, and to store tokens, for CUDA devices that need not be there.

Triton's kernels are bound to its interpreter where `TRITON_INTERPRET=1` when they are imported: compile without it.
"""

import functools
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia
from triton.compiler import ASTSource

from qada_cache.kernels import triton as triton_decode
from qada_cache.kernels.operands import Operands, Query, Rows
from qada_cache.kernels.triton import (
    coding,
    copying,
    correlating,
    deriving,
    latents,
    recording,
    selected_prompt,
    storing,
)
from qada_cache.kernels.triton.turn import fused_turn
from qada_cache.sketch import SEGMENT_TOKENS, Layout, find_segment_start
from qada_cache.sketch.codec import Sketch, list_fields
from qada_cache.sketch.coded import STRIDES, RecordLayout, Records

TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
TYPES |= {
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.bool: "i1",
}
TYPES[torch.float8_e4m3fn] = "fp8e4nv"
KERNELS = ("local_kernel", "bulk_kernel", "estimate_kernel", "selected_kernel")
STORING = {coding: ("describe_kernel", "code_kernel", "scale_kernel"), deriving: ("derive_kernel",)}  # and, of records:
RECORDING = {recording: ("record_kernel",)}
ABSORBING = {correlating: ("correlate_kernel", "merge_kernel"), copying: ("copy_kernel",)}
LATENTS = {latents: ("latent_kernel", "recorded_latent_kernel", "latent_merge_kernel")}
PROMPT = {selected_prompt: ("share_kernel", "sample_kernel", "read_kernel")}
ALIGNED = [["tt.divisibility", 16]]  # what Triton assumes of pointers and multiples of 16
OPTIONS = ("num_stages", "num_warps", "maxnreg", "enable_fp_fusion")  # of a launch, for the compiler alone
SKETCHES = {"0": (0, 16), "1.5": (1.5, 16), "1.5+8": (1.5, 8), "1.5+4": (1.5, 4)}  # bits of the sketch and of the bulk
COLUMNS, BATCH, KV_HEADS = 70, 2, 2


@dataclass(frozen=True)
class Step:
    """A decode step by its sizes: what kernels are compiled for."""

    dim: int
    value_dim: int
    group: int
    dtype: torch.dtype
    capacity: int  # tokens that the bulk has room for
    bits: float = 0  # of the sketch, a value; 0: without one
    rung: int = 16  # `bulk_bits`
    options: dict[str, Any] = field(default_factory=dict)  # of `Operands`
    queries: int = 1  # of a row: several are a turn
    shared: bool = False  # whether values are the first channels of keys

    def make_operands(self) -> tuple[Query, Rows, Operands]:
        """What a kernel is told."""
        size, dtype = {"device": "cpu"}, self.dtype
        mask = torch.zeros(BATCH, 1, self.queries, COLUMNS, dtype=torch.bool, **size)
        flat = torch.zeros(BATCH, 1, self.queries, dtype=torch.int64, **size)
        query = Query(torch.zeros(BATCH, KV_HEADS * self.group, self.queries, self.dim, dtype=dtype, **size), 0.1)
        query.log_bulk = torch.zeros(BATCH, KV_HEADS, self.group, self.queries, dtype=torch.float32, **size)
        rows = Rows(mask, mask, flat, flat[:, 0, 0].contiguous(), torch.ones_like(flat, dtype=torch.bool))
        stored_dim = 0 if self.shared else self.value_dim  # of values in records
        records = RecordLayout.from_bits(self.dim, stored_dim, self.rung) if self.bits else None
        stored = self.capacity - (find_segment_start(self.capacity) if records else 0)
        shapes = [(BATCH, KV_HEADS, tokens, dim) for tokens in (COLUMNS, stored) for dim in (self.dim, self.value_dim)]
        held = [torch.zeros(shape, dtype=dtype, **size) for shape in shapes]
        if self.shared:
            held[1::2] = [keys[..., : self.value_dim] for keys in held[::2]]
        layer = Operands(*held, logit_threshold=0.4, **self.options)
        if self.bits:
            layout = Layout.from_bits(self.dim, self.bits)
            assert layout is not None
            fields = list_fields(self.dim, self.value_dim, layout.count, self.capacity).items()
            made = {name: torch.zeros(BATCH, KV_HEADS, *shape, dtype=kind, **size) for name, (kind, shape) in fields}
            layer.sketch, layer.token_threshold = Sketch(**made), 1.0
            layer.sketch_read_bytes = torch.zeros((), dtype=torch.int64, **size)
        if records:
            rooms = self.capacity, stored
            stride = records.find_stride(torch.device("cuda"))
            tensors = [torch.zeros(BATCH, KV_HEADS, room, stride, dtype=torch.uint8, **size) for room in rooms]
            layer.records = Records(*tensors, torch.ones(KV_HEADS, self.dim, dtype=torch.float32, **size), records)
        return query, rows, layer

    def record_launches(self) -> list["Recorder"]:
        """What it launches."""
        kernel = triton_decode.fused_decode if self.queries == 1 else fused_turn
        return _record({triton_decode: KERNELS}, lambda: kernel(*self.make_operands()))

    def record_near(self) -> list["Recorder"]:
        """What is launched before: it puts the token into the near buffers, and estimates by two prompts' moments."""
        query, _, layer = self.make_operands()
        # Values that are channels of keys are not stored beside them.
        values = layer.near_values[..., :0] if self.shared else layer.near_values
        near, size = (layer.near_keys, values), {"dtype": torch.float32, "device": "cpu"}
        mean = torch.zeros(BATCH * KV_HEADS, 1, self.dim, **size)
        moments = mean, mean.new_zeros(BATCH * KV_HEADS, self.dim, self.dim), torch.zeros(BATCH, 1, 1, 1, **size)
        query.unstored, query.moments = (near[0][:, :, :1], near[1][:, :, :1]), [moments, moments]
        storer = storing.Storer(*near, KV_HEADS * self.group)
        return _record({storing: ("store_kernel",)}, lambda: storer.store(query, 0))

    def record_storing(self) -> list["Recorder"]:
        """What is launched as its tokens are stored, by query energies: to make a sketch, or records behind one."""
        layer = self.make_operands()[2]
        sketch, records, closed = layer.sketch, layer.records, (self.capacity // SEGMENT_TOKENS - 1) * SEGMENT_TOKENS
        assert sketch is not None
        shape, size = (BATCH, KV_HEADS, closed), {"dtype": self.dtype, "device": "cpu"}
        keys, values = (torch.zeros(*shape, dim, **size) for dim in (self.dim, self.value_dim))
        weights, rows = torch.ones(KV_HEADS, self.dim, dtype=torch.float32, device="cpu"), slice(0, BATCH)
        if records is not None:
            told = sketch, rows, 0, keys, values, weights, records.layout
            return _record(RECORDING, lambda: recording.code_records(*told))
        covariance = torch.zeros(BATCH, KV_HEADS, self.value_dim, self.dim, dtype=torch.float32, device="cpu")

        def store() -> None:
            coding.code_segments(sketch, rows, 0, keys, weights)
            deriving.derive(sketch, rows, closed, covariance)

        return _record(STORING, store)


def record_prompt(dim: int, group: int, capability: tuple[int, int], block: int) -> list["Recorder"]:
    """What is launched to read a prompt by selection on a device of such a capability, `block` queries together."""
    query, key, value = (
        torch.zeros(1, heads, 2 * selected_prompt.BLOCK, dim, dtype=torch.bfloat16, device="cpu")
        for heads in (group, 1, 1)
    )
    told = {"scaling": 0.1, "threshold": 1.0, "sinks": 4, "window": 1, "out": torch.empty_like(query)}
    of_block = mock.patch.object(selected_prompt, "find_block", return_value=block)
    with mock.patch.object(selected_prompt, "find_capability", return_value=capability), of_block:
        return _record(PROMPT, lambda: selected_prompt.selected_attention(query, key, value, **told))


def record_latents(
    dim: int, rank: int, queries: int, dtype: torch.dtype, *, most: int, rung: int = 16
) -> list["Recorder"]:
    """What is launched to attend to a part of a layer's latents, with queries of so many heads, of which a program
    takes at `most` so many; `rung` is `bulk_bits`."""
    query, tokens = (torch.zeros(BATCH, 1, count, dim, dtype=dtype, device="cpu") for count in (queries, 2000))
    layer = Step(dim, rank, queries, dtype, 2000, 1.5, rung, shared=True).make_operands()[2]

    def attend() -> None:
        if layer.records is None:
            latents.attend_latents(query, tokens, rank, scaling=0.1)
            return
        assert layer.sketch is not None
        held, weights = layer.records.tensor[:, :1], layer.records.weights[:1]
        told = layer.sketch.map(lambda part: part[:, :1]), weights, layer.records.layout, rank
        latents.attend_recorded_latents(query, held, *told, scaling=0.1, segments=3)

    with mock.patch.object(latents, "find_most_queries", return_value=most):
        return _record(LATENTS, attend)


def record_absorbing(dim: int, dtype: torch.dtype) -> list["Recorder"]:
    """What is launched to take tokens into moments, and to copy them to others."""
    tokens = torch.zeros(BATCH, KV_HEADS, 600, dim, dtype=dtype, device="cpu")
    mean = torch.zeros(BATCH, KV_HEADS, dim, dtype=torch.float32, device="cpu")

    def absorb() -> None:
        correlating.take_in(1, (mean, mean), mean.new_zeros(BATCH, KV_HEADS, dim, dim), tokens, tokens)
        copying.copy_tokens([(tokens, tokens)] * 4, tokens.device)

    return _record(ABSORBING, absorb)


def _record(kernels: dict[Any, tuple[str, ...]], launch: Callable[[], Any]) -> list["Recorder"]:
    """Those of `kernels`, by module, that `launch` launches."""
    recorders = {(module, name): Recorder(getattr(module, name)) for module, names in kernels.items() for name in names}
    try:
        for (module, name), recorder in recorders.items():
            setattr(module, name, recorder)
        with mock.patch.dict(STRIDES, cpu=STRIDES["cuda"]):  # which these tensors stand for
            launch()
    finally:
        for (module, name), recorder in recorders.items():
            setattr(module, name, recorder.kernel)
    return [recorder for recorder in recorders.values() if recorder.arguments]


class Recorder:
    """Stands in for a kernel: takes launches, and computes nothing."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.arguments: dict[str, Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            self.arguments = dict(zip(self.kernel.arg_names, args, strict=False)) | kwargs

        return launch


def specialize(kernel: Any, arguments: dict[str, Any]) -> ASTSource:
    """The kernel specialised to the arguments of a launch, as Triton's launcher would."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], Any] = {}
    fixed = {parameter.name: parameter.is_constexpr for parameter in kernel.params}
    general = {parameter.name: parameter.do_not_specialize for parameter in kernel.params}
    unaligned = {parameter.name: parameter.do_not_specialize_on_alignment for parameter in kernel.params}
    for index, name in enumerate(kernel.arg_names):
        value = arguments[name]
        if fixed[name] or value is None or (isinstance(value, int) and value == 1 and not general[name]):
            signature[name], constants[(index,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name], attributes[(index,)] = "*" + TYPES[value.dtype], ALIGNED
        else:
            signature[name] = "i32" if isinstance(value, int) else "fp32"
            if isinstance(value, int) and value % 16 == 0 and not (general[name] or unaligned[name]):
                attributes[(index,)] = ALIGNED
    return ASTSource(kernel, signature, constants, attributes)


class Compiled:
    """A recorded launch, compiled for a compute capability: 80 is 8.0."""

    def __init__(self, recorder: Recorder, capability: int) -> None:
        given = {name: value for name, value in recorder.arguments.items() if name in OPTIONS}
        made = specialize(recorder.kernel, recorder.arguments)
        self.fuses: bool = given.get("enable_fp_fusion", False)  # products and sums, whichever Triton it is
        found = triton.compile(made, target=GPUTarget("cuda", capability, 32), options=given)
        self.shared: int = found.metadata.shared  # bytes that a program takes
        self.ptx: str = found.asm["ptx"]
        self._cubin: bytes = found.asm["cubin"]
        self.usage = self._print("-res-usage")
        self.registers = self._find_used("REG")  # of a thread
        self.stack = self._find_used("STACK") + self._find_used("LOCAL")  # bytes of a thread; above 0 registers spill

    @functools.cached_property
    def instructions(self) -> list[tuple[int, str]]:
        """Addresses and texts of the code's instructions."""
        found = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(\S.*?);", self._print("-sass"), re.MULTILINE)
        return [(int(address, 16), text) for address, text in found]

    def count_loops(self) -> list[int]:
        """Instructions of each turn of the innermost loops, in the code's order: from where a branch goes back to."""
        spans = []
        for address, text in self.instructions:
            branch = re.search(r"\bBRA\b.*\b0x([0-9a-f]+)", text)
            if branch and int(branch[1], 16) < address:
                spans.append(range(int(branch[1], 16), address + 1))
        inner = [span for span in spans if not any(other != span and other[0] in span for other in spans)]
        return [sum(address in span for address, _ in self.instructions) for span in inner]

    def _find_used(self, kind: str) -> int:
        found = re.search(rf" {kind}:(\d+)", self.usage)
        assert found is not None
        return int(found[1])

    def _print(self, option: str) -> str:
        """What the disassembler that comes with Triton says."""
        tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
        with tempfile.TemporaryDirectory() as folder:
            cubin = Path(folder) / "kernel.cubin"
            cubin.write_bytes(self._cubin)
            return subprocess.run([tool, option, cubin], check=True, capture_output=True, text=True).stdout
