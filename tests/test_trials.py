"""The bench for combinations that the library does not have: its decisions are a QAdACache's, its statistics plain."""

import pytest
import torch

from eval import combinations
from eval.moments import answers
from eval.trials import Outcome, Way, logit, read_context, run
from qada_cache import KeyMoments, QAdACache, needle


@pytest.mark.parametrize(
    ("rule", "threshold", "weight"),
    [
        ("all", 0.3, 1.0),
        ("head", 0.03, 1.0),
        ("mean", 0.3, 1.0),
        ("head", 0.3, 0.0),
        ("all", 1.0, 1.0),
        ("all", 0.0, 1.0),
    ],
)
def test_ways_decide_as_a_cache_does(rule: str, threshold: float, weight: float) -> None:
    model, tokenizer = needle.load_model(), needle.load_tokenizer()
    prompt, kept = needle.make_prompt(tokens=1024, seed=5), KeyMoments.collect(model, progress=False)
    ways = [Way("mean", (0.5,) * 4), Way(rule, (threshold,) * 4, weight)]
    _, outcome = run(model, tokenizer, prompt, read_context(model, tokenizer, prompt), ways, kept)

    moments = kept if weight else "current"
    cache = QAdACache(model, moments=moments, group_rule=rule, threshold=threshold, update_moments=False)
    with torch.no_grad():
        model(tokenizer(prompt.context, return_tensors="pt").input_ids, past_key_values=cache, logits_to_keep=1)
    given = list(answers(model, tokenizer, cache, prompt.questions))
    stats = cache.stats()
    assert outcome.right == sum(map(str.__eq__, given, prompt.answers))
    assert outcome.asked == 16
    # A share on the threshold's very edge may fall on either side of it.
    assert outcome.sparsity == pytest.approx(stats.sparsity, abs=2e-3)
    assert outcome.read == pytest.approx(1 - stats.kv_sparsity, abs=2e-3)


def test_blends_are_mixtures() -> None:
    """Half of one set of keys and half of another have the moments of both together."""
    from eval.trials import own_moments
    from qada_cache.criterion import pool_score_moments, score_moments

    first, second = torch.randn(2, 1, 2, 50, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    second = 2 * second + 1
    query = torch.randn(1, 2, 3, 8, dtype=torch.float64)
    apart = [score_moments(query, *own_moments(keys), scaling=0.5) for keys in (first, second)]
    half = torch.tensor(0.5, dtype=torch.float64)
    pooled = pool_score_moments(half, *apart[0], half, *apart[1])
    together = score_moments(query, *own_moments(torch.cat([first, second], dim=2)), scaling=0.5)
    for found, expected in zip(pooled, together, strict=True):
        torch.testing.assert_close(found, expected)


def test_layers_move_on_the_logit_scale() -> None:
    way = combinations.shifted(Way("all", (0.3, 0.3, 0.0)), [1, 2], 1.0)
    assert way.thresholds[0] == 0.3
    assert way.thresholds[2] == 0.0
    assert logit(way.thresholds[1]) == pytest.approx(logit(0.3) + 1)
    assert combinations.shifted(way, [0], float("-inf")).thresholds[0] == 0.0


def test_change_is_that_of_the_least_read_at_the_recall() -> None:
    def outcome(right: int, read: int) -> Outcome:
        return Outcome(100, right, [1000], [read], 1, 1)

    plainly = [[outcome(90, 100)] * 4, [outcome(99, 400)] * 4, [outcome(100, 800)] * 4]
    combined = [[outcome(98, 100)] * 4, [outcome(100, 300)] * 4]
    assert combinations.change(plainly, combined) == ["-0.250", "-0.250", "-0.250"]
    assert combinations.change(plainly, combined[:1]) == ["", "", ""]
    assert combinations.least([Way("all", (0.1,))] * 3, plainly) == 1
    assert combinations.least([Way("all", (0.1,))], plainly[:1]) is None
