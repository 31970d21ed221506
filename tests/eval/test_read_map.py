"""The map of what an answer read counts the tokens that heads choose, and takes nothing from the answer."""

from __future__ import annotations

import pytest
import torch
from models import prompt, tiny
from small_sketch import small_sketch

pytest.importorskip("matplotlib")
from eval.shared import read_map
from qada_cache import QAdACache
from qada_cache.kernels import query_adaptive
from qada_cache.versions import pass_cache

SIZES = {"sink_tokens": 4, "local_tokens": 20, "moments": "current", "threshold": 0.99}


@pytest.mark.parametrize(("theta", "segment"), [(1e-30, 32), (1e-30, 4096), (0.0, 32)])
def test_what_reads_all_is_counted_whole(theta: float, segment: int) -> None:
    """With and without a sketch; the answer is DynamicCache's."""
    model, (ids, *_) = tiny(), prompt(300)
    question = ids[0, 290:].tolist()
    with small_sketch(segment), torch.no_grad():
        cache = QAdACache(model, **SIZES, token_threshold=theta)
        model(ids[:, :290], **pass_cache(cache))
        given, reads = read_map.answer(model, cache, question)
    full = model.generate(ids, max_new_tokens=read_map.ANSWER_TOKENS, do_sample=False, eos_token_id=None)[0, 300:]
    assert torch.equal(given, full)
    heads = model.config.num_hidden_layers * model.config.num_key_value_heads
    assert reads.shape == (heads, 290)
    assert not reads[:, :4].any()
    assert (reads[:, 4:200] <= read_map.ANSWER_TOKENS).all()
    assert (reads[:, 4:200] == reads[:, 4:5]).all()  # of a head all or nothing
    assert reads[:, 4].float().mean() > 0.8 * read_map.ANSWER_TOKENS
    assert cache.get_seq_length() == 290  # the cache that was asked is as before


def test_some_tokens_are_those_that_were_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (ids, *_) = tiny(), prompt(300)
    selected = []
    select = query_adaptive.select_tokens

    def watched(*args: object, **kwargs: object) -> object:
        found = select(*args, **kwargs)  # type: ignore[arg-type]
        selected.append(found.tokens.any(dim=0))
        return found

    monkeypatch.setattr(query_adaptive, "select_tokens", watched)
    with small_sketch(32), torch.no_grad():
        cache = QAdACache(model, **SIZES, token_threshold=1.0)
        model(ids[:, :290], **pass_cache(cache))
        _, reads = read_map.answer(model, cache, ids[0, 290:291].tolist())
    assert 0 < int(reads.sum()) == int(sum(tokens[: 290 - 4].sum() for tokens in selected))
    assert (reads > 0).float().mean() < 0.7


def test_map_has_a_column_for_every_token_or_the_most_of_several() -> None:
    reads = torch.zeros(6, 3001, dtype=torch.int64)
    reads[2, 3000] = 8
    figure = read_map.draw_map(reads, facts=[700, 2200], asked=2200, title="a question")
    shown = figure.axes[0].images[0].get_array()
    assert shown.shape[0] == 6
    assert shown.shape[1] <= read_map.COLUMNS
    assert shown[2, -1] == pytest.approx(8**0.5)
    assert shown.sum() == pytest.approx(8**0.5)
