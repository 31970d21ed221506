"""Models as plain folders."""

from pathlib import Path

import needle
import pytest
import torch
from models import exact, forced, prompt, tiny
from transformers import DeepseekV3ForCausalLM

from eval import convert
from eval.shared import language_model, latent_form


def test_convert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The folder holds the same model and tokenizer, and takes the place of nothing."""
    arguments = ["--model", str(needle.FOLDER), "--dtype", "float32", "--out", str(tmp_path / "made")]
    assert convert.main(arguments) == 0
    (model, tokenizer), (made, its_tokenizer) = (
        language_model.load(str(folder), dtype="float32") for folder in (needle.FOLDER, tmp_path / "made")
    )
    ids = tokenizer("The grass is green.", return_tensors="pt").input_ids
    assert torch.equal(its_tokenizer("The grass is green.", return_tensors="pt").input_ids, ids)
    assert torch.equal(made(ids).logits, model(ids).logits)
    missing = ["--model", str(tmp_path / "nothing"), "--out", str(tmp_path / "b")]
    for wrong, message in ((arguments, "exists already"), (missing, "--model: ")):
        with pytest.raises(SystemExit, match="2"):
            convert.main(wrong)
        assert message in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_latent_form(family: str, tmp_path: Path) -> None:
    """The logits are the original's, a written folder's too, and the cache of latents serves it."""
    model, ids = tiny(family), prompt(150)[0]
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(weight)
    latent_form.make_latent(model).save_pretrained(tmp_path)
    made = DeepseekV3ForCausalLM.from_pretrained(tmp_path).eval()
    wanted = forced(model, ids, [150], None)
    assert (forced(made, ids, [150], None) - wanted).abs().max() <= 1e-4 * wanted.abs().max()
    cache = exact(made)
    got = forced(made, ids, [100, 40, 1, 9], cache)
    assert cache.layers[0].reads_weight
    assert (got - wanted).abs().max() <= 1e-4 * wanted.abs().max()


def test_other_models_have_no_latent_form() -> None:
    with pytest.raises(ValueError, match="gemma2 is not written as latent attention, only llama and qwen2 are"):
        latent_form.make_latent(tiny("gemma2"))
    scaled = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(ValueError, match="rotary embeddings of type dynamic"):
        latent_form.make_latent(tiny("llama", rope_parameters=scaled))
