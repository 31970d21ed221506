"""The reference layer, against itself split differently and against torch's own attention."""

import copy
from typing import Any

import pytest
import torch
from drawn import random
from reference import rows_from_padding
from reference_layer import ReferenceLayer
from rounding import error_budget, naive_attention
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

SMALL = {"sink_tokens": 1, "local_tokens": 3}  # one sink, a window of two


def inputs(tokens: int, batch: int = 2, query_heads: int = 4, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and queries for `ReferenceLayer.update`: two key-value heads, d = 3, dv = 5."""
    return (
        random(batch, 2, tokens, 3, seed=seed),
        random(batch, 2, tokens, 5, seed=seed + 1),
        random(batch, query_heads, tokens, 3, seed=seed + 2),
    )


def part(tensors: tuple[Tensor, ...], tokens: slice) -> tuple[Tensor, ...]:
    return tuple(tensor[:, :, tokens] for tensor in tensors)


def small_layer(**options: Any) -> ReferenceLayer:
    return ReferenceLayer(scaling=0.7, **SMALL, **options)


def dense(keys: Tensor, values: Tensor, queries: Tensor) -> Tensor:
    return scaled_dot_product_attention(
        queries.double(), keys.double(), values.double(), is_causal=True, scale=0.7, enable_gqa=True
    )


def test_frozen_moments_ignore_what_leaves_the_window_later() -> None:
    """Scores are the keys: the prompt's bulk (token 1) scores -9, the later bulk (tokens 2, 3) scores 9."""
    keys = torch.tensor([0.0, -9.0, 9.0, 9.0, 0.0, 0.0])[None, None, :, None]
    for update_moments, expected in [(True, False), (False, True)]:
        layer = ReferenceLayer(scaling=1.0, update_moments=update_moments, **SMALL)
        layer.update(keys[:, :, :4], keys[:, :, :4], torch.ones(1, 1, 4, 1))
        _, local, _ = layer.update(keys[:, :, 4:], keys[:, :, 4:], torch.ones(1, 1, 2, 1))
        assert local[0, 0, 1] == expected


def test_has_bulk_begins_with_the_token_after_the_local_ones() -> None:
    tensors = inputs(5)
    layer = small_layer(criterion="dense")
    assert layer.update(*part(tensors, slice(0, 2)))[2].tolist() == [[False, False]] * 2
    _, local, has_bulk = layer.update(*part(tensors, slice(2, 4)))
    assert has_bulk.tolist() == [[False, True]] * 2
    assert layer.bulk_counts == [1, 1]
    assert torch.equal(local, ~has_bulk[:, None].expand(local.shape))


def test_all_local_or_all_dense_equals_torch() -> None:
    tensors = inputs(12)
    expected = dense(*tensors)
    wide = ReferenceLayer(scaling=0.7, sink_tokens=2, local_tokens=20)  # never a bulk
    narrow = small_layer(threshold=1.0)
    for layer in (wide, narrow):
        outputs, local, has_bulk = layer.update(*part(tensors, slice(0, 5)))
        torch.testing.assert_close(outputs, expected[:, :, :5])
        assert not local.any()  # exact: nothing is decided
        outputs, local, has_bulk = layer.update(*part(tensors, slice(5, 7)))
        torch.testing.assert_close(outputs, expected[:, :, 5:7])
        assert local.all() == (layer is wide)
        assert has_bulk.all() == (layer is narrow)
        assert local.any() == (layer is wide)
        outputs, _, _ = layer.update(*part(tensors, slice(7, 12)))
        torch.testing.assert_close(outputs, expected[:, :, 7:])


def test_threshold_zero_equals_sinks_and_window() -> None:
    tensors = inputs(8)
    layer = small_layer(threshold=0.0)
    layer.update(*part(tensors, slice(0, 7)))
    outputs, local, has_bulk = layer.update(*part(tensors, slice(7, 8)))
    keys, values, queries = (tensor.double() for tensor in tensors)
    seen = torch.zeros(1, 8, dtype=torch.bool)
    seen[0, [0, 6, 7]] = True
    expected = scaled_dot_product_attention(queries[:, :, 7:], keys, values, attn_mask=seen, scale=0.7, enable_gqa=True)
    torch.testing.assert_close(outputs, expected)
    assert local.all()
    assert has_bulk.all()


@pytest.mark.parametrize("criterion", ["gaussian", "oracle"])
def test_split_equals_whole(criterion: str) -> None:
    tensors = inputs(14)
    pairs, single = small_layer(criterion=criterion), small_layer(criterion=criterion)
    for layer in (pairs, single):
        layer.update(*part(tensors, slice(0, 6)))
    flags = []
    for start in range(6, 14, 2):
        outputs, local, _ = pairs.update(*part(tensors, slice(start, start + 2)))
        for step in range(2):
            token = slice(start + step, start + step + 1)
            single_outputs, single_local, _ = single.update(*part(tensors, token))
            torch.testing.assert_close(outputs[:, :, step : step + 1], single_outputs)
            assert torch.equal(local[:, :, step : step + 1], single_local)
        flags.append(local)
    assert torch.cat(flags).any()
    assert not torch.cat(flags).all()


@pytest.mark.parametrize("update_moments", [True, False])
def test_padding_equals_row_alone(update_moments: bool) -> None:
    """Row 0 has three pads on the left and one in the middle of its second turn; row 1 has none."""
    tensors = inputs(11)
    valid = torch.ones(2, 11, dtype=torch.bool)
    valid[0, [0, 1, 2, 9]] = False
    turns = [slice(0, 8), slice(8, 10), slice(10, 11)]
    together = small_layer(update_moments=update_moments)
    answers = [together.update(*part(tensors, turn), valid[:, turn]) for turn in turns]
    for row in range(2):
        alone = small_layer(update_moments=update_moments)
        for turn, (outputs, local, has_bulk) in zip(turns, answers, strict=True):
            kept = valid[row, turn]
            real = tuple(tensor[row : row + 1, :, turn][:, :, kept] for tensor in tensors)
            alone_outputs, alone_local, alone_bulk = alone.update(*real)
            torch.testing.assert_close(outputs[row][:, kept], alone_outputs[0])
            assert torch.equal(local[row][:, kept], alone_local[0])
            assert torch.equal(has_bulk[row, kept], alone_bulk[0])
            assert not outputs[row][:, ~kept].any()
            assert not has_bulk[row, ~kept].any()
        assert alone.frozen_counts[0] == together.frozen_counts[row] == [2, 5][row]
    assert together.length == 11
    assert together.lengths == [7, 11]
    for row, tensor in enumerate(rows_from_padding(tensor=tensors[0], valid=valid)):
        assert torch.equal(together.keys[row], tensor)


def test_exact_rule_and_frozen_counts() -> None:
    layer = small_layer(update_moments=False, criterion="local")
    tensors = inputs(20)
    assert not layer.update(*part(tensors, slice(0, 6)))[1].any()
    assert layer.frozen_counts == [3, 3]
    assert layer.update(*part(tensors, slice(6, 8)))[1].all()
    assert layer.frozen_counts == [3, 3]
    assert not layer.update(*part(tensors, slice(8, 11)))[1].any()
    assert layer.frozen_counts == [8, 8]
    layer.crop(4)
    assert layer.length == 7
    assert layer.frozen_counts == [4, 4] == layer.bulk_counts
    layer.update(*part(tensors, slice(7, 8)))
    assert layer.frozen_counts == [4, 4]
    assert layer.bulk_counts == [5, 5]
    torch.testing.assert_close(layer.moments(0, count=4)[0], tensors[0][0, :, 1:5].double().mean(dim=1))
    layer.crop(8)
    assert not layer.update(*part(tensors, slice(0, 2)))[1].any()  # empty again, hence exact


def test_crop_counts_padding_and_undoes_an_update() -> None:
    tensors = inputs(10)
    valid = torch.ones(2, 10, dtype=torch.bool)
    valid[0, [0, 6, 7]] = False
    layer = small_layer()
    layer.update(*part(tensors, slice(0, 8)), valid[:, :8])
    before = copy.deepcopy(layer)
    layer.update(*part(tensors, slice(8, 10)), valid[:, 8:])
    assert layer.lengths == [7, 10]
    assert before.lengths == [5, 8]
    layer.crop(0)
    layer.crop(2)
    assert layer.history == before.history
    for row in range(2):
        assert torch.equal(layer.keys[row], before.keys[row])
        assert torch.equal(layer.values[row], before.values[row])
    layer.crop(3)  # positions 5, 6, 7: one real token of row 0, three of row 1
    assert layer.length == 5
    assert layer.lengths == [4, 5]
    with pytest.raises(ValueError, match="crop"):
        layer.crop(6)


def test_moments_are_those_of_the_bulk() -> None:
    tensors = inputs(8)
    layer = small_layer()
    layer.update(*tensors)
    mean, covariance = layer.moments(1)
    bulk = tensors[0][1, :, 1:6].double()  # the sink is token 0, the window tokens 6 and 7
    torch.testing.assert_close(mean, bulk.mean(dim=1))
    for head in range(2):
        torch.testing.assert_close(covariance[head], torch.cov(bulk[head].T, correction=0))
    layer.crop(5)
    assert not any(moment.any() for moment in layer.moments(1))


def test_reorder_repeat_select_reset() -> None:
    layer = small_layer()
    tensors = inputs(6, batch=3)
    valid = torch.tensor([[0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]], dtype=torch.bool)
    layer.update(*tensors, valid)
    layer.reorder(torch.tensor([2, 0, 0]))
    assert layer.lengths == [6, 4, 4]
    assert torch.equal(layer.keys[1], tensors[0][0, :, 2:].double())
    layer.select_rows(torch.tensor([True, False, True]))
    layer.repeat(2)
    assert layer.lengths == [6, 6, 4, 4]
    assert layer.length == 6
    assert layer.frozen_counts == [3, 3, 1, 1]
    layer.update(*inputs(1, batch=4, seed=9))
    assert layer.lengths == [7, 7, 5, 5]
    assert torch.equal(layer.keys[0][:, :6], layer.keys[1][:, :6])
    assert not torch.equal(layer.keys[0], layer.keys[1])  # copies diverge
    layer.reset()
    assert layer.length == 0
    assert layer.lengths == []


def test_naive_attention_and_budget() -> None:
    tensors = inputs(9)
    layer = small_layer()
    valid = torch.ones(2, 2, dtype=torch.bool)
    valid[0, 0] = False
    layer.update(*part(tensors, slice(0, 7)))
    outputs, local, _ = layer.update(*part(tensors, slice(7, 9)), valid)
    queries = tensors[2][:, :, 7:]
    torch.testing.assert_close(layer.naive_outputs(queries, local, torch.float64, valid), outputs)
    errors, deviations = [], layer.deviations(queries, local, valid)
    assert (deviations > 0).all(dim=(1, 3)).tolist() == valid.tolist()
    for dtype in (torch.float32, torch.bfloat16):
        lowp = layer.naive_outputs(queries, local, dtype, valid)
        budget = error_budget(reference64=outputs, lowp=lowp, deviations=deviations)
        assert 0 < (lowp.double() - outputs).abs().max() < budget
        errors.append(budget)
    assert errors[0] < 1e-5 < errors[1] < 0.2
    assert error_budget(reference64=outputs, lowp=outputs, deviations=deviations) < 1e-13
    assert error_budget(reference64=outputs, lowp=outputs, deviations=torch.zeros(())) > 0
    nothing = torch.zeros(1, 1, 9, 9, dtype=torch.bool)
    keys, values, queries = tensors
    blind = naive_attention(query=queries, keys=keys, values=values, scaling=0.7, mask=nothing, dtype=torch.float32)
    assert not blind.any()
    causal = torch.ones(9, 9, dtype=torch.bool).tril()[None, None]
    found = naive_attention(query=queries, keys=keys, values=values, scaling=0.7, mask=causal, dtype=torch.float64)
    torch.testing.assert_close(found, dense(*tensors))
