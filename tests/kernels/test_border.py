"""The arguments of every C++ kernel are checked: it would read or write other memory if they were wrong."""

from __future__ import annotations

import platform
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compilers import SETS, needs_compiler, needs_vectors
from decode_scene import Scene, step_of
from models import prompt as words
from models import tiny
from torch import Tensor

from qada_cache import QAdACache
from qada_cache.kernels import cpu
from qada_cache.kernels.border import OperandError, check_tensor, is_packed
from qada_cache.kernels.cpu import building, compiled_decode, processor, prompt, recording, selected_prompt
from qada_cache.sketch import Layout, count_segments
from qada_cache.sketch.codec import Sketch
from qada_cache.sketch.coded import RecordLayout
from qada_cache.versions import pass_cache

pytestmark = needs_compiler
TOKENS = 1300
HEADS, KV_HEADS, DIM = 4, 2, 32


def apart(tensor: Tensor) -> Tensor:
    """The same numbers, each but the last far from the next."""
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


def on_meta(tensor: Tensor) -> Tensor:
    return tensor.to("meta")


Change = Callable[[Tensor], Tensor]


def refuse(call: Callable[..., Any], given: dict[str, Any], wrong: dict[str, list[Change]]) -> None:
    """The call computes what it is given, and refuses each of these changes in words that name the tensor."""
    call(**given)
    for name, changes in wrong.items():
        for change in changes:
            with pytest.raises(OperandError, match="the kernel cannot read these tensors as those of one layer"):
                call(**given | {name: change(given[name])})


def test_partial_attention() -> None:
    given = {
        "query": torch.randn(1, 2, 2, 64),
        "key": torch.randn(1, 2, TOKENS, 64),
        "value": torch.randn(1, 2, TOKENS, 24),
    }
    wrong: dict[str, list[Change]] = {
        "query": [Tensor.half, Tensor.double, on_meta, lambda t: t[:, :1], lambda t: t[..., :32]],
        "key": [
            Tensor.half,
            on_meta,
            apart,
            lambda t: t[:, :, 1:],
            lambda t: t[..., :24],
            lambda t: t.mT.contiguous().mT,
        ],
        "value": [Tensor.half, Tensor.double, on_meta, apart, lambda t: t[:, :1], lambda t: t[:, :, ::2]],
    }
    refuse(lambda **told: cpu.compiled_partial_attention(**told, scaling=0.2), given, wrong)


def test_decode_step() -> None:
    """A CPU's kernel, whatever else the operands agree on; `test_binding.py` has the rest."""
    scene = Scene(padding=(0,))
    given = scene.arguments("cpu") | scene.decision_arguments()
    compiled_decode.fused_decode(*step_of(**given))
    sinks = torch.zeros(scene.kv_heads * scene.group)
    for change in (on_meta, Tensor.int, lambda t: t[:-1], lambda t: t.repeat(2)[::2]):
        with pytest.raises(OperandError, match="sink_logits"):
            compiled_decode.fused_decode(*step_of(**given | {"sink_logits": change(sinks)}))
    for change in (on_meta, Tensor.double):
        all_of_them = {n: change(t) if isinstance(t, Tensor) and t.is_floating_point() else t for n, t in given.items()}
        with pytest.raises(OperandError):
            compiled_decode.fused_decode(*step_of(**all_of_them))


def test_strides_that_are_any() -> None:
    """One head's codes are contiguous whatever the stride of heads is."""
    scene, found = Scene(bulk=[(1100, 5)], short=(), kv_heads=1, bits=2), []
    given = scene.step_arguments(token_threshold=1.0, criterion="dense")
    for head_stride in (given["sketch"].codes.stride(1), 1):
        codes = given["sketch"].codes
        given["sketch"].codes = codes.as_strided(codes.shape, (codes.stride(0), head_stride, *codes.stride()[2:]))
        found.append(compiled_decode.fused_decode(*step_of(**given))[0])
    assert torch.equal(*found)


def make_records() -> dict[str, Any]:
    made = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(2, 3, TOKENS, size, generator=made) for size in (64, 64))
    layout, energies = RecordLayout.from_bits(64, 64, 8), torch.rand(3, 64, generator=made)
    assert layout is not None
    sketch = Sketch.of(keys, values, energies, Layout.from_bits(64, 1.5))
    told = {"sketch": sketch, "weights": energies.sqrt(), "layout": layout, "first": 0}
    return {"keys": keys, "values": values, **told, "segments": count_segments(TOKENS)}


