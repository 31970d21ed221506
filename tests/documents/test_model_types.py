"""The documents' statements on model types agree with the table that `python -m eval.families` made."""

from __future__ import annotations

import re

import pytest
from documents import DOCUMENTS, ROOT

from eval.shared.tables import read

ROWS = read(ROOT / "eval/results/families.csv")
BY_VERDICT = {
    verdict: [row for row in ROWS if row["verdict"] == verdict] for verdict in {row["verdict"] for row in ROWS}
}
BULLET = re.compile(r"^- ((?:.|\n(?!- |\n))*): ((?:[\w-]+,\s+)*[\w-]+)$", re.MULTILINE)


def bullets(document: str, heading: str) -> dict[str, set[str]]:
    """The list behind a heading: by the text before each line's colon, the names after it."""
    text = DOCUMENTS[document].split(heading, 1)[1].split("\n## ", 1)[0]
    return {" ".join(said.split()): set(re.findall(r"[\w-]+", names)) for said, names in BULLET.findall(text)}


def types(verdict: str) -> set[str]:
    return {row["model_type"] for row in BY_VERDICT[verdict]}


def test_the_table_is_whole() -> None:
    """Nothing differs, and there is one row for each type."""
    assert set(BY_VERDICT) == {"served", "nothing to do", "refused", "not run"}
    assert len({row["model_type"] for row in ROWS}) == len(ROWS) > 150


def test_refused_types_stand_beside_their_message() -> None:
    listed = bullets("docs/refused.md", "## Model types")
    assert set().union(*listed.values()) == types("refused")
    for row in BY_VERDICT["refused"]:
        (said,) = [said for said, names in listed.items() if row["model_type"] in names]
        assert said.strip("`") in row["words"]


@pytest.mark.parametrize("verdict", ["nothing to do", "not run"])
def test_types_that_are_not_served_are_named(verdict: str) -> None:
    listed = bullets("docs/works-with.md", "**Model types.**")
    of_verdict = {said: names for said, names in listed.items() if names & types(verdict)}
    assert set().union(*of_verdict.values()) == types(verdict)
    for said, names in of_verdict.items():
        assert said.startswith(f"{len(names)} ")


def test_counts() -> None:
    text = " ".join(DOCUMENTS["docs/works-with.md"].split())
    (version,) = {row["transformers"] for row in ROWS}
    assert f"Transformers {version.rpartition('.')[0]} has {len(ROWS)} types of causal language models" in text
    assert f"- {len(types('served'))} are served" in text
    assert f"among the {len(types('refused'))} in [refused](refused.md#model-types)" in text
