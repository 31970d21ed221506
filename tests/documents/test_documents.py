"""The documents against the code: links and names lead somewhere, and defaults are true."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
from pathlib import Path

import pytest
from documents import DOCUMENTS, FENCED, ROOT, prose, spans

import qada_cache
from qada_cache import QAdACache
from qada_cache.key_moments.defaults import CURRENT
from qada_cache.names import PROMPTS

LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
ENDINGS = r"py|md|csv|png|txt|cpp|h|yaml|pth|toml|safetensors|json"
PLACEHOLDERS = ("...", "…", "FOLDER", "FILE")


def slug(heading: str) -> str:
    """A heading's anchor, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower().replace("`", "")).replace(" ", "-")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links(document: str) -> None:
    """Files and headings are there; so is a function or class that a link to a module is named after."""
    for _, text, target in LINK.findall(prose(DOCUMENTS[document])):
        if re.match(r"https?:", target):
            continue
        where, _, anchor = target.partition("#")
        path = ((ROOT / document).parent / where).resolve() if where else ROOT / document
        assert path.exists(), f"[{text}]({target})"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in map(slug, headings), f"[{text}]({target})"
        if path.suffix == ".py" and (name := re.fullmatch(r"`([\w.]+)`", text)):
            assert name[1] in definitions(path), f"[{text}]({target})"


def definitions(path: Path) -> set[str]:
    """Functions, classes and methods, and what a package hands on by `__all__`."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
            found |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    return found


def test_the_tour_links_what_it_walks_through() -> None:
    links = [text for _, text, target in LINK.findall(DOCUMENTS["docs/tour.md"]) if ".py" in target]
    assert sum(re.fullmatch(r"`[\w.]+`", text) is not None for text in links) > 30


def test_named_files_exist() -> None:
    """`path/in/repo`, and tables and pictures by their name alone, which are those of `eval/results`."""
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard"],
                            capture_output=True, text=True, check=False).stdout.split()  # fmt: skip
    names = {Path(path).name for path in listed} or {path.name for path in ROOT.rglob("*") if path.is_file()}
    results, named = {path.name for path in (ROOT / "eval/results").iterdir()}, 0
    for document, text in DOCUMENTS.items():
        for span in spans(text):
            if any(word in span for word in PLACEHOLDERS) or " " in span:
                continue
            if re.fullmatch(rf"[\w.-]+/[\w./-]*(\.({ENDINGS})|/)", span):
                place = ROOT if (ROOT / span.split("/")[0]).exists() else ROOT / "qada_cache"
                assert (place / span).exists(), f"{document}: `{span}`"
                named += 1
            elif re.fullmatch(r"[\w.-]+\.(csv|png)", span):
                assert span in results, f"{document}: `{span}`"
                named += 1
            elif re.fullmatch(rf"[\w-]+\.({ENDINGS})", span):
                assert span in names, f"{document}: `{span}`"
                named += 1
    assert named > 40


def test_keywords_and_their_defaults() -> None:
    """docs/options.md has a row for every keyword of QAdACache, in its order, with its default."""
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| `([^`]+)` \|", DOCUMENTS["docs/options.md"], re.MULTILINE)
    documented = [(name.strip("`"), ast.literal_eval(default)) for name, default in rows]
    keywords = [
        (name, parameter.default)
        for name, parameter in inspect.signature(QAdACache).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    ]
    assert documented == keywords
    assert all(type(a[1]) is type(b[1]) for a, b in zip(documented, keywords, strict=True))  # 0 is not False


def test_one_version() -> None:
    """The package, the changelog's latest entry and the citation say the same."""
    (cited,) = re.findall(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    latest = re.findall(r"^## \[(.+)\]", DOCUMENTS["CHANGELOG.md"], re.MULTILINE)[0]
    assert cited == latest == qada_cache.__version__


def test_environment_variables() -> None:
    """docs/options.md has all that the package reads, and no document has another."""
    texts = [path.read_text(encoding="utf-8") for path in Path(qada_cache.__file__).parent.rglob("*.py")]
    read = {name for text in texts for name in re.findall(r"\bQADA_[A-Z_]+", text)}
    assert {"QADA_HOME", "QADA_KERNELS"} <= read
    assert read == set(re.findall(r"QADA_\w+", DOCUMENTS["docs/options.md"]))
    assert set(re.findall(r"QADA_\w+", "".join(DOCUMENTS.values()))) <= read


def test_names_of_prompts() -> None:
    """The row of `moments` has every prompt by name."""
    (row,) = re.findall(r"^\| `moments` .*$", DOCUMENTS["docs/options.md"], re.MULTILINE)
    assert [prompt for prompt in (CURRENT, *PROMPTS) if f'"{prompt}"' not in row] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_python_blocks_are_python(document: str) -> None:
    """They parse, what they import is there, and what they give QAdACache are its keywords."""
    allowed = set(inspect.signature(QAdACache).parameters)
    blocks = [block for language, block in FENCED.findall(DOCUMENTS[document]) if language == "python"]
    inline = [span for span in spans(DOCUMENTS[document]) if re.fullmatch(r"QAdACache\(.*=.*\)", span)]
    for block in [*blocks, *(span.replace("...", "None") for span in inline)]:
        tree = ast.parse(block)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("qada_cache"):
                assert all(hasattr(importlib.import_module(str(node.module)), alias.name) for alias in node.names)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "QAdACache":
                assert {keyword.arg for keyword in node.keywords} <= allowed
