"""Pages that `qada report` makes of a tiny model, and readers of their elements and data."""

from __future__ import annotations

import base64
import json
from html.parser import HTMLParser
from typing import Any

from byte_tokenizer import tokenizer
from models import tiny

from qada_cache import report
from qada_cache.report.asking import Request

OPTIONS: dict[str, Any] = {"moments": "current", "bulk_bits": 16, "kernels": "torch", "token_threshold": 1.0}
OPTIONS |= {"sink_tokens": 4, "local_tokens": 44}  # a question fits into the window
HOSTILE = (
    "</script><script>document.title = 'taken'</script> <!-- \"quoted\" 'twice' &amp; \\ \u2028 /* page.js */\r\n\t"
    "family: \U0001f469\u200d\U0001f469\u200d\U0001f467, Hebrew: \u05e9\u05dc\u05d5\u05dd, "
    "Arabic: \u0645\u0631\u062d\u0628\u0627. "
)
VOID = ("meta", "input")


class Page(HTMLParser):
    """A parsed page: `found` has tags with their attributes, `data` the text of the script with the id "data". Asserts
    that elements are closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.data = ""
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.found and self.found[-1][1].get("id") == "data" and self.open[-1:] == ["script"]:
            self.data += data


def model(**changes: Any) -> Any:
    return tiny(vocab_size=260, max_position_embeddings=2048, **changes)


def make_page(document: str, question: str = "Who?", *, tokens: int = 1500, new_tokens: int = 6, **options: Any) -> str:
    """The HTML that `report.report` makes of a question about a document. `options` are those of the cache."""
    made = request(document, question, tokens=tokens, new_tokens=new_tokens)
    return report.report(model(), tokenizer(), made, name="tiny", **{**OPTIONS, **options})


def request(document: str, question: str = "Who?", *, tokens: int = 1500, new_tokens: int = 6) -> Request:
    return Request(document, "file <b>", question, tokens, new_tokens)


def read_data(page: str) -> dict[str, Any]:
    return json.loads(Page(page).data)


def unpack(record: str, heads: int) -> list[list[int] | None]:
    """Decode a record as the page's script does: for each head the positions that it read, None for the whole bulk."""
    stream, found = iter(base64.b64decode(record)), list[list[int] | None]()

    def number() -> int:
        value, shift = 0, 0
        while (byte := next(stream)) > 127:
            value, shift = value | (byte & 127) << shift, shift + 7
        return value | byte << shift

    for _ in range(heads):
        kind, position, positions = number(), 0, []
        for _ in range(kind - 2):
            positions.append(position := position + number())
        found.append(None if kind == 1 else positions)
    assert next(stream, None) is None
    return found
