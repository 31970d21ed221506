"""lm-eval's tasks through a QAdACache: scores against full attention and against decoding token by token."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from models import SMALL, forced, tiny
from stand_in import accelerator

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed (pip install qada-cache[eval])")

import needle  # noqa: E402
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from qada_cache import QAdACache  # noqa: E402
from qada_cache.lm_eval import QAdALM, make_metrics  # noqa: E402
from qada_cache.lm_eval.scoring import make_rows  # noqa: E402

HERE = Path(__file__).parent
TASKS = {"tiny_choice": "acc,none", "tiny_perplexity": "word_perplexity,none", "needle": "exact_match,none"}


def evaluate(lm: HFLM, *tasks: str, **options: Any) -> dict[str, Any]:
    """The results of the tasks, and every log-likelihood under "log_likelihoods"."""
    manager = TaskManager(include_path=HERE / "tiny_tasks", include_defaults=False, metadata={"max_seq_lengths": [600]})
    results = lm_eval.simple_evaluate(
        lm,
        tasks=list(tasks or TASKS),
        task_manager=manager,
        **{"bootstrap_iters": 0, "limit": 4, "log_samples": True, **options},
    )
    samples = results["samples"].get("tiny_choice", [])
    scores = [response[0][0] for sample in samples for response in sample["resps"]]
    return {**results["results"], "log_likelihoods": torch.tensor(scores)}


def needle_lm(model: type[HFLM] = QAdALM, **arguments: Any) -> HFLM:
    return model(str(needle.FOLDER), device="cpu", **arguments)


def random_lm(family: str = "llama", **arguments: Any) -> QAdALM:
    """lm-eval's model of a tiny random model, which decides less clearly than the needle model, with options SMALL."""
    model = tiny(family, vocab_size=482)
    options = {f"cache_{name}": value for name, value in SMALL.items()}
    return QAdALM(model, tokenizer=needle.load_tokenizer(), **{**options, **arguments})


def token_requests(*lengths: tuple[int, int]) -> list[tuple[tuple[str, str], list[int], list[int]]]:
    """Random contexts and continuations of these lengths, as lm-eval hands them to a model."""
    generator = torch.Generator().manual_seed(3)
    draw = lambda count: torch.randint(4, 482, (count,), generator=generator).tolist()  # noqa: E731
    return [(("", str(place)), draw(context), draw(answer)) for place, (context, answer) in enumerate(lengths)]


def texts_to_go_on(*tokens: int) -> list[Instance]:
    until = {"until": [], "max_gen_toks": 24, "do_sample": False}
    return [
        Instance("generate_until", {}, (needle.make_prompt(tokens=count, facts=8, questions=1).context, until), 0)
        for count in tokens
    ]


@pytest.fixture(scope="module")
def stock() -> dict[str, Any]:
    return evaluate(needle_lm(HFLM))


@pytest.mark.parametrize("arguments", [{}, {"batch_size": 3, "cache_local_tokens": 40}], ids=str)
def test_threshold_one_scores_as_without_a_cache(stock: dict[str, Any], arguments: dict[str, Any]) -> None:
    ours = evaluate(needle_lm(cache_threshold=1, **arguments))
    for task, metric in TASKS.items():
        assert ours[task][metric] == pytest.approx(stock[task][metric], rel=1e-5), task
    torch.testing.assert_close(ours["log_likelihoods"], stock["log_likelihoods"], rtol=0, atol=1e-4)
    assert ours["needle"]["cache_sparsity,none"] == 0.0


def test_every_kind_of_task_reads_the_cache(stock: dict[str, Any]) -> None:
    """Sinks and window alone cannot know the answers: not the one-token one either, nor may rolling be exact."""
    local = evaluate(needle_lm(cache="local"))
    assert stock["needle"]["exact_match,none"] == 1.0
    assert local["needle"]["exact_match,none"] == 0.0
    assert local["tiny_choice"]["acc,none"] < stock["tiny_choice"]["acc,none"]
    assert local["tiny_perplexity"]["word_perplexity,none"] != stock["tiny_perplexity"]["word_perplexity,none"]
    for task in TASKS:
        assert local[task]["cache_sparsity,none"] == local[task]["cache_kv_sparsity,none"] == 1.0
        assert local[task]["cache_bulk_read_bytes,none"] == 0
        assert local[task]["cache_host_bytes,none"] > 0


def test_rows_of_a_batch_score_as_alone() -> None:
    alone, padded = (evaluate(needle_lm(batch_size=size, cache_threshold=0.6)) for size in (1, 7))
    torch.testing.assert_close(padded["log_likelihoods"], alone["log_likelihoods"], rtol=0, atol=1e-4)
    for task, metric in TASKS.items():
        assert padded[task][metric] == pytest.approx(alone[task][metric], rel=1e-5), task
        for name in ("cache_sparsity,none", "cache_kv_sparsity,none", "cache_bulk_read_bytes,none"):
            assert padded[task][name] == pytest.approx(alone[task][name]), (task, name)
        # Prompts are short: a bulk of which more than a quarter is pending is read, whatever its moments say.
        assert 0.1 < alone[task]["cache_sparsity,none"] < 1.0
        assert padded[task]["cache_device_bytes,none"] > alone[task]["cache_device_bytes,none"] > 0


