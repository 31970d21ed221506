"""One layer against the float64 reference: outputs, flags, moments, lengths and counters after every call."""

from typing import Any

import pytest
import torch
from harness import LOCAL, WINDOW, Driver, Inputs, make_shared, transformers_mask
from pair import Pair, stored_tokens
from scenarios import MIXED, SCENARIOS, left_padded, play, small_buffers
from torch import Tensor

from qada_cache import KeyMoments, StaticHeads
from qada_cache.key_moments.rotation import Rotation
from qada_cache.state.layer import QAdALayer
from qada_cache.storage.bulk import Bulk


def other_prompt(**fields: Any) -> KeyMoments:
    """Moments of as many random prompts as there are `lengths`, or of one whose keys turn with position."""
    made = [Inputs(seed=77 + index)(50, 1)[0][0] for index in range(len(fields.get("lengths", [0])))]
    covariance = torch.stack([torch.stack([torch.cov(head.T, correction=0) for head in keys]) for keys in made])
    mean = torch.stack([keys.mean(dim=1) for keys in made])
    fields = {"lengths": (), "tokens": 50, "model_type": "llama", "prompt": "test", **fields}
    return KeyMoments(mean[:, None], covariance[:, None], **fields)


POLICIES: dict[str, dict[str, Any]] = {
    "gaussian": {},
    "frozen": {"update_moments": False},
    "lengths": {"current_moments": False, "other_moments": other_prompt(lengths=(64, 128))},
    "rotated": {
        "current_moments": False,
        "other_moments": other_prompt(rotations=(Rotation(16, (0.9, 0.05, 0.002)),)),
    },
    "two-prompts": {"other_moments": other_prompt(lengths=(64, 128))},
    "two-prompts-frozen": {"other_moments": other_prompt(lengths=(64, 128)), "update_moments": False},
    "oracle": {"criterion": "oracle"},
    "dense": {"criterion": "dense"},
    "local": {"criterion": "local"},
    "static-heads": {"criterion": StaticHeads(torch.tensor([[True, False, False, True]]))},
    "static-kv-heads": {"criterion": StaticHeads(torch.tensor([[False, True]]))},
    "group-any": {"group_rule": "any"},
    "oracle-group-any": {"group_rule": "any", "criterion": "oracle"},
    "static-group-any": {"criterion": StaticHeads(torch.tensor([[True, False, False, False]])), "group_rule": "any"},
    "threshold-0": {"threshold": 0.0},
    "threshold-1": {"threshold": 1.0},
}
ONE_SIDED = {"dense", "local", "threshold-0", "threshold-1"}


def check_compared(pair: Pair) -> None:
    """Assert that both outcomes of decisions occurred, and that at most 1 % were too close to compare."""
    tally = pair.tally
    assert tally.local > 5
    assert tally.long_context > 5
    assert tally.skipped <= 0.01 * (tally.local + tally.long_context)


ESTIMATES = {"lengths", "rotated", "two-prompts", "two-prompts-frozen", "oracle"}
CASES = [
    (scenario, policy)
    for policy in POLICIES
    for scenario in (SCENARIOS if policy in ("gaussian", "frozen") else MIXED if policy in ESTIMATES else MIXED[1:3])
]


@pytest.mark.parametrize(("scenario", "policy"), CASES)
def test_equals_reference(scenario: str, policy: str) -> None:
    with small_buffers():
        pair = play(scenario, **POLICIES[policy])
    if policy in ONE_SIDED:
        assert pair.tally.local + pair.tally.long_context > 20
        assert 0 in (pair.tally.local, pair.tally.long_context)
    elif (scenario, policy) != ("from_the_first_token", "frozen"):  # never any moments: all long-context
        check_compared(pair)


@pytest.mark.parametrize("update_moments", [True, False])
@pytest.mark.parametrize("scenario", ["turns", "left_padding", "holes", "crops_with_padding", "rows"])
def test_with_buffers_as_shipped(scenario: str, update_moments: bool) -> None:
    """Room for 128 pending tokens: nothing leaves the device in these runs but by exact calls and crops."""
    check_compared(play(scenario, update_moments=update_moments))


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (8, 2), (8, 1)])
@pytest.mark.parametrize(("scenario", "value_dim"), [("turns", 16), ("left_padding", 24)])
def test_groups_and_value_dimension(scenario: str, heads: int, kv_heads: int, value_dim: int) -> None:
    with small_buffers():
        check_compared(play(scenario, heads=heads, kv_heads=kv_heads, value_dim=value_dim))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("scenario", "policy"), [("turns", "gaussian"), ("left_padding", "oracle"), ("crops", "gaussian")]
)
def test_half_precision(scenario: str, policy: str, dtype: torch.dtype) -> None:
    with small_buffers():
        check_compared(play(scenario, dtype=dtype, **POLICIES[policy]))


