"""The page's HTML, its style and script within, and its data."""

import json
from importlib.resources import files
from typing import Any


def fill_page(data: dict[str, Any]) -> str:
    """One page that needs no other file. No text of the data can end or open an element: `<`, `>` and `&` are written
    as JSON's escapes."""
    escapes = {ord(letter): f"\\u{ord(letter):04x}" for letter in "<>&"}
    data_text = json.dumps(data, separators=(",", ":"), allow_nan=False).translate(escapes)
    folder = files(__package__)
    page, css, js = (folder.joinpath(f"page.{ending}").read_text(encoding="utf-8") for ending in ("html", "css", "js"))
    for name, part in {"css": css, "js": js, "data": data_text}.items():  # the data last: it may hold the others' marks
        page = page.replace(f"/* {name} */", part, 1)
    return page
