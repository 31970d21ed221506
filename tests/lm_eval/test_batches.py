"""Batches of log-likelihood requests: how many rows they have, and what their caches count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is not installed (pip install qada-cache[eval])")

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from test_lm_eval import needle_lm, random_lm, token_requests


@pytest.fixture
def detected(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths for which lm-eval tries out sizes of batches; it finds room for 3000 tokens."""
    lengths: list[int] = []

    def detect(self: HFLM, requests: Any = None, pos: int = 0) -> int:
        lengths.append(len(requests[pos][1] + requests[pos][2]) - 1 if requests else self.max_length)
        return max(1, 3000 // lengths[-1])

    monkeypatch.setattr(HFLM, "_detect_batch_size", detect)
    return lengths


def test_a_size_is_detected_once_for_many_tasks(detected: list[int]) -> None:
    """It is found for the longest texts, and again where they are less than half as long."""
    lm = needle_lm(batch_size="auto", max_length=256)

    def score(words: int, task: str) -> None:
        text = " ".join(["the old farmer walks"] * words)
        lm.loglikelihood([Instance("loglikelihood", {}, (text, " slowly"), 0, metadata=(task, 0, 1))], True)

    for task, words in {"a": 20, "b": 19, "c": 12, "d": 5, "e": 18, "f": 6}.items():
        score(words, task)
    assert len(detected) == 3
    assert lm.batch_sizes == {length: 3000 // length for length in detected}
    for task in "gh":
        request = Instance("loglikelihood_rolling", {}, ("the old farmer",), 0, metadata=(task, 0, 1))
        lm.loglikelihood_rolling([request], disable_tqdm=True)
    assert detected[3:] == [256]


@pytest.mark.parametrize(
    ("batch_size", "rows", "tokens"), [("auto", [7, 7, 2], [401]), ("auto:4", [7, 9], [401, 131]), (16, [16], [])]
)
def test_sizes_are_detected_in_as_many_parts_as_asked(
    detected: list[int], batch_size: Any, rows: list[int], tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    lm, batches = random_lm(batch_size=batch_size), []
    read = lm._read_prompt
    monkeypatch.setattr(
        lm, "_read_prompt", lambda ids, *more, **others: batches.append(len(ids)) or read(ids, *more, **others)
    )
    lm._loglikelihood_tokens(token_requests(*4 * [(400, 2), (130, 2), (40, 2), (12, 2)]), disable_tqdm=True)
    assert batches == rows
    assert detected == list(lm.batch_sizes) == tokens


def test_a_prefix_is_counted_once(tmp_path: Path) -> None:
    """However many batches share what was read of it."""
    (_, start, _), *_ = token_requests((300, 1))
    ((_, rest, _),) = token_requests((60, 1))
    counted = []
    for endings in ([[1]], [[5, 6]], [[5, 6], [7, 8], [9, 10], [11, 12]]):  # the first run fills the store
        lm = random_lm(cache_store=str(tmp_path / "store"))
        requests = [(None, start + rest, ending) for ending in endings]
        lm._loglikelihood_tokens([(None, [*start, 4], [5]), *requests], disable_tqdm=True)
        counted.append(sum(stats.streamed_bytes for stats in lm.cache_totals["none"]))
    counted = counted[1:]
    assert counted[0] == counted[1] > 0