def test_sizes_of_the_paper() -> None:
    """16 sinks and 128 local tokens, decoding on until 128 pending tokens have left twice; then a short turn."""
    pair, inputs = Pair(sink_tokens=16, local_tokens=128, threshold=0.4), Inputs()
    pair.update(*inputs(300, 1))
    for tokens in (112, 113, 1, 112, 112, 60, *([1] * 140)):
        pair.update(*inputs(tokens, 1))
    assert pair.tally.exact == 2
    check_compared(pair)


def test_no_sinks_and_window_of_one() -> None:
    for sink_tokens, local_tokens in ((0, 1), (0, 6), (4, 5)):
        pair, inputs = Pair(sink_tokens=sink_tokens, local_tokens=local_tokens), Inputs()
        with small_buffers():
            for tokens in (20, 1, 1, 1, 4, 1, 3):
                pair.update(*inputs(tokens))
        pair.crop(4)
        pair.update(*inputs(1))


@pytest.mark.parametrize("form", ["two-dimensional", "additive"])
@pytest.mark.parametrize("scenario", ["left_padding", "holes"])
def test_forms_of_masks(scenario: str, form: str) -> None:
    """Masks of flash attention (2-D bool) and of eager attention (added to scores) have the effect of 4-D bool ones."""
    pair = Pair()
    lowest = torch.finfo(torch.float32).min
    pair.mask_form = {
        "two-dimensional": lambda mask: mask[:, 0, -1].clone(),
        "additive": lambda mask: torch.where(mask, 0.0, lowest),
    }[form]
    with small_buffers():
        SCENARIOS[scenario](pair, Inputs())
    check_compared(pair)


SPLITS = [[80], [1] * 80, [WINDOW] * 10, [40, *[1] * 40], [2, 9, 7, 30, 8, 1, 23], [79, 1], [11, 5, 64]]


