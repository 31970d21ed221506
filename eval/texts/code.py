"""Code that needs no download: modules of Python's own standard library, each after modules that it imports."""

import ast
import importlib.util
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from eval.texts.documents import CODE, Document, beginning

LIBRARY = Path(sysconfig.get_path("stdlib"))
# Of many kinds, and long enough to be continued in their middle. Their wording changes from version to version.
MODULES = (
    *("argparse", "http.client", "zipfile", "configparser", "subprocess", "logging.handlers", "tarfile", "shutil"),
    *("email.message", "unittest.case", "urllib.request", "inspect", "asyncio.base_events", "statistics", "smtplib"),
    *("concurrent.futures.process", "dataclasses", "xmlrpc.client", "difflib", "multiprocessing.pool", "socketserver"),
    *("tempfile", "imaplib", "pathlib", "traceback", "http.cookiejar", "optparse", "pickle", "ftplib", "mailbox"),
)


def source(module: str) -> Path | None:
    """The file of a module of the standard library; None if it is none, or not written in Python."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # of a parent that is no package
        return None
    path = Path(spec.origin or "") if spec else Path()
    inside = path.suffix == ".py" and path.is_relative_to(LIBRARY) and "site-packages" not in path.parts
    return path if inside else None


def imports(module: str, text: str) -> Iterator[str]:
    """Modules that the source `text` of `module` imports, by their full names; some are names within modules."""
    package = module if (path := source(module)) and path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: 1 - node.level or None] if node.level else []
            whole = ".".join([*parents, *([node.module] if node.module else [])])
            yield from (f"{whole}.{alias.name}" for alias in node.names)
            yield whole


def shown(path: Path) -> str:
    """A file under its name, as an editor would give it to a model."""
    return f"# {path.relative_to(LIBRARY).as_posix()}\n{path.read_text(encoding='utf-8')}\n\n"


def code(tokenizer: PreTrainedTokenizerBase, *, length: int, following: int) -> Iterator[Document]:
    """Beginnings of modules, `length` tokens with modules that they import before them, and the `following` tokens.

    What is imported directly stands nearest. A module is cut in its middle, or where it takes half of the tokens.
    """

    def encoded(path: Path) -> list[int]:
        return tokenizer(shown(path), add_special_tokens=False, verbose=False).input_ids

    begin = beginning(tokenizer)
    for index, module in enumerate(MODULES):
        if (path := source(module)) is None:
            continue
        ids = encoded(path)
        own = min(length // 2, len(ids) // 2)
        front: list[int] = []
        met, queue = {path}, [(module, path)]
        while queue and len(front) < length - own - len(begin):
            name, file = queue.pop(0)
            for other in imports(name, file.read_text(encoding="utf-8")):
                if (found := source(other)) and found not in met:
                    met.add(found)
                    queue.append((other, found))
                    front = encoded(found) + front
        room = length - own - len(begin)
        if own < following or len(front) < room:
            continue
        taken = torch.tensor([[*begin, *front[len(front) - room :], *ids[: own + following]]])
        yield Document(CODE, length, index, taken[:, :length], taken[:, length:])
