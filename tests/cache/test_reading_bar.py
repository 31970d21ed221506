"""`progress=True`: a bar while a prompt is read, and nothing else of it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import SMALL, generate, prompt, tiny
from transformers import PreTrainedModel

from qada_cache import QAdACache, reading_bar
from qada_cache.versions import CACHE, pass_cache


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny()


class Shown(reading_bar.tqdm):
    """A progress bar that shows nothing; the class collects all bars' updates in order."""

    told: list[tuple[str, float, float]]  # description, total, and how far it came

    def __init__(self, **options: object) -> None:
        super().__init__(**{**options, "disable": True})
        self.description, self.whole, self.n = str(options["desc"]), float(str(options["total"])), 0

    def update(self, n: float | None = 1) -> None:
        self.n += n or 0
        Shown.told.append((self.description, self.whole, float(self.n)))


@pytest.fixture(autouse=True)
def shown(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float, float]]:
    Shown.told = []
    monkeypatch.setattr(reading_bar, "tqdm", Shown)
    return Shown.told


def test_a_prompt_in_one_pass(model: PreTrainedModel, shown: list) -> None:
    """Every layer is a step, and a decoded token is none; without the option there is nothing."""
    layers, text = model.config.num_hidden_layers, prompt(150)[0]
    cache = QAdACache(model, progress=True, **SMALL)
    tokens = generate(model, text, cache)
    assert shown == [("Reading 150 tokens", 150, 150 * layer / layers) for layer in range(layers)]
    assert cache._shared.bar._bar is None
    shown.clear()
    assert torch.equal(generate(model, text, QAdACache(model, **SMALL)).sequences, tokens.sequences)
    assert shown == []


def test_chunks_share_one_bar(model: PreTrainedModel, shown: list) -> None:
    """`generate` says how long the prompt is that it reads in chunks; a second turn begins another bar."""
    text = prompt(150)[0]
    cache = QAdACache(model, progress=True, **SMALL)
    generate(model, text, cache, prefill_chunk_size=64)
    assert {name for name, _, _ in shown} == {"Reading 150 tokens"}
    assert [done for _, _, done in shown] == sorted(done for _, _, done in shown)
    assert shown[-1][2] > 64
    shown.clear()
    held = cache.get_seq_length()
    with torch.no_grad():
        model(prompt(60, seed=1)[0], **pass_cache(cache))
    assert {name for name, _, _ in shown} == {"Reading 60 tokens"}
    assert (shown[0][2], cache.get_seq_length()) == (0, held + 60)


@pytest.mark.skipif(CACHE != "cache", reason="older transformers read a text that is held again, in chunks")
def test_chunks_of_new_tokens_alone_share_one_bar(model: Any, shown: list) -> None:
    """The mask alone says that earlier tokens are held."""
    cache, text, new = QAdACache(model, progress=True, **SMALL), prompt(150)[0], prompt(100, seed=1)[0]
    generate(model, text, cache)
    shown.clear()
    mask = torch.ones(1, cache.get_seq_length() + 100, dtype=torch.int64)
    model.generate(new, attention_mask=mask, cache=cache, max_new_tokens=1, prefill_chunk_size=40)
    assert {name for name, _, _ in shown} == {"Reading 100 tokens"}
    assert [done for _, _, done in shown] == sorted(done for _, _, done in shown)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gemma3n", {}),
        (
            "qwen3_next",
            {
                "layer_types": ["linear_attention", "full_attention", "linear_attention"],
                "num_hidden_layers": 3,
                "mlp_only_layers": [0, 1, 2],
            },
        ),
    ],
    ids=["readers", "linear"],
)
def test_layers_without_keys_end_the_bar(family: str, changes: dict[str, Any], shown: list) -> None:
    """Whether they read another layer's keys or none: a prompt that is only read leaves no bar."""
    model = tiny(family, **changes)
    layers, cache = model.config.num_hidden_layers, QAdACache(model, progress=True, **SMALL)
    for seed in (0, 1):
        with torch.no_grad():
            model(prompt(150, seed=seed)[0], **pass_cache(cache))
        assert cache._shared.bar._bar is None
        assert shown[-1] == ("Reading 150 tokens", 150, 150 * (layers - 1) / layers)
        shown.clear()


def test_an_interrupted_prompt_leaves_no_bar(model: PreTrainedModel, shown: list) -> None:
    """A copy has none either; reading anew begins anew."""
    cache, text = QAdACache(model, progress=True, **SMALL), prompt(150)[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.model.layers[1].mlp, "forward", interrupt)
        with pytest.raises(KeyboardInterrupt), torch.no_grad():
            model(text, **pass_cache(cache))
    assert copy.copy(cache)._shared.bar is cache._shared.bar
    cache.reset()
    shown.clear()
    generate(model, text, cache)
    assert shown[0] == ("Reading 150 tokens", 150, 0)
    assert copy.deepcopy(cache)._shared.bar._bar is None


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_real_bar_is_gone_in_the_end(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(reading_bar, "SHOWN_AFTER", 0.0)
    monkeypatch.setattr(reading_bar.tqdm, "monitor_interval", 0)
    generate(model, prompt(150)[0], QAdACache(model, progress=True, **SMALL))
    written = capsys.readouterr().err
    assert "Reading 150 tokens:   0%" in written
    assert written.split("\r")[-1].strip() == ""
