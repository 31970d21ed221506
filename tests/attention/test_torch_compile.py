"""`torch.compile` of a model that is given a QAdACache: whatever the graphs are, the tokens are DynamicCache's.

The backend "eager" runs the graphs as they were traced and "aot_eager" as they were made functional: what a code
generator makes of them afterwards is no matter of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from models import LATENT, dynamic, exact, prompt, tiny
from torch import Tensor
from transformers import Cache

from qada_cache.versions import pass_cache

LENGTHS = (60, 1, 1, 7, 40, 1)  # a prompt, tokens, a short turn and one longer than the window


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@torch.no_grad()
def logits(call: Callable[..., Any], cache: Cache) -> Tensor:
    """Logits `[1, tokens, vocabulary]` of calls of `LENGTHS` tokens each."""
    parts = prompt(sum(LENGTHS))[0].split(LENGTHS, dim=1)
    return torch.cat([call(ids, **pass_cache(cache), use_cache=True).logits for ids in parts], dim=1)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"backend": "eager"}),
        pytest.param("gemma3", {"backend": "aot_eager", "dynamic": True}, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", {"backend": "eager"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_compiled_model(family: str, options: dict[str, Any]) -> None:
    model = tiny(family)
    wanted = logits(model, dynamic(model))
    cache = exact(model, moments="current")
    got = logits(torch.compile(model.forward, **options), cache)
    assert torch.equal(got.argmax(-1), wanted.argmax(-1))
    assert (got - wanted).abs().max() < 1e-4
    assert cache.get_seq_length() == sum(LENGTHS)
    assert cache.stats().decisions > 0 or family in LATENT


def test_one_graph_is_refused_in_words() -> None:
    """One graph is refused for a QAdACache alone: our attention does not prevent it for any other cache."""
    model = tiny()
    wanted = logits(model, dynamic(model))
    compiled = torch.compile(model.forward, backend="eager", dynamic=True, fullgraph=True)
    cache = exact(model, moments="current")
    assert torch.equal(logits(compiled, dynamic(model)), wanted)
    with pytest.raises(
        RuntimeError, match=r"QAdACache .*depends on what the keys hold: compile without fullgraph=True"
    ):
        logits(compiled, cache)
    assert cache.get_seq_length() == 0


def test_generate_does_not_compile_by_itself() -> None:
    """It does for caches all of whose layers may be in a graph, as linear ones may, unless they are DynamicCaches."""
    model = tiny("qwen3_next", layer_types=["linear_attention", "linear_attention"])
    assert dynamic(model).is_compileable
    assert not exact(model, moments="current").is_compileable
    assert not exact(tiny(), moments="current").is_compileable
