"""Other methods, to compare with: what they keep, against slow formulas in float64, and what follows of it.

Others' code was asked once for the same, and is not needed here. On the models of these tests, kvpress 0.5.5 (under
transformers 5.2) kept the very tokens of a text of 300 that are kept here, by all four methods, 76 and 128 of them and,
but for SnapKV, whose window is larger, 34 and 48; and on SmolLM2, of 1,199 tokens of prose, the same 236 in each of 30
layers. On normal values, optimum-quanto 0.2.7 gave 4 and 2 bits as they are given here.
"""

from __future__ import annotations

import copy
import math
from argparse import Namespace

import pytest
import torch
from models import prompt, tiny
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

pytest.importorskip("lm_eval", reason="trials take documents from lm-eval")
import needle

from eval import trials
from eval.shared import peers
from eval.shared.deciding import SPARE
from eval.shared.peers import AHEAD, METHODS, Prefilled, choose_kept
from eval.shared.texts import Document
from eval.shared.ways import Way, list_peer_ways
from qada_cache.versions import pass_cache

TOKENS, NEAR = 300, 20


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """Biases of Qwen2's projections are zero in a model that was not trained, and large in one that was."""
    made = tiny(request.param)
    generator = torch.Generator().manual_seed(7)
    for name, weights in made.named_parameters():
        if name.endswith("proj.bias"):
            weights.data = torch.randn(weights.shape, generator=generator)
    return made


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return prompt(TOKENS + 12)[0]


@pytest.fixture(scope="module")
def state(model: PreTrainedModel, ids: Tensor) -> Prefilled:
    return Prefilled(model, ids[:, :TOKENS], NEAR)


