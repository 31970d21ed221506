"""`python -m eval.gpu_step`: the ideal dense cache is attention, and a machine without a GPU is told of another."""

from types import SimpleNamespace

import pytest
import torch

from eval import gpu_step


def test_the_ideal_dense_cache_is_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ideal dense cache's output equals float64 attention; the token's key and value take the last held place."""
    made = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, heads, 1, 8, generator=made) for heads in (4, 2, 2))
    held = tuple(torch.randn(2, 2, 5, 8, generator=made) for _ in range(2))
    before = tuple(each.clone() for each in held)
    monkeypatch.setitem(gpu_step._held, 3, held)
    out, weights = gpu_step.attend_densely(SimpleNamespace(layer_idx=3), query, key, value, None, scaling=0.3)
    assert weights is None
    keys, values = (torch.cat((old[:, :, :4], new), 2).double() for old, new in zip(before, (key, value), strict=True))
    keys, values = (each.repeat_interleave(2, 1) for each in (keys, values))
    wanted = (query.double() @ keys.mT * 0.3).softmax(-1) @ values
    torch.testing.assert_close(out, wanted.transpose(1, 2).float(), rtol=1e-5, atol=1e-6)


def test_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        gpu_step.main(["--model", "tiny", "--device", "cpu"])
    assert "eval.benchmark" in capsys.readouterr().err
