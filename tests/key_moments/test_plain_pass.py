"""The pass that key moments come from is that of the weights alone: it meets no hook, and no other thread's call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial, wraps
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from models import prompt, tiny
from test_rotation import SCHEMES
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.utils import weight_norm
from transformers import PreTrainedModel

from qada_cache import KeyMoments, QAdACache
from qada_cache.key_moments import collecting

pytestmark = pytest.mark.usefixtures("folder")

IDS = prompt(300)[0]


def collect(model: PreTrainedModel, **options: Any) -> KeyMoments:
    return KeyMoments.collect(model, prompt=IDS, progress=False, **options)


def assert_same(one: KeyMoments, other: KeyMoments) -> None:
    assert one.rotations == other.rotations
    for name in ("mean", "covariance", "query_energies"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name


# -- what somebody put into a model ----------------------------------------------------------------------------------


def steer(found: Any) -> Any:
    """A layer's output, moved."""
    return (found[0] + 3, *found[1:]) if isinstance(found, tuple) else found + 3


def layer_of(model: PreTrainedModel) -> nn.Module:
    return model.model.layers[0]


def by_hook(model: PreTrainedModel) -> Any:
    return layer_of(model).register_forward_hook(lambda module, args, output: steer(output))


def by_hook_with_keywords(model: PreTrainedModel) -> Any:
    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        return steer(output)

    return layer_of(model).register_forward_hook(hook, with_kwargs=True, always_call=True)


def by_hook_before(model: PreTrainedModel) -> Any:
    return layer_of(model).mlp.register_forward_pre_hook(lambda module, args: (args[0] + 3,))


def by_hook_before_with_keywords(model: PreTrainedModel) -> Any:
    def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return args, kwargs | {"hidden_states": kwargs["hidden_states"] + 3}

    return layer_of(model).self_attn.register_forward_pre_hook(hook, with_kwargs=True)


def by_hook_at_embeddings(model: PreTrainedModel) -> Any:
    return model.get_input_embeddings().register_forward_hook(lambda module, args, output: output + 3)


def by_global_hook(model: PreTrainedModel) -> Any:
    part = layer_of(model).mlp
    return register_module_forward_hook(lambda module, args, output: output + 3 if module is part else None)


def by_global_hook_before(model: PreTrainedModel) -> Any:
    part = layer_of(model).mlp
    return register_module_forward_pre_hook(lambda module, args: (args[0] + 3,) if module is part else None)


def by_forward(model: PreTrainedModel) -> Any:
    """Replace a layer's `forward` by one that steers its output, and that `wraps` lets pass for transformers' own."""
    layer = layer_of(model)
    own = layer.forward

    @wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return steer(own(*args, **kwargs))

    layer.forward = forward


def by_method(model: PreTrainedModel) -> Any:
    part = layer_of(model).mlp
    part.forward = MethodType(lambda self, states: steer(type(self).forward(self, states)), part)


def by_another_layers_forward(model: PreTrainedModel) -> Any:
    layer_of(model).mlp.forward = model.model.layers[1].mlp.forward


def by_partial(model: PreTrainedModel) -> Any:
    part = layer_of(model).mlp
    part.forward = partial(lambda own, states: steer(own(states)), part.forward)


STEERING: dict[str, Callable[[PreTrainedModel], Any]] = {
    name.removeprefix("by_"): found for name, found in list(globals().items()) if name.startswith("by_")
}


@pytest.fixture(params=STEERING)
def steered(request: pytest.FixtureRequest) -> Iterator[PreTrainedModel]:
    model = tiny()
    with torch.no_grad():
        before = model(IDS).logits
        handle = STEERING[request.param](model)
        assert not torch.allclose(model(IDS).logits, before)
        after = model(IDS).logits
        yield model
        assert torch.equal(model(IDS).logits, after)  # what was put in is still there
    if handle is not None:
        handle.remove()


