"""Generation that keeps conversations between requests, for `generate(custom_generate=FOLDER)` and `serve`.

transformers takes another generation from a folder that holds `custom_generate/generate.py`; this one is such a folder.
"""

from pathlib import Path

from .conversations import CONVERSATIONS, MEMORY, SECONDS, counters
from .folder import make_folder
from .generating import generate

__all__ = ["CONVERSATIONS", "FOLDER", "MEMORY", "SECONDS", "counters", "generate", "make_folder"]

FOLDER = str(Path(__file__).parent)  # `generate(custom_generate=...)` takes a str, and passes over a Path silently
