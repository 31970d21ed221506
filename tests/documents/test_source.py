"""Rules of the house that its source is held to."""

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from documents import ROOT
from torch.utils._device import _device_constructors

import qada_cache

HOUSE = Path(qada_cache.__file__).parent
MOST_PARAMETERS = 14
MOST_MODULES = 2  # that define a function of one name


@functools.cache
def list_modules(folder: Path = HOUSE) -> list[tuple[str, ast.Module]]:
    """Every Python file in `folder`, by its path there, and its syntax tree."""
    paths = sorted(folder.rglob("*.py"))
    return [(path.relative_to(folder).as_posix(), ast.parse(path.read_text(encoding="utf-8"))) for path in paths]


def functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Every function of the package, with its file."""
    for file, module in list_modules():
        for node in ast.walk(module):
            if isinstance(node, ast.FunctionDef):
                yield file, node


def test_no_function_takes_too_many_parameters() -> None:
    """The cache's options are exempt, and kernels that Triton compiles, whose arguments are addresses and strides."""
    found = {}
    for file, node in functions():
        taken = len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs)
        compiled = any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)
        if taken > MOST_PARAMETERS and not compiled and (file, node.name) != ("cache.py", "__init__"):
            found[file, node.name] = taken
    assert not found


def test_no_function_name_is_in_more_than_two_modules() -> None:
    """Only functions of modules count; a method belongs to its class, and an inner function to the outer one."""
    files = defaultdict(set)
    for file, module in list_modules():
        for node in module.body:
            if isinstance(node, ast.FunctionDef):
                files[node.name].add(file)
    assert not {name: found for name, found in files.items() if len(found) > MOST_MODULES}


def test_only_kernels_are_called_after_what_they_compute() -> None:
    files = sorted(file for file, node in functions() if node.name == "fused_decode")
    assert files == [f"kernels/{name}.py" for name in ("cpu/compiled_decode", "triton/__init__")]


def test_every_tensor_that_is_made_names_its_device() -> None:
    """A tensor without a device lies on torch's default one, which users may set, as do tensors of tokenizers."""
    makers = {f"torch.{made.__name__}" for made in _device_constructors()} | {"torch.Generator"}
    found = []
    for file, module in list_modules():
        nodes = list(ast.walk(module))
        calls = {node.func: node for node in nodes if isinstance(node, ast.Call)}
        named = {node.func for node in calls.values() if any(given.arg == "device" for given in node.keywords)}
        named |= {func for func, node in calls.items() if ast.unparse(func) == "torch.Generator" and node.args}
        wrong = [node for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node) in makers]
        wrong = [node for node in wrong if node not in named]
        wrong += [func for func, node in calls.items() if any(given.arg == "return_tensors" for given in node.keywords)]
        found += [f"{file}: {ast.unparse(node)}" for node in wrong]
    assert found == ["files/tensor_file.py: torch.empty"]  # a default of an argument, called with a device


def calls() -> Iterator[tuple[str, ast.Call]]:
    """Every call in the package, with its file."""
    for file, module in list_modules():
        for node in ast.walk(module):
            if isinstance(node, ast.Call):
                yield file, node


def is_number(node: ast.expr) -> bool:
    """Whether it is written as one."""
    node = node.operand if isinstance(node, ast.UnaryOp) else node
    return isinstance(node, ast.Constant) or ast.unparse(node).split(".")[-1] in ("inf", "nan", "pi")


def test_every_tensor_that_is_made_names_its_dtype() -> None:
    """Else it has torch's default dtype, which users may set to half precision, or one that its numbers happen to have:
    of two numbers, and of a call that makes tensors. `torch.as_tensor` keeps that of ids which a user gives."""
    makers = {f"torch.{made.__name__}" for made in _device_constructors()}
    found = []
    for file, call in calls():
        named = any(given.arg == "dtype" for given in call.keywords)
        chosen = ast.unparse(call.func) == "torch.where" and all(map(is_number, call.args[1:3]))
        if chosen or (ast.unparse(call.func) in makers and not named):
            found.append(f"{file}: {ast.unparse(call.func)}")
    assert found == ["prefix_store/checking.py: torch.as_tensor"]


def test_addresses_are_taken_where_tensors_are_checked() -> None:
    """For C++: a decode step's, which come each time, are checked by `operands.check`."""
    taken = {file for file, call in calls() if isinstance(call.func, ast.Attribute) and call.func.attr == "data_ptr"}
    ours = {file for file in taken if file.startswith("kernels/cpu/")}
    assert ours == {"kernels/cpu/addresses.py", "kernels/cpu/compiled_decode.py"}


def test_sentences_of_docstrings_begin_with_their_subject() -> None:
    """CONTRIBUTING's first rule: what is returned comes first, then of what."""
    late = re.compile(r"(?:^|[.:!?]\s+)(?:Of|By|What|Where|Likewise)\b.{,60}", re.DOTALL)
    found = []
    for file, module in [*list_modules(), *list_modules(Path(__file__).parents[1])]:
        for node in ast.walk(module):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                found += [f"{file}: {sentence}" for sentence in late.findall(ast.get_docstring(node) or "")]
    assert not found


def test_the_sdist_has_what_its_make_reads() -> None:
    builder = pytest.importorskip("hatchling.builders.sdist", reason="builds the archive").SdistBuilder(str(ROOT))
    packed = {file.relative_path for file in builder.recurse_included_files()}
    assert {"Makefile", "eval/tables.mk", "constraints.txt", "mkdocs.yml", ".clang-format"} <= packed
