"""The documents at the root and in docs, and what stands in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import qada_cache

ROOT = Path(qada_cache.__file__).parent.parent
AT_ROOT = ("README", "CHANGELOG", "CONTRIBUTING", "SECURITY")
DOCUMENTS = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in [*(ROOT / f"{name}.md" for name in AT_ROOT), *sorted(ROOT.glob("docs/*.md"))]
}
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`((?:[^`\n]|\n(?!\s*\n))+)`")


def prose(text: str) -> str:
    """A document without its blocks of code."""
    return FENCED.sub("", text)


def spans(text: str) -> Iterator[str]:
    """The texts in backticks, each on one line."""
    return (" ".join(span.split()) for span in SPAN.findall(prose(text)))
