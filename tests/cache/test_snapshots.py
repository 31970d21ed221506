"""Sliding and linear layers go back to a snapshot, where they cannot be cropped."""

from __future__ import annotations

import copy

import pytest
import torch
from devices import KIND, DeviceTensor, devices
from models import dynamic, exact, forced, generate, logits_of, prompt, tiny
from operations import Operations
from transformers import NemotronHConfig, NemotronHForCausalLM

from eval.families import build
from qada_cache import QAdACache
from qada_cache.attention.pieces import compute_in_pieces
from qada_cache.state import snapshots
from qada_cache.state.snapshots import Snapshot, Snapshots
from qada_cache.versions import pass_cache

TEXT = prompt(400)[0]
HYBRIDS = ("gemma3", "qwen3_next", "gpt_oss")


def keeping(family: str, every: int = 40) -> tuple[torch.nn.Module, QAdACache]:
    model = tiny(family)
    cache = exact(model)
    cache.keep_snapshots(every)
    return model, cache


def held(cache: QAdACache) -> list[int]:
    return [snapshot.tokens for snapshot in cache._shared.snapshots.kept]


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_text_goes_on_from_a_snapshot(family: str) -> None:
    """As if the rest had never been seen; `generate` leaves snapshots within a long prompt and at its end."""
    model, cache = keeping(family)
    first = generate(model, TEXT, cache, tokens=6)
    whole = generate(model, TEXT, exact(model), tokens=6)
    assert torch.equal(first.sequences, whole.sequences)
    assert (logits_of(first) - logits_of(whole)).abs().max() < 1e-3 * logits_of(whole).abs().max()
    there = held(cache)
    assert there[-1] == 400
    assert there[-2] == 360
    assert there[0] >= 40
    for tokens in (*there[::-2], 0):
        twin = copy.deepcopy(cache)
        assert twin.find_last_beginning(tokens + 1) == twin.find_last_beginning(tokens) == tokens
        if not tokens:
            break
        twin.crop(tokens - 405)
        assert held(twin)[-1] == tokens
        rest = torch.cat([TEXT[:, :tokens], prompt(30, seed=3)[0]], dim=1)
        got, wanted = generate(model, rest, twin, tokens=6), generate(model, rest, exact(model), tokens=6)
        assert torch.equal(got.sequences, wanted.sequences)
        assert (logits_of(got) - logits_of(wanted)).abs().max() < 1e-3 * logits_of(wanted).abs().max()
    assert held(cache) == there  # copies share no state that is written to
    cache.crop(-45)
    assert torch.equal(generate(model, TEXT, cache, tokens=6).sequences, whole.sequences)


@torch.no_grad()
@pytest.mark.parametrize("model_type", ["qwen3_5_text", "olmo_hybrid"])
def test_a_decoded_token_is_in_no_snapshot(model_type: str) -> None:
    """In transformers 5.17 the first layer of these models writes a state before it calls the cache."""
    model, text = build(model_type)[0], TEXT % 90 + 5
    cache, plain = exact(model), dynamic(model)
    cache.keep_snapshots()
    forced(model, text[:, :202], [200, 1], cache)
    cache.crop(-2)
    forced(model, text[:, :200], [200], plain)
    got, wanted = (forced(model, text[:, 300:310], [10], used) for used in (cache, plain))
    assert (got - wanted).abs().max() < 1e-3 * wanted.abs().max()


@pytest.mark.parametrize("family", ["gemma3", "qwen3_next"])
def test_other_lengths_are_refused_as_before(family: str) -> None:
    model, cache = keeping(family)
    generate(model, TEXT, cache, tokens=2)
    with pytest.raises((RuntimeError, ValueError)):
        cache.crop(-20)
    assert cache.find_last_beginning(401) == 401


def test_snapshots_closer_than_a_pass_that_leaves_one() -> None:
    """They are as close as such passes are."""
    model, cache = keeping("gemma3", every=5)
    generate(model, TEXT, cache, tokens=2)
    assert held(cache)[-3:] == [336, 368, 400]


def test_layers_that_hold_all_tokens_go_back_to_any_length() -> None:
    model = tiny("gemma3", sliding_window=200)
    cache = exact(model)
    forced(model, TEXT[:, :199], [199], cache)
    assert cache.find_last_beginning(77) == 77
    forced(model, TEXT[:, 199:200], [1], cache)
    assert cache.find_last_beginning(77) == 0
    parts = {"layers_block_type": ["attention", "mlp"] * 2, "num_hidden_layers": 4, "use_mamba_kernels": False}
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "head_dim": 8}
    config = NemotronHConfig(num_key_value_heads=2, **sizes, **parts)
    model = NemotronHForCausalLM(config).eval()  # whose feed-forward layers hold nothing
    cache = exact(model)
    forced(model, TEXT[:, :150], [150], cache)
    assert cache.find_last_beginning(77) == 77
    cache.crop(-73)
    assert cache.get_seq_length() == 77


