"""Tells checkpoints apart by the outputs of layers whose weights cannot be read."""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .contents import find_width
from .plain import make_plain

ASKED = 4  # inputs of each layer
_SIZES = ("hidden_size", "intermediate_size", "moe_intermediate_size", "head_dim", "vocab_size")
# Errors of a layer that takes other inputs.
_REFUSALS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


class UntoldWeightsError(LookupError):
    """Nothing distinguishes a model's weights from another checkpoint's."""


@torch.no_grad()
def ask(model: PreTrainedModel, paths: Mapping[str, bool]) -> dict[str, bytes]:
    """Digests of the outputs of the layers at these paths for a few inputs, by path. If a layer takes none of the
    inputs, the nearest module around it that takes one stands for it. UntoldWeightsError, if there is none and the
    path's value is True."""
    found: dict[str, bytes] = {}
    for path, matters in paths.items():
        place, answers = path, None
        while place and place not in found:
            try:
                answers = _answer(model, model.get_submodule(place))
            except AttributeError:  # no registered module
                answers = None
            if answers is not None:
                found[place] = answers
                break
            place = place.rpartition(".")[0]
        if not place and matters:
            raise UntoldWeightsError(
                f"its weights cannot be told from another checkpoint's: {path or 'the model'} keeps some where they "
                "cannot be read, and took none of the inputs that linear layers and embeddings take"
            )
    return found


def _answer(model: PreTrainedModel, module: nn.Module) -> bytes | None:
    """A digest of a module's output for the first input that it takes. None if it takes none, or if its outputs tell
    nothing: they are the inputs themselves, not finite, or different each time."""
    with make_plain(module) as (plain, _), torch.autocast(model.device.type, enabled=False):
        for given in _make_inputs(model, module):
            try:
                one, other = (_take_tensor(plain(given)) for _ in range(2))
                if _tells(given, one, other):
                    return hashlib.sha256(str(one.shape).encode() + one.float().cpu().numpy().tobytes()).digest()
            except _REFUSALS:
                continue
    return None


def _tells(given: Tensor, one: Tensor, other: Tensor) -> bool:
    """Whether two answers to one input are the same, numbers, and not the input itself."""
    returned = one.shape == given.shape and torch.equal(one.to(given), given)
    return bool(torch.isfinite(one).all()) and torch.equal(one, other) and not returned


def _take_tensor(output: Any) -> Tensor:
    """The first tensor of what a module returns; TypeError if it holds no numbers."""
    first = output[0] if isinstance(output, (tuple, list)) and output else output
    if not (isinstance(first, Tensor) and first.is_floating_point() and first.numel()):
        raise TypeError(f"a layer returns floating point numbers, got {type(output).__name__}")
    return first.detach()


def _make_inputs(model: PreTrainedModel, module: nn.Module) -> Iterator[Tensor]:
    """Inputs to try: token ids `[1, ids]` for an embedding; for a layer one-hot rows `[1, rows, width]`. Their products
    with a matrix are its columns, in whatever order sums are computed."""
    device = next((part.device for part in (*module.parameters(), *module.buffers()) if not part.is_meta), model.device)
    config = model.config.get_text_config(decoder=True)
    rows = getattr(module, "num_embeddings", None)
    if rows is None and module is model.get_input_embeddings():
        rows = config.vocab_size
    if isinstance(rows, int) and rows > 0:
        yield _pick_places(rows).to(device)[None]
    width = find_width(module)
    widths = [getattr(config, name, None) for name in _SIZES] if width is None else [width]
    for size in dict.fromkeys(size for size in widths if isinstance(size, int) and size > 0):
        places = _pick_places(size)
        for dtype in dict.fromkeys((model.dtype, torch.float32)):
            given = torch.zeros(1, len(places), size, dtype=dtype, device=device)
            given[0, torch.arange(len(places), dtype=torch.int64, device="cpu"), places] = 1
            yield given


def _pick_places(size: int) -> Tensor:
    """Indices below `size`, int64, from the first to the last: `ASKED` at most."""
    return torch.linspace(0, size - 1, min(ASKED, size), dtype=torch.float64, device="cpu").long()
