"""The page in a browser: what it shows is what its data say. Optional: skipped where no Chromium is installed."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from pages import HOSTILE, make_page, read_data, unpack
from small_sketch import small_sketch

from qada_cache import report

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="OPTIONAL: no Chromium is installed to show the page in")

# Before the page's own scripts, and after them.
WATCH = "<script>const wrong = []; addEventListener('error', (event) => wrong.push(event.message));</script>"
REPORT = """<pre id="found"></pre><script>
const text = (id) => find(id).textContent;
const give = (id, value, event) => { find(id).value = value; find(id).dispatchEvent(new Event(event)); };
const marked = () => spans.flatMap((span, index) => (/^r[1-5]$/.test(span.className) ? [index] : []));
const shown = () => ({ told: text("told"), which: text("which"), marked: marked(), passages: text("passages") });
const found = { text: text("text"), title: document.title, question: text("question"), figures: text("figures"),
  verdict: text("verdict"), answers: [...document.querySelectorAll(".answer p")].map((part) => part.textContent),
  how: text("how"), tokens: [], heads: {}, hovered: {} };
for (let token = 1; token <= Number(find("token").max); token++) {
  give("token", token, "input");
  found.tokens.push(shown());
}
find("before").click(); find("before").click(); find("after").click();
found.buttons = text("which");
for (const option of find("head").options) {
  give("head", option.value, "change");
  found.heads[option.value] = shown();
}
give("head", ".", "change");
for (const index of HOVERED) {
  spans[index].dispatchEvent(new Event("pointerover", { bubbles: true }));
  found.hovered[index] = text("hovered");
}
find("all").click();
found.all = shown();
const map = find("map"), paint = map.getContext("2d"), row = Math.floor(map.height / (NAMES.length + 1));
found.colours = new Set(new Uint32Array(paint.getImageData(0, 0, map.width, map.height).data.buffer)).size;
const box = map.getBoundingClientRect();
map.dispatchEvent(new MouseEvent("click", { clientX: box.left + box.width / 2, clientY: box.top + 1 }));
found.clicked = [find("head").value, document.querySelectorAll("#text .found").length];
found.wide = document.documentElement.scrollWidth > innerWidth;
found.loaded = performance.getEntriesByType("resource").length;
found.wrong = wrong;
find("found").textContent = JSON.stringify(found);
</script>"""


HOVERED = [0, 40, 109]  # the last is an emoji of several tokens


def show(page: str, folder: Path, *, width: int = 1000) -> dict[str, Any]:
    """Show a page in a browser; return what the script above finds there."""
    script = REPORT.replace("HOVERED", str(HOVERED))
    (folder / "page.html").write_text(
        page.replace("<body>", f"<body>{WATCH}").replace("</body>", f"{script}</body>"), "utf-8"
    )
    command = [str(CHROMIUM), "--headless", "--disable-gpu", "--disable-dev-shm-usage", "--virtual-time-budget=5000"]
    command += ["--no-sandbox"] * (getattr(os, "getuid", lambda: 1)() == 0)  # which root cannot have
    command += [f"--user-data-dir={folder / 'profile'}", f"--window-size={width},900", "--dump-dom"]
    run = subprocess.run([*command, (folder / "page.html").as_uri()], capture_output=True, text=True, timeout=120)
    found = re.search(r'<pre id="found">(.*?)</pre>', run.stdout, re.DOTALL)
    assert found is not None, run.stderr[-2000:]
    assert found[1], re.findall("wrong.*", run.stdout)[:3]
    return json.loads(html.unescape(found[1]))


def selected(data: dict[str, Any], passes: list[int], only: tuple[int, int] | None = None) -> set[int]:
    """Words that heads selected, by the data; a word's first token stands for all of its characters' tokens."""
    words, first, heads = data["document"]["words"], data["document"]["first"], data["heads"]
    found = set()
    for index in passes:
        for place, positions in enumerate(unpack(data["passes"][index]["packed"], heads * len(data["layers"]))):
            if only in (None, divmod(place, heads)):
                found |= {position - first for position in positions or () if 0 <= position - first < len(words)}
    owners = {}
    for index, word in enumerate(words):
        owners[index] = index if word or not index else owners[index - 1]
    return {owners[index] for index in found}


@pytest.fixture(scope="module")
def page() -> str:
    with small_sketch(32):
        return make_page(HOSTILE * 4, HOSTILE[:20])


@pytest.mark.parametrize("width", [1000, 360])
def test_what_is_shown_is_what_the_data_say(page: str, tmp_path: Path, width: int) -> None:
    data, found = read_data(page), show(page, tmp_path, width=width)
    assert found["wrong"] == []
    assert found["loaded"] == 0
    assert not found["wide"]
    assert found["text"] == HOSTILE * 4
    assert found["title"] == f"qada report: {HOSTILE[:20]}"
    assert found["question"] == HOSTILE[:20]
    pieces = ["".join(each["pieces"]) or "(nothing)" for each in data["answers"]]
    assert found["answers"] == pieces
    for row in data["rows"]:
        assert row["what"] in found["figures"]
        assert all(cell["text"] in found["figures"] for cell in row["cells"])
    assert data["machine"] in found["how"]
    count = len(data["passes"])
    assert len(found["tokens"]) == count == 6
    for index, token in enumerate(found["tokens"]):
        assert token["which"].startswith(f"{index + 1} of 6")
        assert set(token["marked"]) == (expected := selected(data, [index]))
        assert f" selected {len(expected)} different tokens" in token["told"]
        assert f"{data['passes'][index]['needing']} of 4 heads" in token["told"]
        times = [int(number) for number in re.findall(r"token \d+, (\d+) heads?: ", token["passages"])]
        assert len(times) == 5
        assert 1 <= min(times) <= max(times) <= 4
    assert found["buttons"].startswith("5 of 6")
    for layer in data["layers"]:
        for head in range(data["heads"]):
            assert set(found["heads"][f"{layer}.{head}"]["marked"]) == selected(data, [4], (layer, head))
    assert len(selected(data, [4], (0, 0))) > 5
    assert set(found["all"]["marked"]) == selected(data, list(range(count)))
    assert found["colours"] > 3
    assert found["clicked"] == ["0.0", 1]
    assert data["document"]["words"][HOVERED[-1]] == "\U0001f469"
    for index, text in found["hovered"].items():
        readers = [f"{layer}.{head}" for layer in data["layers"] for head in range(data["heads"])
                   if int(index) in selected(data, [4], (layer, head))]  # fmt: skip
        assert (", ".join(readers) if readers else "read by no head shown") in text


def test_whole_reads_and_exact_passes_are_said(tmp_path: Path) -> None:
    found = show(make_page("words and words " * 20, "why " * 20, new_tokens=3, threshold=1.0), tmp_path)
    assert found["wrong"] == []
    exact, whole, _ = found["tokens"]
    assert exact["told"] == "Read exactly: every head read every word, as in a prompt."
    assert len(exact["marked"]) == 320
    assert "4 of 4 heads needed the long context. They selected 0 different" in whole["told"]
    assert "4 times all of it was read." in whole["told"]
    assert len(found["heads"]["1.0"]["marked"]) > 200
    assert found["colours"] > 3


def test_what_is_left_out_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(report, "MOST_BYTES", 24)
    with small_sketch(4096):
        found = show(make_page("words and words " * 200, tokens=300), tmp_path)
    assert found["wrong"] == []
    assert re.search(r"Reads of the first 3 of 6 tokens are here", found["how"])
    assert len(found["tokens"]) == 3
