"""`qada tune`: from a model's name and a text to a choice that caches take."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from readable import readable_model
from transformers import AutoModelForCausalLM

from qada_cache import QAdACache, tuning
from qada_cache.__main__ import main
from qada_cache.kernels.cpu import building
from qada_cache.key_moments.prompts import ARTICLE
from qada_cache.tuning import prompts
from qada_cache.tuning.measuring import Figures, Piece

SIZES = ["--tokens", "1400", "--following", "3", "--pieces", "2"]


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A model's folder, and a text that its tokenizer knows."""
    folder = tmp_path_factory.mktemp("model")
    readable_model(folder, max_position_embeddings=2048)
    text = folder / "text.txt"
    text.write_text(ARTICLE.read_text() * 5)
    return str(folder), str(text)


@pytest.fixture(autouse=True)
def home(cache_folder: Path) -> Iterator[Path]:
    """The folder of the tests, where kernels that were compiled already are; what is chosen does not stay."""
    yield cache_folder
    for name in kept(cache_folder):
        (cache_folder / "moments" / name).unlink()


def kept(home: Path) -> list[str]:
    return [path.name for path in home.glob("moments/*-tuned-*")]


def run(named: tuple[str, str], *arguments: str) -> int:
    return main(["tune", named[0], "--text", named[1], *SIZES, *arguments])


def test_a_choice_is_said_kept_and_taken(
    named: tuple[str, str], home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="--plot needs matplotlib")
    picture = tmp_path / "tune.png"
    assert run(named, "--kl", "50", "--plot", str(picture)) == 0  # so that any will do, and the one that reads least
    said = capsys.readouterr().out
    settings = [f"{one.token_threshold:g} {one.threshold:g}" for one in tuning.SETTINGS]
    rows = [line.replace(",", "").split() for line in said.splitlines()[2 : 2 + len(settings)]]
    assert [" ".join(row[:2]) for row in rows] == settings
    chosen = re.search(r"Chosen for KL 50: (token_threshold=([\d.]+)(?:, threshold=([\d.]+))?)\.\n", said)
    assert chosen is not None
    assert "2 pieces of 1400 tokens, over the 3 tokens after each. Intervals are of 90%, by Student's t" in said
    assert re.search(r"On 1 pieces? that .* held out: KL [\d.]+, .* The choice is confirmed\.", said)
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert len(kept(home)) == 1
    assert str(home / "moments" / kept(home)[0]) in said
    assert "QAdACache(model, tuned=True) goes by it, and so do qada profile --tuned, and lm-eval" in said
    model = AutoModelForCausalLM.from_pretrained(named[0])
    assert not QAdACache(model).options.tuned
    options = QAdACache(model, tuned=True).options
    thresholds = options.token_threshold, options.threshold, options.tuned
    assert thresholds == (float(chosen[2]), float(chosen[3] or 0.95), True)
    arguments = ["profile", "--model", named[0], "--prompt-tokens", "300", "--new-tokens", "2"]
    assert main([*arguments, "--tuned"]) == 0
    assert f"takes the setting that qada tune kept: {chosen[1]}\n" in capsys.readouterr().out
    for unasked in ([], ["--token-threshold", "5"]):
        assert main([*arguments, *unasked]) == 0
        assert "qada tune" not in capsys.readouterr().out
    assert main([*arguments, "--tuned", "--token-threshold", "5"]) == 1
    assert "tuned=True takes token_threshold and threshold from qada tune" in capsys.readouterr().err


def of_prompts(model: Any, ids: Any, thresholds: Any, **options: Any) -> Iterator[prompts.PromptFigures]:
    """Figures of no clock: the bolder, the faster, and the more is lost."""
    yield prompts.PromptFigures(0.0, 1.0, 1.0, 10.0)
    yield from (prompts.PromptFigures(theta, 0.99, 0.5, 9.5 - theta / 10) for theta in thresholds)


