"""Compiles Triton's kernels for CUDA devices, none of which is needed: `python tests/helpers/compile_for_cuda.py few`.

The kernels are those of decode steps, of prompts and of latents, and those that store tokens. The compiler refuses some
kernels that Triton's interpreter accepts. Prints each kernel's shared memory of a program. Exits with an error if one
does not compile, spills registers, or needs more shared memory than the device has. So it does if a kernel copies the
bulk by less than 16 bytes, or records by less than 4.
"""

import re
import sys

import torch
import triton

from eval.shared.compiling import Compiled, Recorder, Step, record_absorbing, record_latents, record_prompt
from qada_cache.kernels import triton as triton_decode
from qada_cache.kernels.triton import latents

# Bytes of shared memory a program, by compute capability.
SHARED = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
BLACKWELL = (100, 120)
SOME = 128  # bytes of a thread's registers


def check_usage(compiled: Compiled, capability: int) -> None:
    """Assert that a kernel fits into shared memory and spills no registers. Other Tritons than that of the table of
    resources let some spill, and so does this one on devices that it knows less."""
    assert compiled.shared <= SHARED[capability], "more shared memory than the device has"
    tuned = triton.__version__.startswith("3.7.") and capability not in BLACKWELL
    assert compiled.stack <= (0 if tuned else SOME), f"spills registers: {compiled.usage}"
    assert compiled.fuses, "Triton may compute a product and a sum by two instructions"


def check(recorder: Recorder, capability: int, step: Step) -> None:
    """Compile one kernel of a decode step; check its memory, its copies of the bulk, and its products of codes."""
    compiled, kernel = Compiled(recorder, capability), recorder.kernel
    print(
        f"sm_{capability} {step.dtype} dim {step.dim}, {step.value_dim} group {step.group} bits {step.bits} and "
        f"{step.rung} {kernel.__name__}: {compiled.shared} bytes of shared memory"
    )
    check_usage(compiled, capability)
    if kernel in (triton_decode.bulk_kernel, triton_decode.selected_kernel):
        copies = set(re.findall(r"cp\.async\.c\w\.shared\.global \[.*?\], \[.*?\], (\w+)", compiled.ptx))
        copies -= {"0x8"} if step.shared else set()  # rotary channels, which are few
        assert copies == {"0x10", "0x4"}, f"copies of {sorted(copies)} bytes"  # words: of parts' sums, indices, records
    if kernel is triton_decode.estimate_kernel:
        assert "dp4a.u32.s32" in compiled.ptx, "bytes of codes are multiplied one by one"


def check_prompts(few: bool) -> None:
    """Compile and check the kernels that read prompts by selection."""
    usual = [(90, 128, 4, 128)]
    rest = [(80, 128, 4, 64), (89, 128, 8, 128), (80, 80, 1, 128), (90, 64, 3, 128), (90, 80, 1, 128)]
    rest += [(80, 128, 4, 128), (90, 128, 4, 64), (89, 128, 8, 64), (80, 80, 1, 64), (90, 64, 3, 64)]
    rest += [(capability, 256, group, 64) for capability, group in ((80, 8), (89, 2), (90, 1))]
    rest += [(capability, 128, 4, block) for capability in BLACKWELL for block in (64, 128)]
    for capability, dim, group, block in usual if few else rest:
        for recorder in record_prompt(dim, group, divmod(capability, 10), block):
            compiled = Compiled(recorder, capability)
            print(f"sm_{capability} {recorder.kernel.__name__}: {compiled.shared} bytes of shared memory")
            check_usage(compiled, capability)


def check_latents(few: bool) -> None:
    """Compile and check the kernels of latent attention, which read tokens 16 bytes at a time."""
    usual = [(90, 576, 512, 16, torch.bfloat16, 16), (90, 576, 512, 128, torch.bfloat16, 8)]
    rest = [(89, 576, 512, 128, torch.float16, 16), (80, 576, 512, 128, torch.bfloat16, 16)]
    rest += [(80, 288, 256, 40, torch.bfloat16, rung) for rung in (16, 8)] + [(89, 576, 512, 128, torch.float16, 4)]
    rest += [(capability, *sizes) for capability in BLACKWELL for _, *sizes in usual]
    for capability, *sizes, rung in usual if few else rest:
        most = latents.QUERIES if SHARED[capability] < latents.WIDE_MEMORY else latents.WIDE_QUERIES
        for recorder in record_latents(*sizes, most=most, rung=rung):
            compiled, name = Compiled(recorder, capability), recorder.kernel.__name__
            print(f"sm_{capability} {name}: {compiled.shared} bytes of shared memory")
            check_usage(compiled, capability)
            copies = set(re.findall(r"cp\.async\.c\w\.shared\.global \[.*?\], \[.*?\], (\w+)", compiled.ptx))
            assert copies <= {"0x10"}, f"copies of {sorted(copies)} bytes"


def check_absorbing(few: bool) -> None:
    """Kernels that take tokens in, which are read and written 16 bytes at a time."""
    rest = [(80, 256, torch.float16), *((capability, 128, torch.bfloat16) for capability in BLACKWELL)]
    for capability, dim, dtype in [(90, 128, torch.bfloat16)] if few else rest:
        for recorder in record_absorbing(dim, dtype):
            compiled, name = Compiled(recorder, capability), recorder.kernel.__name__
            print(f"sm_{capability} {name}: {compiled.shared} bytes of shared memory")
            check_usage(compiled, capability)
            if name == "copy_kernel":
                assert set(re.findall(r"(?:ld|st)\.global\.\w+", compiled.ptx)) == {"ld.global.v4", "st.global.v4"}


