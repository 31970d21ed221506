"""Models as plain folders."""

from pathlib import Path

import needle
import pytest
import torch

from eval import convert
from eval.shared import language_model


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
