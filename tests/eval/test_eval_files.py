"""What the measuring tools write: tables that go on, and models as plain folders."""

from pathlib import Path

import needle
import pytest
import torch

from eval import convert
from eval.shared import language_model
from eval.shared.tables import read, write
from qada_cache import KeyMoments, QAdACache


def test_a_table_with_other_columns_is_added_to(tmp_path: Path) -> None:
    """One that an older version made: what it does not say is left empty."""
    table = tmp_path / "table.csv"
    write(table, [{"task": "a", "score": 1}], machine="x", add=True)
    write(table, [{"task": "b", "score": 2}], machine="x", add=True)
    assert table.read_text() == "task,score,machine\na,1,x\nb,2,x\n"
    write(table, [{"task": "c", "score": 3, "error": 0.5}], machine="y", add=True)
    assert [tuple(row.values()) for row in read(table)] == [
        ("a", "1", "", "x"),
        ("b", "2", "", "x"),
        ("c", "3", "0.5", "y"),
    ]
    write(table, [{"task": "d"}])
    assert table.read_text() == "task\nd\n"


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


@pytest.mark.slow
def test_the_moments_kept_here_are_of_the_model_that_they_name() -> None:
    from moments.make import FILE

    readme = (FILE.parent / "README.md").read_text(encoding="utf-8")
    assert [path.name for path in FILE.parent.glob("*.safetensors")] == [FILE.name]
    assert f"`{FILE.name}`" in readme
    kept = KeyMoments.load(FILE)
    model, tokenizer = language_model.load("smollm2")
    cache = QAdACache(model, moments=kept)
    assert cache.options.other_moments is kept
    made = KeyMoments.collect(model, tokenizer, "random-words", progress=False)
    for mine, theirs in zip(kept.at(1024), made.at(1024), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)