def main() -> None:
    """Compile and check a choice of the many combinations: every group rule and dtype, the largest sizes, odd sizes, no
    bulk; each with a sketch, with records and without. The first argument is "few", for usual ones, or "rest"."""
    few = sys.argv[1] == "few"
    count = {"bulk_read_bytes": torch.zeros((), dtype=torch.int64)}
    any_head = {"group_rule": "any"}
    usual = [
        (90, Step(128, 128, 4, torch.bfloat16, 40_000, options=count)),
        (90, Step(128, 128, 4, torch.bfloat16, 40_000, 1.5, 8, options=count)),
        (80, Step(64, 64, 7, torch.bfloat16, 40_000, 1.5, 4, options=count)),
        (90, Step(576, 512, 16, torch.bfloat16, 40_000, 1.5, options=count, shared=True)),
        (90, Step(576, 512, 16, torch.bfloat16, 40_000, 1.5, 8, options=count, shared=True)),
    ]
    others = [
        (89, Step(64, 64, 1, torch.float32, 2000, 1)),
        (90, Step(64, 64, 7, torch.bfloat16, 40_000, 1.5, 8, options=count, queries=112)),
    ]
    rest = [
        *others,
        (90, Step(128, 128, 4, torch.bfloat16, 40_000, 2, options=count)),
        (89, Step(96, 80, 3, torch.bfloat16, 2000, 2, options=any_head)),
        (80, Step(128, 128, 4, torch.bfloat16, 40_000, 1.5, options=count, queries=5)),
        (80, Step(256, 256, 8, torch.float16, 2000, options=count | any_head)),
        (80, Step(256, 256, 8, torch.float16, 2000, 4, options=count)),
        (80, Step(256, 256, 8, torch.float16, 2000, 4, 8, options=count)),
        (89, Step(64, 64, 1, torch.float32, 2000, options=any_head)),
        (80, Step(256, 256, 2, torch.float32, 2000)),
        (80, Step(256, 256, 2, torch.float32, 2000, 1)),
        (80, Step(256, 256, 2, torch.float32, 2000, 1, 8)),
        (89, Step(96, 80, 3, torch.bfloat16, 0, 2, options=any_head)),
        (90, Step(64, 64, 64, torch.bfloat16, 2000, 2)),
        (90, Step(64, 64, 64, torch.bfloat16, 2000, 2, 8)),
        (90, Step(128, 128, 8, torch.float16, 40_000, 1.5, 4, options=count)),
        (80, Step(80, 80, 8, torch.bfloat16, 2000, 1.5, 8, options=any_head)),
        (80, Step(32, 32, 1, torch.float32, 2000, 2, 4)),
        (90, Step(128, 128, 4, torch.bfloat16, 40_000, 1.5, 8, options=count, queries=2)),
        (80, Step(96, 80, 3, torch.float16, 2000, 1.5, 8, options=count, queries=16)),
        (80, Step(256, 256, 1, torch.bfloat16, 600, options=count, queries=3)),
        (89, Step(576, 512, 16, torch.float16, 40_000, 1.5, options=count | any_head, shared=True)),
        (80, Step(576, 512, 16, torch.bfloat16, 40_000, 1.5, options=count, queries=3, shared=True)),
        (80, Step(576, 512, 16, torch.float32, 2000, 1.5, options=count, shared=True)),
        (80, Step(640, 512, 5, torch.bfloat16, 2000, 4, options=count, shared=True)),
        (89, Step(576, 512, 16, torch.float16, 40_000, 1.5, 4, options=count | any_head, shared=True)),
        (80, Step(576, 512, 16, torch.bfloat16, 40_000, 1.5, 8, options=count, queries=3, shared=True)),
        (80, Step(640, 512, 5, torch.float32, 2000, 2, 4, options=count, shared=True)),
        (89, Step(288, 256, 8, torch.bfloat16, 2000, options=any_head, shared=True)),
        (90, Step(576, 512, 16, torch.float32, 2000, shared=True)),
        *((capability, step) for capability in BLACKWELL for _, step in usual + others),
    ]
    for capability, step in usual if few else rest:
        for recorder in step.record_launches():
            check(recorder, capability, step)
    usual_near = [
        (90, Step(128, 128, 4, torch.bfloat16, 600)),
        (80, Step(576, 512, 16, torch.bfloat16, 600, shared=True)),
    ]
    rest_near = [(capability, step) for capability in BLACKWELL for _, step in usual_near]
    rest_near += [(80, Step(256, 64, 3, torch.float32, 600)), (89, Step(80, 80, 1, torch.float16, 600))]
    for capability, step in usual_near if few else rest_near:
        for recorder in step.record_near():
            check(recorder, capability, step)
    usual_storing = [(90, Step(128, 128, 1, torch.bfloat16, 2000, 1.5, 8))]
    rest_storing = [(capability, step) for capability in BLACKWELL for _, step in usual_storing]
    rest_storing += [(90, Step(128, 128, 1, torch.bfloat16, 2000, 1.5, 16))]
    rest_storing += [(80, Step(256, 64, 1, torch.float32, 2000, 4, rung)) for rung in (16, 8)]
    for capability, step in usual_storing if few else rest_storing:
        for recorder in step.record_storing():
            check(recorder, capability, step)
    check_prompts(few)
    check_latents(few)
    check_absorbing(few)


if __name__ == "__main__":
    main()
