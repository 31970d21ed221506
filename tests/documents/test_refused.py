"""docs/refused.md against the code: each line's error and words are those of one refusal."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import qada_cache
from qada_cache.attention import checking

PACKAGE = Path(qada_cache.__file__).parent
TEXT = (PACKAGE.parent / "docs/refused.md").read_text(encoding="utf-8")
# They meet a model and its calls: all that they raise is a refusal. The others raise that for arguments and files.
REFUSING = (
    "asker",
    "block_mask",
    "call",
    "checking",
    "forward",
    "cache",
    "generation",
    "layer",
    "no_tensors",
    "observing",
    "padding",
    "private_map",
    "support",
    "watched",
)
ROW = re.compile(r"^\| [^|]+ \| `([\w.]+)`: `([^`]+)` \| [^|]+ \|$", re.MULTILINE)


def template(message: ast.expr) -> str:
    """The text of a message, `...` for what it fills in."""
    parts = message.values if isinstance(message, ast.JoinedStr) else [message]
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in parts)


def refusals() -> Iterator[tuple[str, str]]:
    """Error and message of each place that refuses."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                error = ast.unparse(node.exc.func)
                if path.stem in REFUSING or error == "NotImplementedError":
                    yield error, template(node.exc.args[0])
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.compiler.disable":
                yield "torch.compile", template(node.keywords[0].value)


def test_every_line_is_true() -> None:
    rows, found = ROW.findall(TEXT), list(refusals())
    assert len(rows) == len(re.findall(r"^\| (?!what \|)", TEXT, re.MULTILINE)) > 40  # no line is written otherwise
    assert [row for row in rows if sum(row[0] == error and row[1] in message for error, message in found) != 1] == []


def test_every_argument_that_is_refused_is_named() -> None:
    assert [argument for argument in checking._UNSUPPORTED if f"`{argument}`" not in TEXT] == []