def test_moments_of_a_steered_model_are_those_of_its_weights(
    steered: PreTrainedModel, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    QAdACache(steered, moments="random-tokens")
    (path,) = folder.iterdir()
    assert_same(KeyMoments.load(path), KeyMoments.collect(tiny(), prompt="random-tokens", progress=False))
    for scheme in ("spread", "prompt"):
        assert torch.equal(collect(steered, scheme=scheme).mean, collect(tiny(), scheme=scheme).mean)


def test_a_steered_offloaded_model() -> None:
    """Accelerate's hooks run, whether a function was replaced before they came, or after."""
    before, after = tiny(), tiny()
    by_method(before)
    before = cpu_offload(before, torch.device("cpu"))
    after = cpu_offload(after, torch.device("cpu"))
    by_forward(after)
    for model in (before, after):
        by_hook(model)
        assert_same(collect(model), collect(tiny()))
        assert all(weight.is_meta for weight in model.parameters())


def test_hooks_hear_nothing() -> None:
    """Neither one that counts, nor one that reads a position of its user's text, nor one that fails."""
    model, calls = tiny(), []
    model.register_forward_hook(lambda *args: calls.append(args))
    handle = register_module_forward_pre_hook(lambda *args: calls.append(args))
    model.model.layers[1].register_forward_hook(lambda module, args, output: output[0, 1200])
    model.model.norm.register_forward_pre_hook(lambda module, args: 1 / 0)
    QAdACache(model)
    handle.remove()
    assert calls == []


def test_hooks_that_make_weights_run() -> None:
    """Hooks that make weights run, as those of torch's weight normalisation, which makes weights before each call."""
    model = tiny()
    with pytest.warns(FutureWarning, match="weight_norm"):
        weight_norm(model.model.layers[0].self_attn.k_proj)
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight_g.mul_(2)  # since the last call
    other = tiny()
    other.model.layers[0].self_attn.k_proj.weight.data.mul_(2)
    torch.testing.assert_close(collect(model).mean, collect(other).mean)


class Through(nn.Module):
    """Calls another layer by functions that it keeps, as a model's own code may."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part
        self.forward = self.run
        self.calls = [lambda states: part(states), part.__call__, partial(part)]

    def run(self, states: Tensor) -> Tensor:
        return sum(call(states) for call in self.calls) / 3


def test_functions_that_a_model_keeps() -> None:
    """They call the layers that are read, not those that have hooks."""
    model, steered = tiny(), tiny()
    for each in (model, steered):
        each.model.layers[0].mlp = Through(each.model.layers[0].mlp).eval()
    steered.model.layers[0].mlp.part.register_forward_hook(lambda module, args, output: output + 3)
    assert_same(collect(steered), collect(model))


@pytest.mark.parametrize("how", ["forward", "module", "layers"])
def test_a_compiled_model_is_read_as_it_is(how: str) -> None:
    def fail(module: Any, inputs: Any) -> Any:
        raise AssertionError("compiled")

    model = tiny()
    if how == "forward":
        model.forward = torch.compile(model.forward, backend=fail)
    elif how == "module":
        model.compile(backend=fail)
    else:
        model.model.layers[0] = torch.compile(model.model.layers[0], backend=fail)
    assert_same(collect(model), collect(tiny()))


class Packed(nn.Linear):
    """Its own function takes no bytes: whoever packed the weights replaced it."""

    def pack(self) -> None:
        whole = self.weight.detach()
        self.weight = nn.Parameter((whole * 100).round().to(torch.int8), requires_grad=False)
        self.forward = lambda states: nn.functional.linear(states, self.weight / 100)


def test_functions_that_unpack_weights_are_left(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Functions that unpack weights stay, with a warning. Moments are kept for no other model, as such functions may
    steer."""
    model = tiny()
    for layer in model.model.layers:
        layer.mlp.down_proj.__class__ = Packed
        layer.mlp.down_proj.pack()
    first = QAdACache(model).options.other_moments
    assert "Packed.forward" in first.origin[collecting.LEFT][0]
    assert "without them it is not known what the model computes" in caplog.text
    assert not folder.exists()
    assert QAdACache(model).options.other_moments is first
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(3)
    other = QAdACache(model).options.other_moments
    assert other.mean[0, 0].abs().sum() > 2 * first.mean[0, 0].abs().sum()


# -- other threads ---------------------------------------------------------------------------------------------------


def test_another_threads_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens are not gathered, and it has its hooks, while the model reads."""
    model, heard = tiny(), []
    wanted = collect(model)
    handle = model.register_forward_hook(lambda *args: heard.append(torch.is_grad_enabled()))
    model.train()
    original = collecting.read_keys

    def interrupted(*args: Any, **kwargs: Any) -> dict[int, Tensor]:
        def call() -> None:
            heard.append(model.training)
            model(prompt(50, seed=3)[0])

        other = threading.Thread(target=call)
        other.start()
        other.join()
        return original(*args, **kwargs)

    monkeypatch.setattr(collecting, "read_keys", interrupted)
    assert_same(collect(model), wanted)
    assert heard == [True, True]
    handle.remove()


# -- rotary frequencies that depend on the text ----------------------------------------------------------------------


def frequencies(model: PreTrainedModel) -> dict[str, Any]:
    found = model.model.rotary_emb
    names = ("max_seq_len_cached", "attention_scaling", "inv_freq", "original_inv_freq", "long_inv_freq")
    return {name: torch.as_tensor(getattr(found, name)).clone() for name in names if hasattr(found, name)}


@pytest.mark.parametrize("tokens", [100, 300, 900])  # within the model's own length, and beyond
@pytest.mark.parametrize("scheme", ["dynamic", "longrope"])
def test_frequencies_of_its_own_length(scheme: str, tokens: int) -> None:
    """Moments have the frequencies of their own prompt's length, also after a long text or a short one. The model goes
    on with the frequencies that it had."""
    made = []
    for before in (0, 20, 2000):
        model = tiny(rope_parameters=dict(SCHEMES[scheme]), max_position_embeddings=256)
        with torch.no_grad():
            for length in filter(None, [before]):
                model(prompt(length)[0])
        had = frequencies(model)
        made.append(KeyMoments.collect(model, prompt=prompt(tokens)[0], progress=False))
        has = frequencies(model)
        assert has.keys() == had.keys()
        assert all(torch.equal(has[name], had[name]) for name in had)
    assert_same(made[0], made[1])
    assert_same(made[0], made[2])
