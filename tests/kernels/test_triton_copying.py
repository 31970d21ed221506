"""Triton's kernel that copies tokens of all heads at once, interpreted and on a GPU."""

import pytest
import torch
from torch import Tensor

from qada_cache.kernels import copying as dispatch
from qada_cache.kernels.copying import find_copier, find_copying_fault

pytest.importorskip("triton", reason="triton is not installed: pip install triton", exc_type=ModuleNotFoundError)
from steps import DEVICES, interpreter

from qada_cache.kernels.triton import copying


def draw(tokens: int, dim: int, dtype: torch.dtype, device: str) -> Tensor:
    """Random tokens `[2, 2, tokens, dim]` with a token's heads side by side, as models lay them out."""
    return torch.randint(-99, 99, (2, tokens, 2, dim)).to(dtype).transpose(1, 2).to(device)


@DEVICES
@pytest.mark.parametrize("most", [1 << 8, 1 << 14])
@pytest.mark.parametrize(("dim", "dtype"), [(8, torch.bfloat16), (20, torch.float32), (176, torch.uint8)])
def test_runs_lie_side_by_side(
    dim: int, dtype: torch.dtype, most: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them than one launch takes; programs copy few tokens at once, or many."""
    monkeypatch.setattr(copying, "BYTES", most)
    copying._bind_copying.cache_clear()
    parts = [draw(tokens, dim, dtype, device) for tokens in (30, 1, 3, 6, 2, 5, 9)]
    room = torch.zeros(2, 2, 70, dim, dtype=dtype, device=device)
    pairs, at = [], 7
    for part in parts:
        pairs.append((room[:, :, at : at + part.shape[2]], part))
        at += part.shape[2]
    assert copying.can_copy(pairs)
    copying.copy_tokens(pairs, torch.device(device))
    assert torch.equal(room[:, :, 7:at], torch.cat(parts, dim=2))
    assert not room[:, :, :7].any()
    assert not room[:, :, at:].any()
    copying._bind_copying.cache_clear()


def test_what_is_not_copied() -> None:
    """The kernel does not copy tensors at half a vector, with strided channels, of unlike dtypes or channels,
    or without tokens."""
    good, wide = torch.zeros(1, 2, 9, 8), torch.zeros(1, 2, 9, 16)
    assert copying.can_copy([(good, good)])
    others = [
        (good, good.half()), (wide[..., 2:10], good), (good, wide[..., ::2]), (wide, good),
        (torch.zeros(1, 2, 9, 10)[..., :8], good),
    ]  # fmt: skip
    for pair in others:
        assert not copying.can_copy([(good, good), pair])
    assert not copying.can_copy([(good[:, :, :0], good[:, :, :0])])
    assert not copying.can_copy([(good[..., :6], good[..., :6])])


@interpreter
def test_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes; what copies less does not, is warned of, and is not used."""
    device, tokens, warned = torch.device("cpu"), torch.zeros(1, 2, 3, 8), list[str]()
    for kind in ((torch.float32, 8), (torch.bfloat16, 24), (torch.uint8, 32)):
        assert find_copying_fault(copying.copy_tokens, device, *kind) is None
        fault = find_copying_fault(lambda pairs, device: copying.copy_tokens(pairs[:1], device), device, *kind)
        assert fault is not None
    assert find_copier([(tokens, tokens)], device, "auto") is None
    monkeypatch.setattr(dispatch, "AUTO_DEVICES", ("cpu",))
    monkeypatch.setattr(dispatch, "warn_once", lambda _, text: warned.append(text))
    monkeypatch.setattr(dispatch, "_agrees", dispatch._agrees.__wrapped__)
    assert find_copier([(tokens, tokens)], device, "auto") is copying.copy_tokens
    assert find_copier([(tokens, tokens)], device, "torch") is None
    assert find_copier([(tokens[..., :6], tokens[..., :6])], device, "auto") is None
    assert not warned
    monkeypatch.setattr(copying, "copy_tokens", lambda *_: None)
    assert find_copier([(tokens, tokens)], device, "auto") is None
    assert len(warned) == 1
