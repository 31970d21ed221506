"""Every mode of `generate()`, for each family: at threshold 1 a QAdACache gives DynamicCache's output or refusal.

`test_generate.py` goes into depth for one family; here every mode and option meets plain, sliding and hybrid layers,
and eager attention.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import LATENT, dynamic, exact, generate, prompt, rounding, tiny, tiny_like
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.generation import BaseStreamer, GenerationMode, StoppingCriteria
from transformers.generation.utils import GENERATION_MODES_MAPPING

from qada_cache import QAdACache
from qada_cache.versions import pass_cache

FAMILIES = [
    "llama",
    "llama eager",
    "mistral_sliding",
    "gemma3",
    "deepseek_v3",
]  # plain, sliding, both, latent: others are the same
LENGTHS = (60, 41)  # both have a bulk beside the 20 local tokens
TOKENS = 10
ENDS = list(range(1, 97, 9))  # tokens that end a row, at different times


class AfterTokens(StoppingCriteria):
    """Ends a row at any of some tokens."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.isin(input_ids[:, -1], torch.tensor(ENDS))


MODES: dict[str, dict[str, Any]] = {
    "sampling": {"do_sample": True, "temperature": 1.5, "top_k": 20, "top_p": 0.9},
    "beam search": {"num_beams": 3, "length_penalty": 0.5},
    "beam sampling": {"num_beams": 3, "do_sample": True},
    "several answers": {"do_sample": True, "num_return_sequences": 2},
    "several beams": {"num_beams": 4, "num_return_sequences": 2},
    "rows that end": {"eos_token_id": ENDS},
    "beams that end": {"eos_token_id": ENDS, "num_beams": 3, "early_stopping": True},
    "guidance": {"guidance_scale": 1.5},  # its second pass has a cache of its own, a DynamicCache
    "chunked prefill": {"prefill_chunk_size": 17},  # longer than the window of 16
    "short chunks": {"prefill_chunk_size": 9},
    "hidden states": {"output_hidden_states": True},
}
OF_LOGITS: dict[str, dict[str, Any]] = {  # to a cache these, which change logits or end a text, are greedy search
    "stopping criteria": {"stopping_criteria": [AfterTokens()]},
    "minimum length": {"eos_token_id": ENDS, "min_new_tokens": 6},
    "maximum length": {"tokens": None, "max_length": LENGTHS[0] + 7},
    "repetition penalty": {"repetition_penalty": 1.7},
    "no repeated words": {"no_repeat_ngram_size": 1, "bad_words_ids": [[token] for token in ENDS]},
}
SPECULATIVE: dict[str, dict[str, Any]] = {
    "assistant": {},
    "assistant, sampling": {"do_sample": True},
    "prompt lookup": {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 1},
    "early exit": {"assistant_early_exit": 1},
}
ELSEWHERE: dict[GenerationMode, dict[str, Any]] = {
    GenerationMode.CONTRASTIVE_SEARCH: {"penalty_alpha": 0.6, "top_k": 4},
    GenerationMode.GROUP_BEAM_SEARCH: {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    GenerationMode.CONSTRAINED_BEAM_SEARCH: {"num_beams": 4, "force_words_ids": [[5]]},
    GenerationMode.DOLA_GENERATION: {"dola_layers": "low"},
}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


def build(family: str, **changes: Any) -> PreTrainedModel:
    name, _, attention = family.partition(" ")
    return tiny(name, attention=attention or None, **changes)


@pytest.fixture
def model(family: str) -> PreTrainedModel:
    return build(family)


def ours(model: PreTrainedModel) -> QAdACache:
    return exact(model, moments="current")


def assert_same(model: PreTrainedModel, got: Any, wanted: Any, cache: QAdACache) -> None:
    """All that was returned is the same, but for rounding; and the cache served it, reading everything."""
    assert got.keys() == wanted.keys()
    assert torch.equal(got.sequences, wanted.sequences)
    budget = 4 * rounding(model, prompt(100)[0])
    assert budget < 1e-3  # or it would say nothing
    for name in ("logits", "scores", "sequences_scores", "hidden_states", "attentions"):
        for one, other in zip(tensors(got.get(name)), tensors(wanted.get(name)), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=budget)
    if model.config.model_type in LATENT:
        assert cache.stats().streamed_bytes > 0
    elif cache.stats().layers:
        assert cache.stats().decisions > 0
        assert cache.stats().sparsity == 0.0


def skip_unless_right(wanted: Any, truth: Any) -> None:
    """Older transformers get chunks wrong that are read into a cache that holds something, with their own as well."""
    if not torch.equal(wanted.sequences[:, -TOKENS:], truth.sequences[:, -TOKENS:]):
        pytest.skip("this transformers gives other tokens with DynamicCache than without")


def tensors(nested: Any) -> list[Tensor]:
    if nested is None or isinstance(nested, Tensor):
        return [] if nested is None else [nested]
    return [tensor for part in nested for tensor in tensors(part)]


@pytest.mark.parametrize(
    ("family", "mode"),
    [*itertools.product(FAMILIES, MODES), *(("llama", mode) for mode in OF_LOGITS)],
    indirect=["family"],
)
def test_modes(model: PreTrainedModel, mode: str) -> None:
    ids, mask = prompt(*LENGTHS)  # the second row is padded on its left
    options = {"attention_mask": mask, "tokens": TOKENS, "output_scores": True, **(MODES | OF_LOGITS)[mode]}
    cache, plain = ours(model), dynamic(model)
    wanted = generate(model, ids, plain, **options)
    assert_same(model, generate(model, ids, cache, **options), wanted, cache)
    assert cache.get_seq_length() == plain.get_seq_length()


@pytest.mark.parametrize("mode", SPECULATIVE)
def test_speculative_modes(family: str, mode: str) -> None:
    # With small weights a random model repeats itself, which is easy to guess.
    model = build(family) if "assistant" in mode else build(family, initializer_range=0.1)
    options = {"tokens": 50, **SPECULATIVE[mode]}
    if "assistant" in mode:
        options["assistant_model"] = noisy(model)
    try:
        wanted = generate(model, prompt(60)[0], dynamic(model), **options)
    except (RuntimeError, TypeError) as error:  # older ones crop sliding layers, and layers that hold nothing
        pytest.skip(f"this transformers cannot do it with DynamicCache: {error}")
    cache = ours(model)
    assert_same(model, generate(model, prompt(60)[0], cache, **options), wanted, cache)
    assert cache.stats().steps < 49 or not cache.stats().layers  # else no guess was ever accepted


@pytest.mark.parametrize("mode", [{"prompt_lookup_num_tokens": 4}, {"assistant_early_exit": 1}], ids=str)
def test_speculation_behind_a_text_that_is_held(mode: dict[str, Any]) -> None:
    """Transformers gives any cache the whole text again, unless it is told the new tokens alone."""
    model, text = build("llama", initializer_range=0.2), prompt(70)[0]
    wanted = generate(model, text, None, tokens=TOKENS).sequences
    cache, options = ours(model), {"tokens": TOKENS, "attention_mask": torch.ones_like(text), **mode}
    generate(model, text[:, :60], cache, tokens=1)
    with pytest.raises(RuntimeError, match="a cache that holds 60 tokens the whole text again, 70 tokens"):
        generate(model, text, cache, **options)
    assert cache.get_seq_length() == 60
    plain = dynamic(model)
    generate(model, text[:, :60], plain, tokens=1)
    if not torch.equal(generate(model, text[:, 60:], plain, **options).sequences[:, 10:], wanted[:, 70:]):
        pytest.skip("this transformers hides what DynamicCache holds, which is refused")
    got = generate(model, text[:, 60:], cache, **options).sequences
    assert torch.equal(got[:, 10:], wanted[:, 70:])
    assert cache.get_seq_length() == 70 + TOKENS - 1


def noisy(model: PreTrainedModel) -> PreTrainedModel:
    """A model some of whose guesses are right."""
    assistant = tiny_like(model, torch.float32)
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in assistant.parameters():
            weight.add_(0.02 * torch.randn_like(weight))
    assistant.generation_config.num_assistant_tokens = 3
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    return assistant


@pytest.mark.parametrize("whole", [True, False], ids=["whole text", "new tokens"])
@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"prefill_chunk_size": 17}], ids=str)
def test_a_cache_kept_over_calls(model: PreTrainedModel, options: dict[str, Any], whole: bool) -> None:
    """A second call does not read the first call's tokens again, whether it is given the whole text or the new tokens.
    Its output is DynamicCache's."""
    ids, mask = prompt(*LENGTHS)
    seen = torch.cat([mask, torch.ones(2, 30, dtype=torch.long)], dim=1)

    def second(cache: DynamicCache) -> Any:
        first = generate(model, ids, cache, attention_mask=mask, tokens=5)
        text = torch.cat([first.sequences, prompt(25, 25, seed=2)[0]], dim=1)
        beams = options.get("num_beams", 1)
        cache.batch_repeat_interleave(beams)  # which generate leaves to the user, whatever the cache
        given = text if whole else text[:, cache.get_seq_length() :]
        output = generate(model, given, cache, attention_mask=seen, tokens=TOKENS, **options)
        if not isinstance(cache, QAdACache):
            skip_unless_right(output, generate(model, text, None, attention_mask=seen, tokens=TOKENS, num_beams=beams))
        return output

    wanted, cache = second(dynamic(model)), ours(model)
    assert_same(model, second(cache), wanted, cache)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=str)