class Slow:
    """One layer's projections of a prompt in float64, by hand: no rotary function, hook or cache of anybody's."""

    def __init__(self, model: PreTrainedModel, ids: Tensor, layer: int) -> None:
        with torch.no_grad():
            states = model(ids, output_hidden_states=True).hidden_states[layer]
            block = model.model.layers[layer]
            states = block.input_layernorm(states).double()
        part, heads = block.self_attn, (4, 2, 2)
        self.flat, keys, self.values = (
            copy.deepcopy(linear).double()(states).view(TOKENS, count, 8).transpose(0, 1).detach()
            for linear, count in zip((part.q_proj, part.k_proj, part.v_proj), heads, strict=True)
        )
        base = model.config.rope_parameters["rope_theta"]
        self.frequencies = [base ** (-pair / 4) for pair in range(4)]
        self.queries, self.keys = self.flat.clone(), keys.clone()
        for place in range(TOKENS):
            turn = self.rotation(place)
            self.queries[:, place] = self.flat[:, place] @ turn.T
            self.keys[:, place] = keys[:, place] @ turn.T

    def rotation(self, place: int) -> Tensor:
        """`[8, 8]`: channel `i` and channel `i + 4` turn together."""
        made = torch.zeros(8, 8, dtype=torch.float64)
        for pair, frequency in enumerate(self.frequencies):
            cos, sin = math.cos(place * frequency), math.sin(place * frequency)
            made[pair, pair] = made[pair + 4, pair + 4] = cos
            made[pair, pair + 4], made[pair + 4, pair] = -sin, sin
        return made

    def weights(self, head: int, place: int) -> Tensor:
        """Attention `[tokens]` of one query, `nan` of what comes after it."""
        scores = self.keys[head // 2, : place + 1] @ self.queries[head, place] / math.sqrt(8)
        made = torch.full((TOKENS,), torch.nan, dtype=torch.float64)
        made[: place + 1] = scores.softmax(0)
        return made

    def snapkv(self, kv_head: int) -> Tensor:
        votes = sum(
            self.weights(head, place)[: TOKENS - 64] / 128
            for head in (2 * kv_head, 2 * kv_head + 1)
            for place in range(TOKENS - 64, TOKENS)
        )
        beyond = torch.zeros(2, dtype=torch.float64)
        around = torch.cat([beyond, votes, beyond])
        pooled = torch.stack([around[place : place + 5].mean() for place in range(TOKENS - 64)])
        return torch.cat([pooled, torch.full((64,), torch.inf).double()])

    def tova(self, kv_head: int) -> Tensor:
        found = sum(self.weights(head, TOKENS - 1) / 4 for head in range(4))
        found[-1] = torch.inf
        return found

    def expected_attention(self, kv_head: int) -> Tensor:
        later = sum(self.rotation(place) for place in range(TOKENS, TOKENS + AHEAD)) / AHEAD
        scores = torch.zeros(TOKENS - 4, dtype=torch.float64)
        for head in (2 * kv_head, 2 * kv_head + 1):
            flat = self.flat[head, 4:]
            mean, covariance = later @ flat.mean(0), later @ torch.cov(flat.T, correction=0) @ later.T
            each = [key @ mean / math.sqrt(8) + key @ covariance @ key / 16 for key in self.keys[kv_head, 4:]]
            scores += torch.stack(each).softmax(0) / 2
        norms = self.values[kv_head, 4:].square().sum(1).sqrt()
        return torch.cat([torch.full((4,), torch.inf).double(), scores * norms])

    def keydiff(self, kv_head: int) -> Tensor:
        keys = self.keys[kv_head]
        unit = keys / keys.square().sum(1, keepdim=True).sqrt()
        anchor = unit.mean(0)
        return -(unit @ anchor) / anchor.square().sum().sqrt()


@pytest.mark.parametrize("method", METHODS)
def test_kept_tokens_against_float64(method: str, model: PreTrainedModel, state: Prefilled, ids: Tensor) -> None:
    """Kept tokens are those of the greatest scores in float64, in both layers at every count. So each count's tokens
    are among the next one's."""
    for layer in range(2):
        slow = Slow(model, ids[:, :TOKENS], layer)
        stored = state.cache.layers[layer]
        torch.testing.assert_close(stored.keys[0].double(), slow.keys, atol=1e-4, rtol=1e-4)
        for kv_head in range(2):
            scores = getattr(slow, METHODS[method].__name__)(kv_head)
            for count in (70, 100, 200):
                got = choose_kept(method, layer, state.queries, stored.keys, stored.values, count)[0, kv_head]
                wanted = scores.topk(count).indices.sort().values
                assert got.tolist() == wanted.tolist()


@pytest.mark.parametrize(
    ("method", "always"),
    [("SnapKV", range(TOKENS - 64, TOKENS)), ("ExpectedAttention", range(4)), ("TOVA", [TOKENS - 1])],
)
def test_sinks_and_window_are_the_method_s(method: str, always: list[int], state: Prefilled) -> None:
    """Whatever the scores say, and no more than that: told by one key that all heads look at."""
    stored = state.cache.layers[0]
    for count, wanted in ((len(always), set(always)), (len(always) + 5, {*always, 99})):
        loud = stored.keys.clone()
        loud[:, :, 99] = 40 * (state.queries.last[0].unflatten(1, (2, 2)).mean(dim=(2, 3)))
        loud[:, :, 99] += 40 * state.queries.mean[0].unflatten(1, (2, 2)).mean(dim=2)
        found = choose_kept(method, 0, state.queries, loud, stored.values, count)
        assert all(wanted <= set(places) for places in found[0].tolist())


def test_keydiff_keeps_what_differs_and_nothing_else(state: Prefilled) -> None:
    alike = torch.ones_like(state.cache.layers[0].keys)
    alike[:, :, [7, 150]] *= -2.0
    assert choose_kept("KeyDiff", 0, state.queries, alike, alike, 2).tolist() == [[[7, 150], [7, 150]]]


ALL = [*(Way("evicted", read=f"{method}, 1.0") for method in METHODS), Way("quantized", read="16 bits")]


@pytest.mark.parametrize("way", ALL, ids=lambda way: way.read)
@pytest.mark.parametrize("question", [1, 9])
def test_all_is_full_attention(way: Way, question: int, model: PreTrainedModel, ids: Tensor) -> None:
    """A peer that keeps all tokens equals full attention, in both protocols. The tokens read last have the positions
    that they have in the whole text."""
    document = Document("task", TOKENS, 0, ids[:, : TOKENS + 1], ids[:, TOKENS + 1 :], "", question)
    state = Prefilled(model, document.text, NEAR)
    assert state.tokens == TOKENS + 1 - question
    with torch.no_grad():
        wanted = model(ids[:, :-1]).logits[0, TOKENS:].log_softmax(dim=-1)
        said = model.generate(document.prompt, max_new_tokens=document.answer.shape[1] + SPARE, do_sample=False)
    found = state.follow(document, way)
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-3 if way.criterion == "quantized" else 1e-4)
    assert torch.equal(state.generate(document, way), said[:, TOKENS + 1 :])
    assert state.cache.get_seq_length() == state.tokens  # what is done to copies is not done to it