def without(sketch: Sketch, name: str, change: Change) -> Sketch:
    return Sketch(**{key: change(part) if key == name else part for key, part in sketch.to_tensors().items()})


def test_records() -> None:
    given = make_records()
    of_sketch = [
        lambda sketch, name=name, change=change: without(sketch, name, change)
        for name in recording.OF_SKETCH
        for change in (Tensor.double, on_meta, apart, lambda t: t[:1], lambda t: t[:, :2], lambda t: t[..., :-8])
    ]
    common: dict[str, list[Any]] = {
        "sketch": of_sketch,
        "weights": [Tensor.double, Tensor.half, on_meta, lambda t: t[..., :32].repeat(1, 3)],
        "first": [lambda first: first - 1, lambda first: first + 1],
        "segments": [lambda count: 0, lambda count: count + 1],
    }
    refuse(recording.code_records, given, common | {"values": [on_meta, lambda t: t[:, :, 1:], lambda t: t[..., :16]]})
    records = recording.code_records(**given)
    assert records is not None
    given = {name: part for name, part in given.items() if name not in ("keys", "values")} | {"records": records}
    refuse(recording.decode_records, given, common | {"records": [lambda t: t.to(torch.int8)]})


def tensors(tokens: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    made = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, tokens, DIM, generator=made).to(dtype) for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    return {"query": query, "key": key, "value": value, "out": torch.empty_like(query)}


OF_PROMPT: dict[str, list[Change]] = {
    "query": [Tensor.half, Tensor.double, on_meta, apart, lambda t: t[:, :3], lambda t: t[..., :8]],
    "key": [Tensor.half, Tensor.bfloat16, on_meta, apart, lambda t: t[..., :8], lambda t: t[:, :, :-1]],
    "value": [Tensor.half, Tensor.bfloat16, on_meta, apart, lambda t: t[:, :1], lambda t: t[:, :, :-1]],
    "out": [
        Tensor.half,
        Tensor.double,
        on_meta,
        apart,
        lambda t: t[:, :3],
        lambda t: t[:, :, 1:],
        lambda t: t[..., :8],
    ],
}


@needs_vectors
def test_prompts() -> None:
    given = tensors(80) | {"lse": torch.empty(1, HEADS, 80)}
    of_lse: list[Change] = [Tensor.half, Tensor.double, on_meta, apart, lambda t: t[:, :, 1:]]
    refuse(lambda **told: prompt.prompt_attention(**told, scaling=0.2, causal=True), given, OF_PROMPT | {"lse": of_lse})
    with pytest.raises(OperandError, match="of known tokens"):
        prompt.prompt_attention(
            **given | {"key": given["key"][:, :, 9:], "value": given["value"][:, :, 9:]}, scaling=1, causal=True
        )


@needs_vectors
def test_selected_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selected_prompt, "LEAST_FAR", 64)
    told = {"scaling": 0.2, "threshold": 4.0, "sinks": 16, "window": 112}
    refuse(lambda **given: selected_prompt.selected_attention(**given, **told), tensors(500), OF_PROMPT)


SETTINGS: dict[str, tuple[Callable[[Any], Any], Any, Any]] = {
    "deterministic": (torch.use_deterministic_algorithms, True, False),
    "denormal": (torch.set_flush_denormal, True, False),
    "threads": (torch.set_num_threads, 3, 1),
    "gradients": (torch.set_grad_enabled, True, False),
}


@needs_vectors
@pytest.mark.parametrize("setting", ["autocast", *SETTINGS])
@torch.no_grad()
def test_settings_of_the_process(setting: str) -> None:
    """A setting that a user may make for the whole process does not change the arguments of C++ kernels."""
    model, ids = tiny("llama", head_dim=32), words(1500)[0]

    def read() -> Tensor:
        cache = QAdACache(model, moments="current", bulk_bits=8, prefill_threshold=12.0)
        first = model(ids[:, :1400], **pass_cache(cache)).logits
        return torch.cat(
            [first, *(model(ids[:, a:b], **pass_cache(cache)).logits for a, b in ((1400, 1480), (1480, 1481)))], 1
        )

    plain = read()
    if setting == "autocast":
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert read().isfinite().all()
        return
    model.requires_grad_(False)
    change, other, back = SETTINGS[setting]
    change(other)
    try:
        found = read()
    finally:
        change(back)
    # More threads of torch add in another order, so that a key's code may be the one beside it.
    torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-4 if setting == "threads" else 1e-5)