def test_from_embeddings(model: PreTrainedModel, options: dict[str, Any]) -> None:
    ids, mask = prompt(*LENGTHS)
    with_ids = generate(model, ids, dynamic(model), attention_mask=mask, tokens=TOKENS, **options)
    embedded = model.get_input_embeddings()(ids).detach()
    options = {"inputs_embeds": embedded, "attention_mask": mask, "max_new_tokens": TOKENS, **options}
    options |= {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    wanted, cache = model.generate(**pass_cache(dynamic(model)), **options), ours(model)
    assert_same(model, got := model.generate(**pass_cache(cache), **options), wanted, cache)
    assert torch.equal(got.sequences, with_ids.sequences[:, LENGTHS[0] :])


def test_a_cache_beside_use_cache_false(model: PreTrainedModel) -> None:
    """Transformers gives it the whole text again for every token: so it does ours, which refuses if a mask shows it."""
    caches, options = (dynamic(model), ours(model)), {"tokens": TOKENS, "use_cache": False}
    wanted = generate(model, prompt(60)[0], caches[0], **options)
    assert caches[0].get_seq_length() == sum(range(60, 60 + TOKENS))
    try:
        got = generate(model, prompt(60)[0], caches[1], **options)
    except ValueError as error:
        if "does not agree with the tokens already cached" not in str(error):
            raise
    else:
        assert torch.equal(got.sequences, wanted.sequences)
        assert caches[1].get_seq_length() == caches[0].get_seq_length()


def test_a_streamer_gets_the_tokens(model: PreTrainedModel) -> None:
    class Streamer(BaseStreamer):
        def __init__(self) -> None:
            self.got: list[int] = []

        def put(self, value: Tensor) -> None:
            self.got += value.flatten().tolist()

        def end(self) -> None:
            self.got.append(-1)

    streamers = Streamer(), Streamer()
    for streamer, cache in zip(streamers, (dynamic(model), ours(model)), strict=True):
        generate(model, prompt(60)[0], cache, tokens=TOKENS, streamer=streamer)
    assert streamers[1].got == streamers[0].got
    assert len(streamers[0].got) == 60 + TOKENS + 1


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises((ValueError, NotImplementedError)) as caught:
        call()
    return f"{caught.type.__name__}: {caught.value}"


@pytest.mark.parametrize("implementation", ["static", "dynamic", "offloaded", "quantized"])
def test_two_caches_are_refused(implementation: str) -> None:
    model, options = tiny(), {"cache_implementation": implementation}
    wanted, got = (
        refusal(lambda cache=cache: generate(model, prompt(60)[0], cache, **options))
        for cache in (dynamic(model), ours(model))
    )
    assert got == wanted
    assert "both `cache_implementation`" in got


@pytest.mark.parametrize("mode", ELSEWHERE, ids=lambda mode: mode.value)
def test_modes_that_left_transformers(mode: GenerationMode) -> None:
    """They are code of the Hub's now, which nothing here downloads: the refusal is transformers' own."""
    assert "/" in GENERATION_MODES_MAPPING[mode]  # else it came back, and belongs in MODES
    model = tiny()
    wanted, got = (
        refusal(lambda cache=cache: generate(model, prompt(60)[0], cache, **ELSEWHERE[mode]))
        for cache in (dynamic(model), ours(model))
    )
    assert got == wanted
    assert "trust_remote_code" in got


def test_every_mode_of_transformers_is_here() -> None:
    names = {mode.value for mode, where in GENERATION_MODES_MAPPING.items() if "/" not in where}
    assert names == {"greedy_search", "sample", "beam_search", "beam_sample", "assisted_generation"}
    assert {mode for mode, where in GENERATION_MODES_MAPPING.items() if "/" in where} == set(ELSEWHERE)


def test_attention_weights_are_refused_or_returned(family: str) -> None:
    """Returned where no layer is ours, as no layer of a model with sliding windows alone is."""
    model = tiny(family.partition(" ")[0], attention="eager")
    options = {"tokens": TOKENS, "output_attentions": True}
    cache = ours(model)
    if cache.stats().layers:
        told = refusal(lambda: generate(model, prompt(60)[0], cache, **options))
        assert told.startswith("NotImplementedError: QAdACache cannot return attention weights")
    else:
        wanted = generate(model, prompt(60)[0], dynamic(model), **options)
        assert_same(model, generate(model, prompt(60)[0], cache, **options), wanted, cache)
        assert len(wanted.attentions) == TOKENS