# One of one token each; continuations within, at and beyond the window (16); a context shorter than the sinks.
LENGTHS = [(150, 5), (90, 16), (61, 40), (1, 30), (3, 17), (120, 1)]


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_scores_are_those_of_decoding_token_by_token(family: str, batch_size: int) -> None:
    lm = random_lm(family, batch_size=batch_size, cache_threshold=0.12)
    requests = token_requests(*LENGTHS)
    scores = lm._loglikelihood_tokens(requests, disable_tqdm=True)
    undecided = 0
    for (_, context, continuation), (log_likelihood, greedy) in zip(requests, scores, strict=True):
        cache = QAdACache(lm.model, threshold=0.12, **SMALL)
        ids = torch.tensor([context + continuation])
        prefix = [len(context) - 1] if len(context) > 1 else []
        logits = forced(lm.model, ids[:, :-1], [*prefix, 1], cache)[0, len(context) - 1 :]
        wanted = logits.log_softmax(-1).gather(-1, ids[0, len(context) :, None]).sum()
        assert log_likelihood == pytest.approx(wanted.item(), abs=2e-3)
        assert greedy == logits.argmax(-1).equal(ids[0, len(context) :])
        undecided += cache.stats().sparsity not in (0.0, 1.0)
    assert undecided >= 1  # else the threshold decides nothing


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_continuations_of_one_context_share_its_prefill(
    family: str, batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = random_lm(family, cache_threshold=0.12, batch_size=batch_size)
    (_, context, _), *_ = token_requests((100, 1))
    endings = [[5, 6, 7], [5, 6, 8], [9], [10, 11]]
    requests = [((str(number), ""), context, ending) for number, ending in enumerate(endings)]
    apart = [lm._loglikelihood_tokens([request], disable_tqdm=True)[0] for request in requests]
    calls, forward = [], lm._forward

    def recorded(cache: QAdACache, ids: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        calls.append(tuple(ids.shape))
        return forward(cache, ids, *rest, **options)

    monkeypatch.setattr(lm, "_forward", recorded)
    together = lm._loglikelihood_tokens(requests, disable_tqdm=True)
    assert [score for score, _ in together] == pytest.approx([score for score, _ in apart], abs=1e-4)
    # Two endings differ only in a token that is scored and never read: they are one row.
    assert calls == [(1, 99), *([(1, 3), (1, 2), (1, 1)] if batch_size == 1 else [(3, 3)])]


def test_no_call_is_longer_than_heads_decide_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """With bulks in the memory of a host behind a bus, that is fewer tokens than a window has."""
    lm, widths = random_lm(cache_local_tokens=SMALL["sink_tokens"] + 50), []
    forward = lm._forward
    monkeypatch.setattr(
        lm, "_forward", lambda *given, **options: widths.append(given[1].shape[1]) or forward(*given, **options)
    )
    for where, expected in ((nullcontext(), [100, 40]), (accelerator(), [100, 8, 8, 8, 8, 8])):
        widths.clear()
        with where:
            lm._loglikelihood_tokens(token_requests((101, 40)), disable_tqdm=True)
        assert widths == expected


def test_a_request_is_cut_as_lm_eval_cuts_it() -> None:
    ((row),) = make_rows([([1, 2, 3, 4], [5, 6])], max_length=3)
    assert (row.prefix, row.queries) == ((3,), (4, 5))
    ((row),) = make_rows([([1, 2, 3, 4], [5, 6])], max_length=30)
    assert (row.prefix, row.queries) == ((1, 2, 3), (4, 5))


@pytest.mark.parametrize(("context", "answer"), [(20, 17), (1, 40), (0, 3), (5, 0), (1, 16), (3, 16), (40, 5)])
def test_a_request_that_does_not_fit_fares_as_in_lm_eval(
    context: int, answer: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Refused where lm-eval refuses it: a continuation longer than the model would be scored against wrong tokens."""
    scored = []
    for make in (HFLM, QAdALM):
        options = {} if make is HFLM else {"cache_threshold": 1}
        lm = make(tiny(vocab_size=482), tokenizer=needle.load_tokenizer(), max_length=16, **options)
        try:
            scored.append(lm._loglikelihood_tokens(token_requests((context, answer)), disable_tqdm=True)[0])
        except AssertionError:
            scored.append(None)
    assert (scored[0] is None) == (scored[1] is None) == (answer > 16 or 0 in (context, answer))
    if scored[0] is not None:
        assert scored[1] == (pytest.approx(scored[0][0], abs=1e-4), scored[0][1])
        assert ("cut off" in caplog.text) == (context + answer > 17)


@pytest.mark.parametrize(("batch_size", "beams"), [(1, 1), (3, 2)])
def test_generation_at_threshold_one_is_as_without_a_cache(batch_size: int, beams: int) -> None:
    requests = texts_to_go_on(300, 500, 420)
    for request in requests:
        request.args[1]["num_beams"] = beams
    ours, stock = needle_lm(cache_threshold=1, batch_size=batch_size), needle_lm(HFLM, batch_size=batch_size)
    assert ours.generate_until(requests, disable_tqdm=True) == stock.generate_until(requests, disable_tqdm=True)


def test_batches_generate_as_their_rows_alone() -> None:
    options = {"cache_threshold": 0.05, "cache_moments": "current"}
    alone, padded = random_lm(**options), random_lm(**options, batch_size=3)
    requests = texts_to_go_on(300, 500, 420)
    assert padded.generate_until(requests, disable_tqdm=True) == alone.generate_until(requests, disable_tqdm=True)
    assert 0.0 < make_metrics(padded.cache_totals["none"])["cache_sparsity,none"] < 1.0


def test_a_prompt_in_chunks_leaves_its_last_token_to_the_heads() -> None:
    """Whether lm-eval or the model's own settings ask for them."""
    lm, (request,) = random_lm(cache_threshold=0.0), texts_to_go_on(300)
    wanted = lm.generate_until([request], disable_tqdm=True), lm.cache_totals["none"][-1].steps
    for own in (request.args[1], vars(lm.model.generation_config)):
        own["prefill_chunk_size"] = 50
        assert (lm.generate_until([request], disable_tqdm=True), lm.cache_totals["none"][-1].steps) == wanted
        own["prefill_chunk_size"] = None


def test_requests_that_fill_up_are_answered_once() -> None:
    """lm-eval repeats the last ones of a process that has fewer than another."""
    lm, (one, two) = random_lm(), texts_to_go_on(60, 70)
    for request in (one, two):
        request.repeats = 1
    alone = lm.generate_until([one, two], disable_tqdm=True)
    lm.cache_totals.clear()
    lm._world_size = 2  # there is no other to wait for
    assert lm.generate_until([one, two, two, two], disable_tqdm=True) == [*alone, alone[1], alone[1]]
    assert lm.world_size == 2
    counted = make_metrics(lm.cache_totals.pop("none"))
    lm.generate_until([one, two], disable_tqdm=True)
    assert make_metrics(lm.cache_totals["none"]) == counted


@pytest.mark.parametrize("batch_size", [1, 3])
def test_what_prompts_begin_with_is_read_once(tmp_path: Path, batch_size: int) -> None:
    """Scores stay, in the run that keeps a beginning and in a later one, which has it from the first prompt on."""
    (_, start, _), *_ = token_requests((300, 1))
    requests = [
        (("", str(place)), start + context, answer)
        for place, (_, context, answer) in enumerate(
            token_requests((40, 5), (35, 30), (40, 3), (50, 4), (40, 1), (3, 2))
        )
    ]
    wanted = random_lm(cache_threshold=0.12, batch_size=batch_size)._loglikelihood_tokens(requests, disable_tqdm=True)
    saved = []
    for _ in range(2):
        lm = random_lm(cache_threshold=0.12, batch_size=batch_size, cache_store=str(tmp_path / "store"))
        scores = lm._loglikelihood_tokens(requests, disable_tqdm=True)
        assert [score for score, _ in scores] == pytest.approx([score for score, _ in wanted], abs=2e-3)
        saved.append(lm.saved_tokens["none"])
    assert 0 < saved[0] < saved[1]
    if batch_size == 1:  # the rest of the last is too short to be read exactly, so less is taken
        assert saved == [3 * 300 + 302 - 17, 5 * 300 + 302 - 17]


def test_tokens_saved_stand_beside_scores(tmp_path: Path, stock: dict[str, Any]) -> None:
    found = []
    for _ in range(2):
        found.append(evaluate(needle_lm(cache_threshold=1, cache_store=str(tmp_path / "store"))))
        for task, metric in TASKS.items():
            assert found[-1][task][metric] == pytest.approx(stock[task][metric], rel=1e-5), task
    assert all(isinstance(each[task]["cache_saved_tokens,none"], int) for each in found for task in TASKS)
    assert "cache_saved_tokens,none" not in evaluate(needle_lm(cache_threshold=1), "needle")["needle"]
    with pytest.raises(NotImplementedError, match="sliding or linear layers"):
        random_lm("gemma3", cache_store=str(tmp_path / "store"))
    for no_folder in (True, "", __file__):
        with pytest.raises(ValueError, match=re.escape(f"cache_store takes a folder, got {no_folder!r}")):
            random_lm(cache_store=no_folder)
