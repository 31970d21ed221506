"""Generation that keeps conversations between requests, for `generate(custom_generate=FOLDER)` and `serve`.

transformers takes another generation from a folder that holds `custom_generate/generate.py`; this one is such a folder.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from .conversations import CONVERSATIONS, MEMORY, SECONDS, counters
from .generating import generate

__all__ = ["CONVERSATIONS", "FOLDER", "MEMORY", "SECONDS", "counters", "generate", "make_folder"]

FOLDER = str(Path(__file__).parent)  # `generate(custom_generate=...)` takes a str, and passes over a Path silently
_CODE = "auto_map"  # by which a config names code, of its own folder or of any repository of the Hub


def make_folder(model: str | os.PathLike, out: str | os.PathLike) -> None:
    """Make the folder `out`: links to the files of the model's folder, none of its code, and our `generate.py`.

    `--trust-remote-code` trusts all the code that a folder holds or names. So Python files are left out, and configs
    that name code are copied without these names.

    Args:
        model: a folder that the model can be loaded from.
        out: a folder that is not there yet.

    Raises:
        FileNotFoundError: `model` is no folder with a config.
        FileExistsError: `out` is there.
        ValueError: a config of the model is no JSON.
    """
    source, target = Path(model).resolve(), Path(out)
    if not (source / "config.json").is_file():
        raise FileNotFoundError(f"no model's folder at {model}: of a model of the Hub, `hf download` makes one")
    code = "custom_generate"
    shutil.copytree(Path(FOLDER, code), target / code, ignore=shutil.ignore_patterns("__pycache__"))
    for file in sorted(source.iterdir()):
        kept = _without_code(file) if file.suffix == ".json" else None
        if kept is not None:
            (target / file.name).write_text(json.dumps(kept, indent=2), encoding="utf-8")
        elif file.is_file() and not file.name.startswith(".") and file.suffix not in (".py", ".pyc", ".so"):
            (target / file.name).symlink_to(file)


def _without_code(file: Path) -> Any:
    """A config without the names of code; None if it has none."""
    text = file.read_text(encoding="utf-8")
    if f'"{_CODE}"' not in text:
        return None
    try:
        return _dropped(json.loads(text))
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is no JSON: {error}") from error


def _dropped(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _dropped(item) for name, item in value.items() if name != _CODE}
    return [_dropped(item) for item in value] if isinstance(value, list) else value