@pytest.mark.parametrize("padded", [False, True])
def test_splits_do_not_matter(padded: bool) -> None:
    """The same tokens in any chunks: the same tokens stored, the same moments of the same tokens."""
    tensors = Inputs()(80)
    valid = left_padded([57, 80] if padded else [80, 80], 80)
    last = Inputs(1)(WINDOW + 1)  # an exact call: puts everything but the window into the bulk
    states = []
    for split in SPLITS:
        pair, start = Pair(), 0
        with small_buffers():
            for tokens in split:
                part = slice(start, start + tokens)
                pair.update(*(tensor[:, :, part] for tensor in tensors), valid[:, part])
                start += tokens
            pair.update(*last)
        states.append((stored_tokens(pair.layer.store), pair.layer.store.moments))
    tokens, moments = states[0]
    assert moments.count == [57 - LOCAL + 9, 80 - LOCAL + 9] if padded else [80 - LOCAL + 9] * 2
    for other_tokens, other_moments in states[1:]:
        torch.testing.assert_close(other_tokens, tokens, rtol=0, atol=0)
        assert other_moments.count == moments.count
        torch.testing.assert_close(other_moments.mean, moments.mean, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(other_moments.covariance, moments.covariance, rtol=1e-5, atol=1e-5)


def test_only_the_bulk_of_long_context_heads_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, inputs, read = Pair(), Inputs(), set()
    original = Bulk.read

    def spy(bulk: Bulk, rows: slice, heads: slice, start: int, stop: int, **how: bool) -> tuple[Tensor, Tensor]:
        assert (start, stop) == (0, bulk.lengths[rows.start])
        read.update((row, head) for row in range(rows.start, rows.stop) for head in range(heads.start, heads.stop))
        return original(bulk, rows, heads, start, stop, **how)

    pair.update(*inputs(60))
    monkeypatch.setattr(Bulk, "read", spy)
    counts, bytes_read = [], 0
    for _ in range(30):
        read.clear()
        local_groups = pair.layer.counters.record["local_groups"]
        pair.update(*inputs(1, 2))
        before = torch.zeros(2, dtype=torch.int64) if local_groups is None else local_groups
        assert 4 - len(read) == int((pair.layer.counters.record["local_groups"] - before).sum())
        bytes_read += sum((16 + 16) * 4 * pair.layer.store.bulk.lengths[row] for row, _ in read)
        counts.append(len(read))
    assert set(counts) > {1, 2}
    assert pair.layer.counters.bulk_read_bytes == bytes_read


def test_inference_mode_and_no_grad_mix() -> None:
    """Tensors made inside `torch.inference_mode()` can be used, and written to, outside."""
    pair, inputs = Pair(), Inputs()
    for turn, tokens in enumerate((30, 1, 1, 4, 20, WINDOW, 1, WINDOW, 1, 1, 12, 1)):
        with torch.inference_mode(turn % 2 == 0), small_buffers():
            pair.update(*inputs(tokens))
            if turn % 4 == 2:
                pair.layer.reorder_cache(torch.tensor([1, 0]))
                pair.reference.reorder(torch.tensor([1, 0]))
                pair.crop(1)


def wrong_masks() -> dict[str, Tensor]:
    """Masks for a turn of 4 tokens after 20, where row 0 began with 5 tokens of padding."""
    valid = left_padded([19, 24], 24)
    right = transformers_mask(valid, 4)
    hides, shows, moves = valid.clone(), valid.clone(), valid.clone()
    hides[1, 7], shows[0, 3] = False, True
    moves[0, 0], moves[0, 9] = True, False
    window, biased = right.clone(), torch.where(right, 0.0, -torch.inf)
    window[1, 0, 3, :10] = False
    window[1, 0, 2, :9] = False
    return {
        "hides a token that was real": transformers_mask(hides, 4),
        "shows padding": transformers_mask(shows, 4),
        "hides one and shows another": transformers_mask(moves, 4),
        "adds to a score": biased.masked_fill(right & (torch.arange(24) == 8), -0.5),
        "is a sliding window": window,
        "differs between heads": right.expand(2, 4, 4, 24),
        "is too short": right[..., 1:],
        "has too few queries": right[:, :, 1:],
        "has three dimensions": right[:, 0],
        "is 2-D and too short": valid[:, 4:],
        "is 2-D of another batch": torch.ones(3, 24, dtype=torch.bool),
    }


@pytest.mark.parametrize("wrong", wrong_masks())
def test_wrong_masks_are_refused_and_do_no_harm(wrong: str) -> None:
    pair, inputs = Pair(), Inputs()
    valid = left_padded([15, 20], 20)
    pair.update(*inputs(20), valid)
    with pytest.raises(ValueError, match="mask"):
        pair.driver(*inputs(4), wrong_masks()[wrong], scaling=0.25)
    pair.check_state()
    for tokens in (4, 1, 20, 1):
        pair.update(*inputs(tokens))


def test_a_mask_written_to_in_place_is_read_again() -> None:
    """For the next text, in another cache or in the same after a reset; in inference mode no version tells."""
    with torch.inference_mode():
        mask = torch.ones(2, 1, 20, 20, dtype=torch.bool).tril()
        driver = Driver(QAdALayer(make_shared(), 0))
        for padded, layer in ((3, driver.layer), (5, driver.layer), (7, QAdALayer(make_shared(), 0))):
            mask[0, 0, :, :padded] = False
            driver.layer = layer
            layer.reset()
            driver(*Inputs()(20), mask, scaling=0.25)
            assert layer.store.lengths == [20 - padded, 20]


def test_missing_mask_after_padding_is_refused() -> None:
    pair, inputs = Pair(), Inputs()
    pair.update(*inputs(20), left_padded([15, 20], 20))
    for tokens in (1, WINDOW, WINDOW + 1):
        with pytest.raises(ValueError, match="mask"):
            pair.driver(*inputs(tokens), None, scaling=0.25)
    pair.update(*inputs(1))


def test_old_mask_handed_in_again_is_refused() -> None:
    """The very same 2-D tensor as for the call before, which has one token more since."""
    pair, inputs = Pair(), Inputs()
    pair.update(*inputs(20), left_padded([15, 20], 20))
    mask = left_padded([16, 21], 21)
    pair.driver(*inputs(1), mask, scaling=0.25)
    with pytest.raises(ValueError, match="shape"):
        pair.driver(*inputs(1), mask, scaling=0.25)


def test_first_call_with_a_wrong_mask_leaves_an_empty_cache() -> None:
    driver, inputs = Driver(QAdALayer(make_shared(), 0)), Inputs()
    with pytest.raises(ValueError, match="shape"):
        driver(*inputs(20), torch.ones(2, 1, 20, 19, dtype=torch.bool), scaling=0.25)
    assert driver.layer.get_seq_length() == 0
    pair = Pair(layer=driver.layer, module=driver.module)
    pair.update(*inputs(20))
    pair.update(*inputs(1))
