"""Calls that a layer refuses, and its state after errors."""

from unittest.mock import Mock

import pytest
import torch
from harness import SINKS, Inputs
from pair import Pair

from qada_cache import storage


def test_memory_that_runs_out_in_the_first_call_leaves_an_empty_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, inputs = Pair(), Inputs()
    tensors = inputs(60)
    with monkeypatch.context() as patch:
        patch.setattr(storage, "RunningMoments", Mock(side_effect=torch.OutOfMemoryError))
        with pytest.raises(torch.OutOfMemoryError):
            pair.driver(*tensors, None, scaling=0.25)
    assert pair.layer.store is None
    pair.update(*inputs(60))
    pair.update(*inputs(1))


def test_crop_and_batch_errors() -> None:
    pair, inputs = Pair(), Inputs()
    pair.update(*inputs(20))
    with pytest.raises(ValueError, match="negative"):
        pair.layer.crop(3)
    with pytest.raises(RuntimeError, match="2 rows and was given 3"):
        pair.driver(*inputs(1, 3), None, scaling=0.25)
    with pytest.raises(RuntimeError, match="no_grad"):
        pair.layer.update(torch.zeros(2, 2, 1, 16, requires_grad=True), torch.zeros(2, 2, 1, 16))
    pair.crop(SINKS)
    pair.update(*inputs(1))
    pair.layer.update(*inputs(1)[:2])  # and never handed to the attention function
    for verb in (lambda: pair.layer.crop(-1), lambda: pair.layer.reorder_cache(torch.tensor([1, 0]))):
        with pytest.raises(RuntimeError, match="did not come back"):
            verb()
    pair.reset()
    pair.update(*inputs(20))


def test_a_crop_by_a_tensor_counts_in_plain_numbers() -> None:
    """As transformers 5.17 crops in assisted decoding."""
    pair, inputs = Pair(), Inputs()
    pair.update(*inputs(60))
    pair.layer.crop(torch.tensor(-5))
    assert pair.layer.store is not None
    assert {type(count) for count in (pair.layer.seen, *pair.layer.store.lengths)} == {int}