def test_a_checked_tensor() -> None:
    """Dimensions of one number may have any stride; the error says what was found, and what is wanted."""
    tensor, there = torch.zeros(3, 1, 4), torch.device("cpu")
    assert is_packed(tensor[:, ::2], 3)
    assert is_packed(tensor[..., :2], 1)
    assert not is_packed(tensor[..., :2], 3)
    assert not is_packed(tensor[..., ::2], 1)
    check_tensor("it", tensor, (torch.half, torch.float32), (3, 1, 4), there)
    wanted = "it is float32 [3, 1, 4] on cpu, not torch.int64 or torch.bool [3, 1, 4] on cpu, contiguous"
    with pytest.raises(OperandError, match=re.escape(wanted)):
        check_tensor("it", tensor, (torch.int64, torch.bool), (3, 1, 4), there)


@pytest.mark.parametrize("kind", [processor.X86, processor.ARM], ids=["x86", "arm"])
@pytest.mark.parametrize("build", [prompt.build, selected_prompt.build_selecting])
def test_a_processor_that_lacks_any_instruction(
    build: Callable, kind: processor.Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A virtual machine may mask each by itself."""
    built: list[tuple] = []
    monkeypatch.setattr(prompt, "_build_once", lambda *told: built.append(told) or object())
    newest = kind.needed | set(kind.better)
    for missing in newest:
        monkeypatch.setattr(prompt, "read_instructions", lambda missing=missing: newest - {missing})
        assert (build(64, 64, torch.bfloat16) is None) == (missing in kind.needed) == (not built)
        told = {flag for *_, macros in built for flag in macros} & set(kind.better.values())
        assert told == ({kind.better[missing]} if missing in kind.better else set())
        built.clear()


@pytest.mark.parametrize("selects", [False, True])
@pytest.mark.parametrize(
    "sets", [name if name == "least" else pytest.param(name, marks=pytest.mark.slow) for name in SETS]
)
def test_instructions_that_are_known_are_all_that_a_source_asks_for(
    sets: str, selects: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler that is told of no others compiles it; without those that are needed it says so."""
    if platform.machine() != "x86_64":
        pytest.skip("the source is for x86-64")
    monkeypatch.setattr(prompt, "read_instructions", lambda: SETS[sets])
    module, define = (selected_prompt, selected_prompt.define_selecting) if selects else (prompt, prompt.define)
    flags = [flag for flag in building.FLAGS if not flag.startswith("-march") and flag not in ("-shared", "-O3")]
    command = [building.find_compiler(), *flags, "-march=x86-64", "-S", "-o", "/dev/null", str(module.SOURCE)]
    names = [name.replace("_", "-" if name.startswith("amx") else "") for name in SETS[sets]]
    asked = [f"-m{name}" for name in names] + [*define(64, 64, torch.bfloat16)]
    subprocess.run([*command, *asked], check=True)
    done = subprocess.run([*command, *asked, "-mno-avx2"], capture_output=True, check=False)
    assert done.returncode
    assert b"the processor has neither AVX2 with FMA nor AVX-512 nor NEON" in done.stderr


def test_older_compilers_know_the_type_of_float16(tmp_path: Path) -> None:
    """On x86-64, they have no `_Float16` in C++."""
    if platform.machine() != "x86_64":
        pytest.skip("the type is for x86-64")
    texts = "".join(path.read_text() for path in cpu.SOURCE.parent.glob("*.h"))
    header = tmp_path / "older.h"
    header.write_text("\n".join([*re.findall("#include <(?!arm).*>", texts), "#pragma GCC poison _Float16"]))
    flags = [flag for flag in building.FLAGS if not flag.startswith("-march")]
    command = [building.find_compiler(), *flags, "-march=haswell", "-fsyntax-only", "-include", str(header)]
    subprocess.run([*command, *cpu.define("FLOAT16", 64, 64, 2), str(cpu.SOURCE)], check=True)


def test_constants_of_selected_prompts_have_one_definition() -> None:
    source, macros = selected_prompt.SOURCE.read_text(), selected_prompt.define_selecting(80, 48, torch.float32)
    given = dict(macro.removeprefix("-D").split("=") for macro in macros if "=" in macro)
    assert given | {"SEGMENT": "64", "ROTATED": "16"} == given
    assert not re.search(r"constexpr \w+ (SEGMENT|ROTATED)\b", source)