def test_what_follows_attends_to_what_was_kept(model: PreTrainedModel, ids: Tensor, state: Prefilled) -> None:
    """Full attention to the whole text, of which the other tokens are masked, head by head."""
    way = Way("evicted", read="ExpectedAttention, 0.1")
    cache = state.make_cache(way)
    hidden = []
    for layer, stored in enumerate(state.cache.layers):
        assert cache.layers[layer].keys.shape[2] == state.count(0.1) == NEAR + 28
        places = choose_kept("ExpectedAttention", layer, state.queries, stored.keys, stored.values, state.count(0.1))
        mask = torch.full((1, 2, TOKENS), -torch.inf).scatter_(2, places, 0.0)
        hidden.append(mask.repeat_interleave(2, dim=1).unsqueeze(2))

    def masked(module, query, key, value, attention_mask, **kwargs):  # type: ignore[no-untyped-def]
        scores = query @ key.repeat_interleave(2, dim=1).mT * 8**-0.5
        scores[..., :TOKENS] += hidden[module.layer_idx]
        scores[..., TOKENS:] += torch.full((12, 12), -torch.inf).triu(diagonal=1)
        return (scores.softmax(dim=-1) @ value.repeat_interleave(2, dim=1)).transpose(1, 2), None

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", masked)
        wanted = model(ids[:, TOKENS:], **pass_cache(copy.deepcopy(state.cache))).logits[0].log_softmax(dim=-1)
    torch.testing.assert_close(state.feed(cache, ids[:, TOKENS:]), wanted, rtol=0, atol=1e-4)
    cache = state.make_cache(way)
    one_by_one = [state.feed(cache, part, past) for past, part in enumerate(ids[:, TOKENS:].split(1, dim=1))]
    torch.testing.assert_close(torch.cat(one_by_one), wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("dim", "size"), [(64, 64), (128, 64), (80, 80)])
def test_quantizer(dim: int, size: int) -> None:
    """Every group's values are among its own 2^bits, evenly spaced from its least to its greatest, and the nearest."""
    values = torch.randn(1, 2, 5, dim, generator=torch.Generator().manual_seed(3)) * 3 + 1
    for bits in (2, 4):
        found = peers.quantize(values, bits).view(-1, size)
        for group, got in zip(values.view(-1, size).double(), found, strict=True):
            levels = torch.linspace(0, 1, 2**bits).double() * (group.max() - group.min()) + group.min()
            nearest = levels[(group[:, None] - levels).abs().argmin(dim=1)]
            torch.testing.assert_close(got.double(), nearest, rtol=0, atol=1e-5)
    constant = torch.full((1, 1, 3, dim), 2.5)
    assert torch.equal(peers.quantize(constant, 4), constant)


def test_bytes(state: Prefilled) -> None:
    assert peers.find_share(4, 64) == (4 * 64 + 2 * 16) / (16 * 64) == 0.28125
    assert peers.find_share(2, 128) == (2 * 64 + 2 * 16) / (16 * 64)
    assert peers.find_share(4, 80) == (4 * 80 + 2 * 16) / (16 * 80)
    assert state.count_bytes_read(Way("quantized", read="4 bits")) == peers.find_share(4, 8)
    assert state.count_bytes_read(Way("evicted", read="TOVA, 0.05")) == 14 / 280
    assert state.count_bytes_read(Way("evicted", read="TOVA, 1.0")) == 1
    assert state.count(0.051) == NEAR + 15


def test_rows(ids: Tensor) -> None:
    """One of each way in a table; more of the bulk is nearer to full attention, and costs what it says."""
    model, tokenizer = tiny(), needle.load_tokenizer()
    document = Document("prose", TOKENS, 0, ids[:, :TOKENS], ids[:, TOKENS:])
    ways = [*list_peer_ways(), Way("evicted", read="SnapKV, 1.0"), Way("local")]
    rows = list(trials.run_trial(model, tokenizer, document, ways, {}, tqdm(disable=True)))
    by = {row["read"]: row for row in rows}
    assert len(by) == len(ways) == 16
    assert float(by["SnapKV, 1.0"]["kl"]) == pytest.approx(0, abs=1e-5)
    assert float(by["4 bits"]["kl"]) < float(by["2 bits"]["kl"])
    bulk = TOKENS - 1 - 128
    for method in METHODS:
        assert [by[f"{method}, {share}"]["bytes_read"] for share in (0.05, 0.1, 0.2)] == [
            f"{math.ceil(share * bulk) / bulk:.4f}" for share in (0.05, 0.1, 0.2)
        ]
    assert by["4 bits"]["bytes_read"] == f"{peers.find_share(4, 8):.4f}"


@pytest.mark.parametrize("others", [{}, {"few": True}, {"tokens": True}, {"tokens": True, "few": True}])
def test_the_command_adds_them_to_what_is_asked_for(others: dict[str, bool]) -> None:
    flags = {"few": False, "tokens": False, "own": False, "bits": [16], "prefill": [], "latents": False} | others
    without, found = (trials.choose_ways(Namespace(**flags, peers=peers)) for peers in (False, True))
    assert not set(without) & set(list_peer_ways())
    assert found == [*(without if others else []), *list_peer_ways()]


def test_other_models_are_refused(ids: Tensor) -> None:
    with pytest.raises(NotImplementedError, match="llama, qwen2, not gemma3"):
        Prefilled(tiny("gemma3"), ids, NEAR)
