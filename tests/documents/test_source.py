"""Rules of the house that its source is held to."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import qada_cache

HOUSE = Path(qada_cache.__file__).parent
MOST_PARAMETERS = 14
MOST_MODULES = 2  # that define a function of one name


def functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Every function of the package, with its file."""
    for path in sorted(HOUSE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                yield str(path.relative_to(HOUSE)), node


def test_no_function_takes_too_many_parameters() -> None:
    """But for the cache's options, and kernels that Triton compiles: what these are told are addresses and strides."""
    found = {}
    for file, node in functions():
        taken = len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs)
        compiled = any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)
        if taken > MOST_PARAMETERS and not compiled and (file, node.name) != ("cache.py", "__init__"):
            found[file, node.name] = taken
    assert not found


def test_no_function_name_is_in_more_than_two_modules() -> None:
    """Of modules' own functions; a method belongs to its class, and a function within another to that one."""
    files = defaultdict(set)
    for path in sorted(HOUSE.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef):
                files[node.name].add(str(path.relative_to(HOUSE)))
    assert not {name: found for name, found in files.items() if len(found) > MOST_MODULES}


def test_only_kernels_are_called_after_what_they_compute() -> None:
    files = sorted(file for file, node in functions() if node.name == "fused_decode")
    assert files == [f"kernels/{name}.py" for name in ("cpu/compiled_decode", "triton/__init__")]
