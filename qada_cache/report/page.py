"""The page's HTML, its style and script within, and its data."""

import json
from importlib.resources import files
from typing import Any

_FILES = ("page.html", "page.css", "reads.js", "page.js")


def fill_page(data: dict[str, Any]) -> str:
    """One page that needs no other file. No text of the data can end or open an element: `<`, `>` and `&` are written
    as JSON's escapes."""
    escapes = {ord(letter): f"\\u{ord(letter):04x}" for letter in "<>&"}
    data_text = json.dumps(data, separators=(",", ":"), allow_nan=False).translate(escapes)
    parts = {name: files(__package__).joinpath(name).read_text(encoding="utf-8") for name in _FILES}
    page = parts["page.html"]
    for name, part in {**parts, "data": data_text}.items():  # the data last: they may hold the others' marks
        page = page.replace(f"/* {name} */", part, 1)
    return page
