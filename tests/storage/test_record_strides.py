"""Records that begin at multiples of more bytes than they have, as on a GPU: the same records, the same in files."""

from pathlib import Path

import pytest
import torch
from models import prompt, tiny
from safetensors.torch import load_file
from small_sketch import small_sketch
from test_flush_work import VALUE_DIM, fill, make_tokens, triton_codes
from torch import Tensor

from qada_cache import QAdACache
from qada_cache.kernels.triton.kernels import INTERPRETED
from qada_cache.sketch.coded import STRIDES, RecordLayout
from qada_cache.versions import pass_cache

__all__ = ["triton_codes"]  # a fixture


@pytest.mark.parametrize("coder", ["torch", "triton"])
def test_records_are_the_same(coder: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records are the same at any stride, of closed segments and of the open one, with zeros behind them."""
    if coder == "triton":
        if not INTERPRETED:
            pytest.skip("needs TRITON_INTERPRET=1")
        request.getfixturevalue("triton_codes")
    keys, values = make_tokens(400)
    layout, found = RecordLayout.from_bits(keys.shape[3], VALUE_DIM, 8), list[tuple[Tensor, Tensor]]()
    assert layout is not None
    with small_sketch(40, 64):
        for step in (4, 32):
            monkeypatch.setitem(STRIDES, "cpu", step)
            bulk = fill(keys, values, 8).bulk
            (stored,), following = bulk.tensors, bulk.beside[2]
            found.append((stored[:, :, : bulk.stored[0]], following[:, :, : bulk.lengths[0] - bulk.stored[0]]))
    for wanted, padded in zip(*found, strict=True):
        assert wanted.shape[3] == layout.size < padded.shape[3] == 64
        assert torch.equal(padded[..., : layout.size], wanted)
        assert not padded[..., layout.size :].any()


@torch.inference_mode()
def test_files_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a crop that opens a segment again; each is loaded where records lie otherwise."""
    monkeypatch.setenv("QADA_KERNELS", "torch")
    model, ids = tiny(head_dim=32), prompt(1900)[0]
    written, logits = [], []
    for step, other in ((4, 32), (32, 4), (32, 32)):
        monkeypatch.setitem(STRIDES, "cpu", step)
        cache = QAdACache(model, bulk_bits=8, moments="current")
        model(ids[:, :1800], **pass_cache(cache), logits_to_keep=1)
        cache.crop(-500)
        model(ids[:, 1300:1898], **pass_cache(cache), logits_to_keep=1)
        cache.save(tmp_path / "cache.safetensors")
        written.append(load_file(tmp_path / "cache.safetensors"))
        monkeypatch.setitem(STRIDES, "cpu", other)
        loaded = QAdACache.load(tmp_path / "cache.safetensors", model)
        strides = {layer.store.bulk.tensors[0].shape[3] for layer in loaded.layers}
        assert strides == {48 if other == 4 else 64}
        logits.append(model(ids[:, 1898:1899], **pass_cache(loaded)).logits)
    for other_file in written[1:]:
        assert written[0].keys() == other_file.keys()
        assert all(
            torch.equal(part.view(torch.uint8), other_file[n].view(torch.uint8)) for n, part in written[0].items()
        )
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])
