"""Weights that are no plain tensors, as torchao, quanto and bitsandbytes make them: sampled, and told apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import SMALL, generate, logits_of, prompt, tiny
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from qada_cache import QAdACache, prepare
from qada_cache.key_moments.prompts import make_ids
from qada_cache.models import identity


class Wrapped(Tensor):
    """Int8 values and scales of rows behind the face of a float tensor, as torchao's `Int8Tensor`."""

    @staticmethod
    def __new__(cls, values: Tensor, scales: Tensor) -> Wrapped:
        return Tensor._make_wrapper_subclass(cls, values.shape, dtype=scales.dtype)

    def __init__(self, values: Tensor, scales: Tensor) -> None:
        self.values_, self.scales_ = values, scales

    @classmethod
    def of(cls, weight: Tensor) -> Wrapped:
        scales = weight.detach().abs().amax(-1, keepdim=True) / 127
        return cls((weight.detach() / scales).round().to(torch.int8), scales)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["values_", "scales_"], None

    def dequantised(self) -> Tensor:
        return self.values_ * self.scales_

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is nn.functional.linear:
            return nn.functional.linear(args[0], args[1].dequantised())
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket
        if name in (torch.ops.aten.detach, torch.ops.aten.clone):
            return cls(function(args[0].values_), function(args[0].scales_))
        if name is torch.ops.aten.embedding:
            return function(args[0].dequantised(), *args[1:])
        if name is torch.ops.aten.index:  # to both parts, as torchao's does: the scales have other places
            return cls(function(args[0].values_, args[1]), function(args[0].scales_, args[1]))
        raise NotImplementedError(f"unimplemented operator: {name}")


class Computing(Wrapped):
    """Becomes a plain tensor under any operator that it does not know, as quanto's `QTensor`."""

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket is torch.ops.aten.detach:
            return cls(args[0].values_.detach(), args[0].scales_.detach())
        plain = [arg.dequantised() if isinstance(arg, Wrapped) else arg for arg in args]
        return function(*plain, **(kwargs or {}))


class Closed(Wrapped):
    """Does not say what it consists of."""

    __tensor_flatten__ = property()  # hasattr says no


class Packed(nn.Parameter):
    """Bytes `[values, 1]` under a shape of their own, as bitsandbytes' `Params4bit`; rows are not a matrix' rows."""

    shape_before: torch.Size

    @classmethod
    def of(cls, weight: Tensor) -> Packed:
        bytes_ = (weight.detach() * 40).round().clamp(-127, 127).to(torch.int8).view(-1, 1)
        packed = Tensor._make_subclass(cls, bytes_, False)
        packed.shape_before = weight.shape
        return packed

    def dequantised(self) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.view(self.shape_before).float() / 40

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (nn.functional.linear, nn.functional.embedding):
            args = [arg.dequantised() if isinstance(arg, Packed) else arg for arg in args]
        elif function is Tensor.__getitem__:
            raise IndexError("not by places")
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


KINDS = {"torchao": Wrapped, "quanto": Computing, "bitsandbytes": Packed, "closed": Closed}


def quantised(kind: str, **options: Any) -> PreTrainedModel:
    """A tiny model whose matrices, embeddings included, are of this kind."""
    model = tiny(**options)
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            weight = KINDS[kind].of(module.weight)
            del module.weight
            module.register_parameter("weight", nn.Parameter(weight, False) if kind != "bitsandbytes" else weight)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_caches_of_quantised_models(kind: str, tmp_path: Path) -> None:
    """Built, prepared, used, saved and loaded; with the moments by name that the default asks for."""
    model = quantised(kind)
    prepare(model, **SMALL)
    ids = prompt(150)[0]
    wanted = generate(model, ids, DynamicCache(config=model.config))
    got = generate(model, ids, QAdACache(model, threshold=1.0, **SMALL))
    assert torch.equal(got.sequences, wanted.sequences)
    assert (logits_of(got) - logits_of(wanted)).abs().max() < 1e-4
    cache = QAdACache(model, **SMALL)
    generate(model, ids, cache)
    cache.save(tmp_path / "cache")
    assert QAdACache.load(tmp_path / "cache", model).get_seq_length() == cache.get_seq_length()


@pytest.mark.parametrize("kind", KINDS)
def test_quantised_checkpoints_are_told_apart(kind: str) -> None:
    """Quantised checkpoints are told apart by the values of their parts. If these cannot be read, layers' outputs for a
    few inputs tell."""
    sampled = identity.sample(quantised(kind))
    assert sampled == identity.sample(quantised(kind))
    assert not identity.is_same(sampled, identity.sample(quantised(kind, seed=1)))
    assert not identity.is_same(sampled, identity.sample(quantised(kind, hidden_size=64)))


@pytest.mark.parametrize("kind", ["torchao", "quanto", "bitsandbytes"])
def test_a_change_in_a_part_is_noticed(kind: str) -> None:
    model = quantised(kind)
    before = identity.sample(model)
    weight = model.lm_head.weight
    with torch.no_grad():
        (weight.view(-1) if kind == "bitsandbytes" else weight.values_).add_(1)
    assert not identity.is_same(identity.sample(model), before)


@pytest.mark.parametrize("kind", KINDS)
def test_ordinary_tokens_are_those_of_the_embeddings(kind: str) -> None:
    """Which tokens were trained is read off what the embeddings give, not off how they are stored."""
    model, plain = quantised(kind), tiny()
    with torch.no_grad():
        plain.get_input_embeddings().weight.copy_(model.get_input_embeddings()(torch.arange(97)))
    drawn = [make_ids("random-tokens", model=used, tokenizer=None, tokens=400, seed=0) for used in (model, plain)]
    assert torch.equal(*drawn)
    assert 80 < len(drawn[0].unique()) < 95  # some stand out, and are left out


@pytest.mark.parametrize("dtype", [torch.uint4, torch.float4_e2m1fn_x2], ids=str)
def test_dtypes_that_torch_cannot_index(dtype: torch.dtype) -> None:
    """Told by their bytes."""
    model = tiny()
    model.register_buffer("packed", torch.zeros(8, 4, dtype=torch.uint8).view(dtype))
    sampled = identity.sample(model)
    assert identity.is_same(identity.sample(model), sampled)
    model.packed = torch.ones(8, 4, dtype=torch.uint8).view(dtype)
    assert not identity.is_same(identity.sample(model), sampled)
    model.packed = torch.zeros(8, 5, dtype=torch.uint8).view(dtype)
    assert not identity.is_same(identity.sample(model), sampled)
