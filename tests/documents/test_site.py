"""The site: `mkdocs.yml` names every document, and docs/api.md every public name."""

from __future__ import annotations

import re

from documents import DOCUMENTS, ROOT

import qada_cache


def test_every_document_is_in_the_sites_contents() -> None:
    contents = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1]
    named = re.findall(r"([\w/-]+\.md)$", contents, re.MULTILINE)
    assert sorted(named) == sorted(DOCUMENTS)


def test_the_reference_has_every_public_name() -> None:
    named = re.findall(r"^::: qada_cache\.([\w.]+)$", DOCUMENTS["docs/api.md"], re.MULTILINE)
    assert sorted(named) == sorted([*qada_cache.__all__, "serving.counters", "serving.generate", "stats.AuditStats"])