def test_nothing_is_kept_where_nothing_is_to_be() -> None:
    for family in ("llama", "mistral_sliding"):
        model = tiny(family)
        cache = exact(model)
        cache.keep_snapshots()
        generate(model, TEXT, cache, tokens=2)
        assert cache._shared.snapshots is None
        assert family != "llama" or cache.take_snapshots() == []
    model, cache = keeping("gemma3")
    generate(model, TEXT, cache, tokens=2)
    cache.reorder_cache(torch.tensor([0]))
    assert held(cache) == []
    cache.reset()
    assert cache.take_snapshots() == []


def test_snapshots_are_few() -> None:
    """Near the end at most `every` apart, and no more than a quarter of the way that is left to read farther away."""
    kept = Snapshots(512)
    ends = [0]
    for size in kept.plan(100_000, least=113):
        kept.begin_pass([], ends[-1] + size)
        ends.append(ends[-1] + size)
    there = [snapshot.tokens for snapshot in kept.kept]
    assert there == ends[1:]
    assert len(there) < 25
    for before, after in zip([0, *there], there, strict=False):
        assert after - before <= max(512, (100_000 - after) / 4 + 1) or before == 0
    for tokens in range(100_100, 140_000, 100):
        kept.begin_pass([], tokens)
    there = [snapshot.tokens for snapshot in kept.kept]
    assert len(there) < 60
    assert max(after - before for before, after in zip(there[-4:], there[-3:], strict=False)) <= 512
    assert kept.plan(600, least=113) == [600]


def test_tokens_of_several_windows_are_held_once() -> None:
    """Snapshots whose windows overlap go back to the states of a cache that has read no more."""
    model = tiny("gemma3", sliding_window=100)
    cache = exact(model)
    cache.keep_snapshots(40)
    generate(model, TEXT[:, :390], cache, tokens=2)
    layer, snapshots = cache.layers[0], cache._shared.snapshots
    whole, besides = 2 * layer.keys[:, :, :1].nbytes * 390, 8 * len(held(cache))  # a number beside the tokens
    assert snapshots.nbytes <= whole + besides < len(held(cache)) * layer.keys.nbytes
    for snapshot in snapshots.kept:
        twin, plain = copy.deepcopy(cache), dynamic(model)
        forced(model, TEXT[:, : snapshot.tokens], [snapshot.tokens], plain)
        twin.crop(snapshot.tokens - 391)
        torch.testing.assert_close(twin.layers[0].keys, plain.layers[0].keys)
        torch.testing.assert_close(twin.layers[0].values, plain.layers[0].values)
        assert twin.layers[0].cumulative_length == snapshot.tokens
    edited = torch.cat([TEXT[:, :150], prompt(99, seed=4)[0]], dim=1)
    cache.crop(cache.find_last_beginning(150) - 391)
    generate(model, edited, cache, tokens=2)
    cache.crop(-1)  # to the snapshot after the prompt, which shares tokens with those before the edit
    plain = dynamic(model)
    forced(model, edited, [249], plain)
    torch.testing.assert_close(cache.layers[0].keys, plain.layers[0].keys)


def test_what_cannot_be_cut_is_one_pass() -> None:
    model, cache = keeping("gemma3")
    mask = torch.ones(1, 400, dtype=torch.bool).tril()[:, None].expand(1, 1, 400, 400).tril()
    with torch.no_grad():
        model(TEXT, attention_mask={"full_attention": mask, "sliding_attention": mask}, **pass_cache(cache))
    assert held(cache) == []
    asked = {"input_ids": TEXT, "output_hidden_states": True}
    assert compute_in_pieces(lambda **_: None, model.model, asked, [], held=0) is None
    with torch.no_grad():
        hidden, *_ = model.model(input_ids=TEXT, return_dict=False, **pass_cache(exact(model)))
        model, other = keeping("gemma3")
        kept, *_ = model.model(input_ids=TEXT, return_dict=False, **pass_cache(other))
    torch.testing.assert_close(kept, hidden)
    assert other.get_seq_length() == 400
    assert held(other) == []


def test_a_state_is_a_copy() -> None:
    model, cache = keeping("qwen3_next")
    forced(model, TEXT, [100, 1], cache)
    snapshot = Snapshot.take(cache.layers, 101)
    before = snapshot.layers[0]["recurrent_states"][0].clone()
    forced(model, TEXT[:, 101:], [100, 1], cache)
    assert torch.equal(snapshot.layers[0]["recurrent_states"][0], before)
    assert copy.deepcopy(snapshot) is snapshot


def test_a_state_is_copied_once() -> None:
    """Off its device, and back to it: there it is not cloned first. It has no more memory than its own."""
    state = torch.randn(2, 3, 8)
    with devices():
        there = state.to(f"{KIND}:0")[..., ::2].mT
        with Operations() as operations:
            here = snapshots._copy({"states": there}, {})
            back = snapshots._copy(here, {"states": there})
        assert [each._schema.name for each in operations.called] == ["aten::_to_copy"] * 2
        assert isinstance(back["states"], DeviceTensor)
        alone = snapshots._copy(here, {})
    for found in (here["states"], back["states"].here, alone["states"]):
        assert torch.equal(found, state[..., ::2].mT)
        assert found.is_contiguous()
    assert alone["states"].data_ptr() != here["states"].data_ptr()
