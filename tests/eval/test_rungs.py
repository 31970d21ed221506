"""Trials of a bulk in few bits: other codes by slow formulas, bytes, and what comes of a model's own text."""

from __future__ import annotations

import pytest
import torch
from models import prompt, tiny
from torch import Tensor

pytest.importorskip("lm_eval", reason="trials take documents from lm-eval")

from eval import rungs
from eval.shared.texts import Document
from qada_cache.sketch import coded


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bits", [4, 8])
def test_groups_of_32_by_hand(bits: int) -> None:
    values = random(3, 64)
    values[1, :32] = 0
    for row, found in zip(values.double(), rungs.round_groups(values, bits), strict=True):
        for start in (0, 32):
            part = row[start : start + 32].tolist()
            greatest = max(part, key=abs)
            scale = float(torch.tensor(abs(greatest) / 127 if bits == 8 else greatest / -8).half())
            least, most = (-128, 127) if bits == 8 else (-8, 7)
            wanted = [min(max(round(value / scale), least), most) * scale if scale else 0.0 for value in part]
            torch.testing.assert_close(found[start : start + 32].double(), torch.tensor(wanted).double())


def test_values_are_those_of_records() -> None:
    values, keys = random(1, 2, 50, 64), random(1, 2, 50, 64, seed=1)
    layout = coded.RecordLayout(64, 64, 6, 5)
    records = coded.code_tokens(keys, values, keys, torch.ones(64), layout)
    torch.testing.assert_close(rungs.round_as_coded("5", values), coded.decode_values(records, layout))


def test_bytes_of_a_token() -> None:
    """A sketch of 13 bytes, scales of 2."""
    wanted = {("6", "8"): 129, ("4", "4"): 81, ("16", "4 x 2"): 164, ("q8_0", "q8_0"): 136, ("q4, 64", "q4, 64"): 72}
    assert {rung: rungs.count_bytes(rung, 64) for rung in wanted} == wanted


def test_more_bits_lose_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a tiny model; as it is, a bulk loses nothing."""
    monkeypatch.setattr(rungs, "RUNGS", (("16", "16"), ("8", "8"), ("5", "5"), ("3", "3")))
    model, ids = tiny("llama"), prompt(800)[0]
    document = Document("prose", 780, 0, ids[:, :780], ids[:, 780:])
    found = rungs.measure(model, document, torch.ones(model.config.num_hidden_layers, 2, 8))
    exact, *losses = [float(row["kl"]) for row in found.values()]
    assert exact == 0
    assert 0 < 10 * losses[0] < losses[1] < losses[2] / 4
