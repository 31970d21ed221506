"""`python -m eval.codes`: other codes by slow formulas, bytes, and what comes of a model's own text."""

from __future__ import annotations

from pathlib import Path

import needle
import pytest
import torch
from drawn import random
from models import prompt, tiny
from sketch_reference import estimates
from torch import Tensor

from eval import codes
from eval.shared import scaled_keys
from eval.shared.tables import read
from eval.shared.texts import Document
from qada_cache.kernels.operands import Query
from qada_cache.sketch import Layout, coded
from qada_cache.sketch.codec import Sketch

RESULTS = Path(__file__).parents[2] / "eval" / "results"


@pytest.mark.parametrize("bits", [4, 8])
def test_groups_of_32_by_hand(bits: int) -> None:
    values = random(3, 64)
    values[1, :32] = 0
    for row, found in zip(values.double(), codes.round_groups(values, bits), strict=True):
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
    torch.testing.assert_close(codes.round_as_coded("5", values), coded.decode_values(records, layout))


def test_bytes_of_a_token() -> None:
    """A sketch of 13 bytes, scales of 2."""
    wanted = {("6", "8"): 129, ("4", "4"): 81, ("16", "4 x 2"): 164, ("q8_0", "q8_0"): 136, ("q4, 64", "q4, 64"): 72}
    assert {rung: codes.count_bytes(rung, 64) for rung in wanted} == wanted


def test_more_bits_lose_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """More bits lose less on a tiny model, and a bulk in the model's dtype loses nothing."""
    monkeypatch.setattr(codes, "RUNGS", (("16", "16"), ("8", "8"), ("5", "5"), ("3", "3")))
    model, ids = tiny("llama"), prompt(800)[0]
    document = Document("prose", 780, 0, ids[:, :780], ids[:, 780:])
    found = codes.compare_rungs(model, document, torch.ones(model.config.num_hidden_layers, 2, 8))
    exact, *losses = [float(row["kl"]) for row in found.values()]
    assert exact == 0
    assert 0 < 10 * losses[0] < losses[1] < losses[2] / 4


@pytest.mark.parametrize("energies", [None, torch.rand(2, 32, generator=torch.Generator().manual_seed(2)) + 0.1])
def test_errors_of_estimates(energies: Tensor | None) -> None:
    """Errors of estimates equal those in float64, for one query of each of two query heads a KV head."""
    keys, values, states = random(1, 2, 700, 32), random(1, 2, 700, 32, seed=1), random(1, 4, 1, 32, seed=3)
    made = Sketch.of(keys, values, None if energies is None else energies[None], Layout.from_bits(32, 1.5))
    off = []
    for head in range(4):
        query, true = states[0, head], 0.3 * keys[0, head // 2].double() @ states[0, head, 0].double()
        found = estimates(query=query, sketch=made[0, head // 2], length=700, scaling=0.3)
        off.append(float((found[0] - true).var()))
    found = codes.find_errors(keys, values, Query(states, 0.3), 1.5, energies)
    assert found == pytest.approx(sum(off) / 4, rel=1e-4)


def test_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns are those of the committed tables; energies of the very text are no worse than none."""
    monkeypatch.setattr(codes, "RUNGS", (("16", "16"), ("4", "4")))
    monkeypatch.setattr(codes, "PROMPTS", ("random-tokens",))
    monkeypatch.setattr(scaled_keys, "BULK_BITS", (8,))
    for part, committed in (("rungs", "rungs-smollm2"), ("energies", "energies"), ("spreads", "spreads")):
        table, told = tmp_path / f"{part}.csv", ["--lengths", "1300", "--documents", "1"]
        told += ["--spreads", "0.5"] if part == "spreads" else []
        assert codes.main([part, "--model", str(needle.FOLDER), *told, "--out", str(table)]) == 0
        assert list(read(table)[0]) == list(read(RESULTS / f"{committed}.csv")[0])
    rungs, energies = (read(tmp_path / f"{part}.csv") for part in ("rungs", "energies"))
    assert rungs[0]["kl"].split()[0] == "0.000000"
    found = {row["energies"]: float(row["mean_variance"]) for row in energies}
    assert list(found) == [codes.ALIKE, "random-tokens", codes.OTHER, codes.SAME_TEXT]
    assert 0 < found[codes.SAME_TEXT] <= found[codes.ALIKE]
    (spread,) = read(tmp_path / "spreads.csv")
    assert (spread["spread"], spread["bits"]) == ("0.5", "8")
    assert float(spread["kl"].split()[0]) < 0.02
    assert 0 < float(spread["read_share"]) < 1


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@torch.no_grad()
def test_scaled_keys_leave_the_logits(family: str) -> None:
    """Keys and queries are others, and all that is computed of them is the same."""
    model, ids = tiny(family, dtype=torch.float64), torch.arange(40)[None]
    attention = model.model.layers[1].self_attn
    if attention.k_proj.bias is not None:
        attention.k_proj.bias.copy_(torch.linspace(-1, 1, len(attention.k_proj.bias)))
    before, logits = attention.k_proj.weight.clone(), model(ids).logits
    scaled_keys.scale_keys(model, 1.5)
    torch.testing.assert_close(model(ids).logits, logits, rtol=1e-9, atol=1e-9)
    factors = (attention.k_proj.weight / before).log()
    assert factors.std() > 1
    torch.testing.assert_close(factors[:, :1].expand_as(factors), factors)


def test_other_families_are_not_scaled() -> None:
    with pytest.raises(ValueError, match="phi3 has no keys that are scaled here, only llama and qwen2 have"):
        scaled_keys.scale_keys(tiny("phi3"), 1.0)
