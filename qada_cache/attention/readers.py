"""Whether a model's code reads the name of its attention for more than to look the function up.

Some models do one thing under "sdpa" and another under any other name. The name of ours (`forward.py`) is another one,
and it stands in the config whatever cache is used. So such a model has to keep its own.
"""

import ast
import functools
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

NAME = "_attn_implementation"
# Functions that read the name without effect here: `__init__` ran before it was replaced, and the other (Gemma 4's) is
# of models whose layers share keys, which are refused for that.
_HARMLESS = ("__init__", "_maybe_slice_kv_shared_inputs")
_REGISTRIES = ("ALL_ATTENTION_FUNCTIONS", "ALL_MASK_ATTENTION_FUNCTIONS")
_OPERATORS = {
    ast.Eq: lambda name, other: name == other,
    ast.NotEq: lambda name, other: name != other,
    ast.In: lambda name, other: name in other,
    ast.NotIn: lambda name, other: name not in other,
}


@dataclass(frozen=True)
class Reading:
    """A place that reads the name: `name operator other` if it is a comparison, else no operator."""

    line: int
    operator: type[ast.cmpop] | None = None
    other: Any = None

    def differs(self, name: str, instead: str) -> bool:
        """Whether the code may go another way under the name `instead` than under `name`."""
        if self.operator is None:
            return True
        compare = _OPERATORS[self.operator]
        return compare(name, self.other) != compare(instead, self.other)


def find_reader(model: PreTrainedModel | None, config: PreTrainedConfig, name: str, instead: str) -> str | None:
    """Where the model's code may go another way under the name `instead` than under `name`; None: nowhere.

    `config` is the model's text config. Without the model, its code is the whole modeling file that belongs to this
    kind of config. Code whose source is not there is taken not to read the name.
    """
    for module, scope in _scopes(model, config):
        for reading in _readings(module).get(scope, ()):
            if reading.differs(name, instead):
                return f"{scope}, line {reading.line} of {module}"
    return None


def _scopes(model: PreTrainedModel | None, config: PreTrainedConfig) -> Iterator[tuple[str, str]]:
    """Module and name of every class and function that may be asked for attention under this config."""
    if model is None:
        module = type(config).__module__.replace("configuration_", "modeling_")
        yield from ((module, scope) for scope in _readings(module))
        return
    # Parts with a config of their own (of images, of sound) keep their name.
    configs = (type(config), type(model.config))
    parts = {type(part) for part in model.modules() if type(getattr(part, "config", config)) in configs}
    foreign = {*PreTrainedModel.__mro__, *nn.Module.__mro__}
    kinds = {kind for part in parts for kind in part.__mro__ if kind not in foreign}
    yield from sorted({(kind.__module__, kind.__name__) for kind in kinds})


@functools.cache
def _readings(module: str) -> dict[str, list[Reading]]:
    """Where a module's classes and functions read the name, other than to look a function up or to build the model."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (KeyError, OSError, TypeError):
        return {}
    found: dict[str, list[Reading]] = {}
    for scope in tree.body:
        if isinstance(scope, (ast.ClassDef, ast.FunctionDef)) and (readings := list(_read_by(scope))):
            found[scope.name] = readings
    return found


def _read_by(scope: ast.AST) -> Iterator[Reading]:
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.FunctionDef) and node.name in _HARMLESS:
            continue
        if any(isinstance(child, ast.Attribute) and child.attr == NAME for child in ast.iter_child_nodes(node)):
            reading = _reading(node)
            if reading is not None:
                yield reading
        yield from _read_by(node)


def _reading(node: ast.AST) -> Reading | None:
    """How this expression or statement reads the name; None if only to look a function up, or for a message."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        other = node.comparators[0]
        if _is_registry(other):
            return None
        try:
            return Reading(node.lineno, type(node.ops[0]), ast.literal_eval(other))
        except ValueError:
            return Reading(node.lineno)
    if isinstance(node, ast.Call):
        return None if any(map(_is_registry, (node.func, *node.args))) else Reading(node.lineno)
    if isinstance(node, ast.Subscript) and _is_registry(node.value):
        return None
    if isinstance(node, ast.FormattedValue) or (isinstance(node, ast.Assign) and _sets_name(node)):
        return None
    return Reading(getattr(node, "lineno", 0))


def _sets_name(node: ast.Assign) -> bool:
    """Whether the name is only handed on, or replaced."""
    return all(isinstance(target, ast.Attribute) and target.attr == NAME for target in node.targets)


def _is_registry(node: ast.expr) -> bool:
    """Whether this is, or is a part of, one of transformers' tables of functions, where ours are registered."""
    return any(isinstance(part, ast.Name) and part.id in _REGISTRIES for part in ast.walk(node))
