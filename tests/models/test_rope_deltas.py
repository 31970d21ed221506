"""Models in which an image's tokens share positions keep how far positions are ahead, of the text that they read last.
A cache goes on from its own text's."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from models import SMALL, prompt
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from qada_cache import KeyMoments, PrefixStore, QAdACache, serving
from qada_cache.serving import FOLDER
from qada_cache.versions import pass_cache

IMAGE, AROUND = 90, (91, 92)  # tokens
EXACT: dict[str, Any] = {"threshold": 1.0, "moments": "current", **SMALL}


@pytest.fixture
def model() -> PreTrainedModel:
    text = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.35, "bos_token_id": None}
    text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4}
    vision |= {"out_hidden_size": 32, "fullatt_block_indexes": [0], "window_size": 16}
    ids = {"image_token_id": IMAGE, "video_token_id": 93, "vision_start_token_id": 91, "vision_end_token_id": 92}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids)
    torch.manual_seed(0)
    return Qwen2_5_VLForConditionalGeneration._from_config(config).eval()


def images(rows: int = 1) -> dict[str, Tensor]:
    """Texts with an image of 8 times 8 tokens each, which take 8 positions."""
    texts = prompt(*[60] * rows)[0].clamp(max=89)
    image = torch.tensor([[AROUND[0], *[IMAGE] * 64, AROUND[1]]]).expand(rows, -1)
    ids = torch.cat([texts[:, :30], image, texts[:, 30:]], dim=1)
    pixels = torch.randn(rows * 256, 96, generator=torch.Generator().manual_seed(0))
    grid = torch.tensor([[1, 16, 16]] * rows)
    return {
        "input_ids": ids,
        "mm_token_type_ids": (ids == IMAGE).long(),
        "pixel_values": pixels,
        "image_grid_thw": grid,
    }


def answer(model: PreTrainedModel, cache: DynamicCache | None, **inputs: Any) -> Tensor:
    mask = torch.ones_like(inputs["input_ids"])
    told: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(**inputs, attention_mask=mask, **pass_cache(cache), **told)


def test_a_text_goes_on_from_its_own_positions(model: PreTrainedModel, tmp_path: Path) -> None:
    """In copies, after other texts, and in a process whose model has read nothing."""
    plain, cache = DynamicCache(config=model.config), QAdACache(model, **EXACT, progress=True)
    text = answer(model, plain, **images())
    turn = torch.cat([text, prompt(20)[0].clamp(max=89)], dim=1)
    wanted = answer(model, plain, input_ids=turn)
    assert torch.equal(answer(model, cache, **images()), text)
    assert model.model.rope_deltas.item() == 8 - 64
    cache.save(tmp_path / "cache")
    copied = copy.deepcopy(cache)
    copied.batch_repeat_interleave(2)
    copied.batch_select_indices(torch.tensor([1]))
    for each in (cache, copied, QAdACache.load(tmp_path / "cache", model)):
        for other in (None, {"input_ids": prompt(50)[0].clamp(max=89)}, images(2)):
            model.model.rope_deltas = None
            if other is not None:
                answer(model, None, **other)
            assert torch.equal(answer(model, copy.deepcopy(each), input_ids=turn), wanted)
    cache.reset()
    assert torch.equal(answer(model, cache, input_ids=turn[:, :30]), answer(model, None, input_ids=turn[:, :30]))


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 2])
def test_a_text_that_the_model_is_called_on_begins_anew(model: PreTrainedModel, rows: int) -> None:
    """Behind images of another text, or of two; so does one whose tokens were all taken back."""
    text = prompt(80)[0].clamp(max=89)
    wanted = model(text, use_cache=False).logits[:, 60:]
    begun = QAdACache(model, **EXACT)
    answer(model, begun, **images())
    begun.crop(-begun.get_seq_length())
    for cache in (begun, QAdACache(model, **EXACT)):
        answer(model, None, **images(rows))
        for part in text.split(60, dim=1):
            got = model(part, **pass_cache(cache)).logits
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("rows", [1, 2])
def test_a_crop_goes_back_before_an_image(model: PreTrainedModel, rows: int) -> None:
    """To the positions of the text before, also in rows that have been reordered since."""
    inputs, cache = images(rows), QAdACache(model, **EXACT)
    with torch.no_grad():
        model(inputs["input_ids"][:, :28], **pass_cache(cache))
    assert torch.equal(answer(model, cache, **inputs), answer(model, None, **inputs))
    cache.reorder_cache(torch.arange(rows).flip(0))
    for length in (28, 12):
        cache.crop(length - cache.get_seq_length())
        turn = torch.cat([inputs["input_ids"].flip(0)[:, :length], prompt(*[40] * rows)[0].clamp(max=89)], dim=1)
        assert torch.equal(answer(model, cache, input_ids=turn), answer(model, None, input_ids=turn))


def test_a_stored_prompt_goes_on_after_an_image(model: PreTrainedModel, tmp_path: Path) -> None:
    text, store = prompt(400)[0].clamp(max=89), PrefixStore(tmp_path)
    wanted = answer(model, None, input_ids=text)
    store.keep(cache := store.cache(model, text, **EXACT), answer(model, cache, input_ids=text))
    answer(model, None, **images())
    cache = store.cache(model, text, **EXACT)
    assert cache.get_seq_length() == 399
    assert torch.equal(answer(model, cache, input_ids=text), wanted)


def test_key_moments_are_of_their_own_positions(model: PreTrainedModel) -> None:
    """Moments are collected at their own positions, not at those of the last text, and leave its deltas in place."""
    told: dict[str, Any] = {"prompt": "random-tokens", "tokens": 700, "progress": False}
    wanted = KeyMoments.collect(model, **told)
    answer(model, None, **images(2))
    kept = model.model.rope_deltas
    assert torch.equal(KeyMoments.collect(model, **told).mean, wanted.mean)
    assert model.model.rope_deltas is kept


def test_a_conversation_goes_on_between_images(model: PreTrainedModel) -> None:
    """Whose requests say that no token is of an image, as processors do."""
    told: dict[str, Any] = {"custom_generate": FOLDER, "trust_remote_code": True, "cache_options": EXACT}
    told["conversations_store"] = False
    text = prompt(200)[0].clamp(max=89)
    for turn in range(3):
        asked = {"input_ids": text, "mm_token_type_ids": torch.zeros_like(text)}
        got = answer(model, None, **asked, **told)
        assert torch.equal(got, answer(model, None, **asked))
        answer(model, None, **images(), **told)
        text = torch.cat([got, prompt(20, seed=turn)[0].clamp(max=89)], dim=1)
    assert serving.counters(model)["continued"] == 2


def test_files(model: PreTrainedModel, tmp_path: Path) -> None:
    """A file keeps the delta of each prompt once, however many beams there were. Another shape is refused."""
    cache = QAdACache(model, **EXACT)
    answer(model, cache, **images(2), num_beams=2)
    cache.save(tmp_path / "cache")
    loaded = QAdACache.load(tmp_path / "cache", model)
    assert loaded._shared.rope_deltas.held.tolist() == [[8 - 64], [8 - 64]]
    loaded._shared.rope_deltas.held = torch.zeros(3, 1, dtype=torch.long)
    loaded.save(tmp_path / "cache")
    with pytest.raises(ValueError, match=r"cannot hold rope_deltas torch.int64 \[3, 1\], which should be int64 \[rows"):
        QAdACache.load(tmp_path / "cache", model)