def run_prefill(named: tuple[str, str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """On processors without the kernel as well; of tokens the first setting is enough."""
    monkeypatch.setattr(prompts, "check_selects", lambda model, prompt: None)
    monkeypatch.setattr(prompts, "measure_prompt", of_prompts)
    monkeypatch.setattr(tuning, "SETTINGS", tuning.SETTINGS[:1])
    return run(named, "--prefill", *arguments)


def test_a_threshold_for_prompts_is_kept_and_taken(
    named: tuple[str, str], home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unless a cache names its own, and until it is tuned without it."""
    assert run_prefill(named, monkeypatch, "--kl", "13") == 0
    said = capsys.readouterr().out
    table = [line.split() for line in said.splitlines() if re.match(r" +(exactly read|4.4|12|30)  +\d+\.\d{5} ", line)]
    assert [(row[0], row[-1]) for row in table] == [
        ("exactly", "1.00"),
        ("4.4", "0.91"),
        ("12", "0.83"),
        ("30", "0.65"),
    ]
    assert "On 1 held-out prompts prefill_threshold=12 has KL 12.00000" in said
    assert "It is recommended for prompts of 1400 tokens." in said
    model = AutoModelForCausalLM.from_pretrained(named[0])
    assert QAdACache(model).options.prefill_threshold == 0.0
    assert QAdACache(model, tuned=True).options.prefill_threshold == 12.0
    for own in (0.0, 3.0):
        options = QAdACache(model, tuned=True, prefill_threshold=own).options
        assert (options.prefill_threshold, options.tuned) == (own, True)
    assert main(["profile", "--model", named[0], "--prompt-tokens", "300", "--new-tokens", "2", "--tuned"]) == 0
    assert "kept: token_threshold=1, prefill_threshold=12\n" in capsys.readouterr().out
    assert run(named, "--kl", "50") == 0
    assert "prefill_threshold" not in capsys.readouterr().out
    assert QAdACache(model, tuned=True).options.prefill_threshold == 0.0


def test_no_threshold_for_prompts_leaves_the_rest(
    named: tuple[str, str], home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_prefill(named, monkeypatch, "--kl", "4") == 0
    assert "No prefill_threshold is recommended: none is surely within" in capsys.readouterr().out
    options = QAdACache(AutoModelForCausalLM.from_pretrained(named[0]), tuned=True).options
    assert (options.token_threshold, options.prefill_threshold, options.tuned) == (1.0, 0.0, True)


@pytest.mark.skipif(not building.has_compiler(), reason="without a compiler the default bulk has 16 bits")
def test_the_choice_is_tried_in_four_bits(
    named: tuple[str, str], home: Path, default_bits: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Within 50 nats they will do; a cache with bits of its own goes by the rest."""
    assert run(named, "--kl", "50") == 0
    said = capsys.readouterr().out
    assert re.search(r"Chosen for KL 50: token_threshold=[\d.]+(, threshold=[\d.]+)?, bulk_bits=4\.\n", said)
    last = said.splitlines()[2 + len(tuning.SETTINGS)].split()
    assert last[2] == "4"
    model = AutoModelForCausalLM.from_pretrained(named[0])
    found = QAdACache(model, tuned=True).options
    assert (found.token_threshold, found.threshold, found.bulk_bits) == (float(last[0]), float(last[1]), 4)
    for bits in (16, 8):
        own = QAdACache(model, tuned=True, bulk_bits=bits).options
        assert (own.token_threshold, own.bulk_bits, own.tuned) == (float(last[0]), bits, True)
    assert QAdACache(model).options.bulk_bits == 8


def test_four_bits_that_lose_too_much_are_not_chosen(
    named: tuple[str, str], home: Path, default_bits: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(model: Any, piece: Any, settings: Any, bulk_bits: int | None = None) -> Iterator[Figures]:
        yield Figures(0.0, 1.0, 1.0, 1.0)
        yield from (Figures(0.1 if bulk_bits else 0.001, 1.0, 0.1, 1.0) for _ in settings)

    monkeypatch.setattr(tuning, "measure", measured)
    monkeypatch.setattr(tuning.QAdACache, "options", SimpleNamespace(codes_tokens=True))
    piece = Piece(torch.zeros(1, 9), torch.zeros(1, 3))
    for kl, bits in ((0.002, None), (0.2, tuning.FEWEST_BITS)):
        found = tuning.tune(AutoModelForCausalLM.from_pretrained(named[0]), [piece] * 2, [piece], tuning.Budget(kl=kl))
        assert found.chosen is not None
        assert found.chosen.bulk_bits == bits
        assert found.again is not None
        assert found.again.bulk_bits == bits
        assert len(found.settings) == 1 + len(tuning.SETTINGS)


def test_bytes_are_a_budget_too(named: tuple[str, str], home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = Path(named[1]).with_name("other.txt")
    other.write_text(Path(named[1]).read_text())
    assert run(named, "--bytes", "1", "--confirm-text", str(other)) in (0, 1)  # it may exceed all: the sketch counts
    assert "100.0% of the bytes" in capsys.readouterr().out


def test_nothing_that_fits_keeps_nothing(
    named: tuple[str, str], home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(named, "--kl", "1e-30") == 1
    said = capsys.readouterr().out
    assert "No setting is surely within KL 1e-30" in said
    assert "Nothing was kept." in said
    assert kept(home) == []


def test_what_is_not_confirmed_is_not_kept(
    named: tuple[str, str], home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tuning.Outcome, "confirmed", False)
    assert run(named, "--kl", "50") == 1
    assert "That exceeds the budget: the choice is not confirmed." in capsys.readouterr().out
    assert kept(home) == []


def test_what_cannot_be_kept_is_said(
    named: tuple[str, str], home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*given: Any) -> Path:
        raise PermissionError("the folder belongs to another user")

    monkeypatch.setattr(tuning.tuned_choice, "keep", refuse)
    assert run(named, "--kl", "50") == 1
    assert "The choice cannot be kept (the folder belongs to another user)." in capsys.readouterr().out


@pytest.mark.skipif(sys.platform == "win32", reason="nothing is kept there")
@pytest.mark.parametrize("kind", ["file", "of others", "read-only"])
def test_a_folder_that_cannot_be_written_to_is_found_first(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No model is loaded."""
    place = tmp_path / "home"
    if kind == "file":
        place.write_text("")
    else:
        place.mkdir()
        place.chmod(0o777 if kind == "of others" else 0o500)
    if kind == "read-only" and os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    monkeypatch.setenv("QADA_HOME", str(place))
    assert main(["tune", "nowhere.gguf", *SIZES]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert re.match(f"qada tune: .*{re.escape(str(place / 'moments'))}: ", error)


def test_a_picture_that_cannot_be_drawn_costs_no_choice(
    named: tuple[str, str], home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="--plot needs matplotlib")

    def fail(*given: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(tuning, "plot", fail)
    monkeypatch.setattr(tuning, "SETTINGS", tuning.SETTINGS[:1])
    assert run(named, "--kl", "50", "--plot", "tune.png") == 2
    assert len(kept(home)) == 1
    assert "qada tune: no space left on device" in capsys.readouterr().err


def test_an_interrupted_run_keeps_nothing(
    named: tuple[str, str], home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*given: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(tuning, "measure", interrupted)
    assert run(named) == 130
    assert "qada tune: interrupted, nothing was written" in capsys.readouterr().err
    assert kept(home) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/nowhere/model"], "nowhere"),
        (["/nowhere/model.gguf"], "nowhere"),
        (["{}", "--text", "/nowhere/text"], "--text: there is no file /nowhere/text"),
        (["{}", "--confirm-text", "/nowhere/text"], "--confirm-text: there is no file /nowhere/text"),
        (["{}"], "does not know the words of the text"),
        (["{}", "--text", "{}/config.json"], "the text has .* tokens, and 6 pieces of 1400"),
        (["{}", "--tokens", "1000"], "--tokens must be at least 1280, got 1000"),
        (["{}", "--tokens", "2048"], "--tokens and --following come to 2080 tokens, and the model has 2048 positions"),
        (["{}", "--following", "0"], "--following must be at least 1, got 0"),
        (["{}", "--pieces", "1"], "--pieces must be at least 2, got 1"),
        (["{}", "--kl", "0"], "--kl must be positive and finite, got 0.0"),
        (["{}", "--prefill", "--bytes", "0.1"], "--prefill goes by KL, of which --bytes says nothing: give --kl"),
        (
            ["{}", "--prefill", "--tokens", "1300", "--pieces", "2", "--text", "{}/text.txt"],
            "a prompt of 1300 tokens is read exactly",
        ),
        (["{}", "--bytes", "8"], r"--bytes must be a share in \(0, 1\], got 8.0"),
        (["{}", "--plot", "/nowhere/x.png"], "--plot: there is no folder /nowhere"),
        (
            ["{}", "--text", "{}/text.txt", "--confirm-text", "{}/text.txt"],
            "--confirm-text is --text: a choice is confirmed by other text",
        ),
    ],
)
def test_errors_are_one_line_and_status_2(
    arguments: list[str], message: str, named: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["tune", "--tokens", "1400", *(argument.format(named[0]) for argument in arguments)]
    assert main(given) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("qada tune: ")]
    assert len(error) == 1
    assert re.search(message, error[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["m", "--kl", "0.1", "--bytes", "0.1"], "argument --bytes: not allowed with argument --kl"),
        (["m", "--kl", "much"], "argument --kl: invalid float value: 'much'"),
        ([], "the following arguments are required: MODEL"),
    ],
)
def test_usage(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["tune", *arguments])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
