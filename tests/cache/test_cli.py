"""The command `qada`."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import needle
import pytest
import torch
from byte_tokenizer import tokenizer
from readable import readable_model
from transformers import AutoTokenizer, BloomConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from qada_cache import KeyMoments, QAdACache, __version__
from qada_cache.__main__ import main
from qada_cache.arguments import make_parser
from qada_cache.kernels import choice
from qada_cache.models import loading

MODEL = str(needle.FOLDER)
FILE = str(needle.FOLDER / "config.json")


def test_moments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file serves the model, and is what Python would have collected."""
    path = tmp_path / "moments.safetensors"
    assert main(["moments", "--model", MODEL, "--tokens", "300", "--seed", "2", "--out", str(path)]) == 0
    assert f"wrote {path}: 4 layers, 4 KV heads, 32 dims, for bulks of any length, from 300 tokens" in (
        capsys.readouterr().out
    )
    model = needle.load_model()
    expected = KeyMoments.collect(model, needle.load_tokenizer(), tokens=300, seed=2)
    assert torch.equal(KeyMoments.load(path).covariance, expected.covariance)
    assert "moments of random-tokens" in repr(QAdACache(model, moments=path))  # its tokenizer knows no other words
    assert str(needle.FOLDER.parent) not in path.read_bytes().decode("latin-1")  # no paths of the machine


def test_a_model_that_reads_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`qada moments` serves a model that reads images, which transformers' table has under no causal language model."""
    text = {"model_type": "llama", "vocab_size": 258, "hidden_size": 32, "intermediate_size": 48}
    text |= {"num_hidden_layers": 2, "num_attention_heads": 4}
    vision = {"model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 32, "patch_size": 8}
    LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text)).save_pretrained(
        tmp_path / "model"
    )
    tokenizer().save_pretrained(tmp_path / "model")
    out = tmp_path / "moments.safetensors"
    assert main(["moments", str(tmp_path / "model"), "--tokens", "60", "--out", str(out)]) == 0
    assert f"wrote {out}: 2 layers, 4 KV heads, 8 dims" in capsys.readouterr().out


def test_moments_of_a_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "words.txt").write_text(needle.haystack(tokens=400))
    out = tmp_path / "moments.safetensors"
    arguments = ["moments", "--model", MODEL, "--prompt", "wiki", "--tokens", "200", "--out", str(out)]
    assert main([*arguments, "--text", str(tmp_path / "words.txt"), "--scheme", "prompt"]) == 0
    assert "for bulks of 184 tokens, from 200 tokens (wiki)" in capsys.readouterr().out
    with (tmp_path / "words.jsonl").open("w") as file:
        for line in (tmp_path / "words.txt").read_text().split(" . "):
            file.write(json.dumps({"words": line}) + "\n")
    pytest.importorskip("datasets", reason="--dataset needs the package datasets")
    dataset = ["--dataset", str(tmp_path), "--column"]
    assert main([*arguments, *dataset, "words"]) == 0
    assert main([*arguments, *dataset, "text"]) == 1
    assert "has no column 'text', it has words" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "/nowhere", "--out", "{}/x"], "there is no file or folder /nowhere"),
        (["nowhere.gguf", "--out", "{}/x"], "there is no file or folder nowhere.gguf"),
        (["--model", MODEL, "--out", "{}/no/x"], "--out: there is no folder {}/no"),
        (
            ["--model", MODEL, "--out", "{}/x", "--prompt", "wiki", "--text", "{}/none"],
            "--text: there is no file {}/none",
        ),
        (["--model", MODEL, "--out", "{}/x", "--tokens", "9"], r"tokens \(9\) must exceed sink_tokens"),
        (["--model", MODEL, "--out", "{}/x", "--tokens", "-9"], "--tokens must be at least 1, got -9"),
        (["--model", MODEL, "--out", "{}/x", "--tokens", "99999"], "come to 99999 tokens, and the model has 3"),
        (["--model", MODEL, "--out", "{}/x", "--prompt", "wiki"], "does not know the words"),
        (["--model", MODEL, "--out", "{}/x", "--device-map", "meta"], "on the meta device, .*: load them first"),
        (["--model", MODEL, "--out", "{}/x", "--text", "a", "--dataset", "b"], "--text or --dataset, not both"),
        (["--model", MODEL, "--out", "{}/x", "--subset", "a"], "--subset is of a --dataset"),
        (
            ["--model", MODEL, "--out", "{}/x", "--text", FILE, "--prompt", "random-tokens"],
            "--prompt random-tokens reads no text",
        ),
        (["--model", MODEL, "--out", FILE, "--text", FILE], "--out would write over --text"),
        (["--model", FILE, "--out", FILE], "--out would write over --model"),
    ],
)
def test_errors_are_one_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["moments", *(argument.format(tmp_path) for argument in arguments)]) == 1
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("qada moments: ")]
    assert len(error) == 1
    assert re.search(message.format(tmp_path), error[0])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", ["", " \n"])
def test_an_empty_text_is_not_our_article(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text(content)
    given = ["moments", MODEL, "--text", str(tmp_path / "text.txt"), "--out", str(tmp_path / "x")]
    assert main(given) == 1
    assert capsys.readouterr().err == f"qada moments: --text: {tmp_path}/text.txt is empty\n"
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("command", ["profile", "report"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--threshold", "2"], r"threshold must be in \[0, 1\], got 2.0"),
        (["--token-threshold", "nan"], "token_threshold must be finite and not negative, got nan"),
        (["--tuned", "--threshold", "0.5"], "tuned=True takes token_threshold and threshold from qada tune"),
        (["--moments", "current+"], "two moments must be"),
        (["--moments", "current+poem"], "poem"),
    ],
)
def test_options_of_the_cache_are_refused_before_a_model_is_loaded(
    command: str, arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """There is none of this name."""
    asked = ["--text", FILE, "--ask", "why", "--out", str(tmp_path / "page.html")] if command == "report" else []
    assert main([command, "nowhere.gguf", *asked, *arguments]) == 1
    (error,) = capsys.readouterr().err.splitlines()
    assert re.match(f"qada {command}: .*{message}", error)


def test_positions_are_counted_before_weights_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rope scaling of some kinds adds to those that the config names."""
    model = shutil.copytree(MODEL, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    assert main(["profile", str(model), "--prompt-tokens", "32768", "--new-tokens", "1"]) == 1
    assert capsys.readouterr().err == (
        "qada profile: --prompt-tokens and --new-tokens come to 32769 tokens, and the model has 32768 positions\n"
    )
    for kind, factor, positions in (("yarn", 4.0, 8192), ("dynamic", 2.0, 4096), ("linear", 2.0, 2048)):
        rope = {"rope_type": kind, "factor": factor, "rope_theta": 1e4}
        assert loading.count_positions(LlamaConfig(max_position_embeddings=2048, rope_parameters=rope)) == positions
    assert loading.count_positions(BloomConfig()) is None


def test_two_models_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["profile", "one", "--model", "other"])
    assert ended.value.code == 2
    assert "give one MODEL, not " in capsys.readouterr().err


def test_a_picture_in_place_of_its_table_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="pictures are drawn with it")
    assert main(["profile", MODEL, "--out", str(tmp_path / "x.png"), "--plot", str(tmp_path / "x.png")]) == 1
    assert " would write over --" in capsys.readouterr().err


def test_a_model_that_cannot_be_loaded_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("We couldn't connect to the Hub.")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", refuse)
    assert main(["profile", "--model", "no-such-model"]) == 1
    assert (
        capsys.readouterr().err
        == "qada profile: cannot load the model 'no-such-model': We couldn't connect to the Hub.\n"
    )


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("model.safetensors", b"<html>Not found</html>", "SafetensorError: .*header"),
        ("tokenizer.json", b"{}", "KeyError: 'added_tokens'"),
        ("config.json", b'{"model_type": "llama", "hidden_size": "wide"}', "expected int, got str"),
    ],
)
def test_damaged_files_are_one_line(
    file: str, content: bytes, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Libraries raise errors of their own for them."""
    model = shutil.copytree(MODEL, tmp_path / "model", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    (model / file).write_bytes(content)
    assert main(["profile", str(model), "--prompt-tokens", "300"]) == 1
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("qada profile: ")]
    assert len(error) == 1
    assert re.search(f"cannot load the model '{re.escape(str(model))}': .*{said}", error[0])


def test_profile_goes_by_moments_of_a_name(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """`qada profile --moments wiki` collects moments by the model's own tokenizer. If this does not know the text's
    words, or the name is none, one line says so."""
    folder = readable_model(tmp_path).config._name_or_path
    arguments = ["--prompt-tokens", "300", "--new-tokens", "2"]
    assert main(["profile", "--model", folder, *arguments, "--moments", "wiki"]) == 0
    assert "QAdACache" in capsys.readouterr().out
    assert main(["profile", "--model", MODEL, *arguments, "--moments", "wiki"]) == 1
    assert "qada profile: the tokenizer does not know the words of the prompt (wiki)" in capsys.readouterr().err
    assert main(["profile", "--model", MODEL, *arguments, "--moments", "poem"]) == 1
    assert "poem" in capsys.readouterr().err


def test_kernels_that_cannot_serve_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Wherever a command comes to choose them, and no half-made folder stays."""
    monkeypatch.setenv("QADA_KERNELS", "triton")
    monkeypatch.setattr(choice, "explain_unsupported", lambda *_, **__: "the kernel needs CUDA tensors")
    (tmp_path / "text.txt").write_text("the old farmer walks slowly")
    asked = ["--text", str(tmp_path / "text.txt"), "--ask", "why", "--out", str(tmp_path / "page.html")]
    for command, *arguments in (
        ("profile", "--prompt-tokens", "300", "--new-tokens", "2"),
        ("report", *asked),
        ("serve-folder", "--out", str(tmp_path / "folder")),
    ):
        assert main([command, MODEL, *arguments]) == 1
        assert [line for line in capsys.readouterr().err.splitlines() if line.startswith("qada ")] == [
            f"qada {command}: Triton's kernels were asked for (by kernels= or QADA_KERNELS), but the kernel needs CUDA "
            "tensors: auto takes those that serve"
        ]
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, status, expected in (
        ([], 2, "the following arguments are required: command"),
        (["moments"], 2, "required: --out"),
        (["store"], 2, "required: action\n"),
        (["moments", "--out", "x"], 2, "required: MODEL"),
        (["serve-folder", "--out", "x"], 2, "required: MODEL (the model's folder)"),
        (["profile", "--layers"], 2, "usage: qada profile"),
        (["moments", "--prompt", "poem"], 2, "choose from"),
        (["--version"], 0, __version__),
        (["moments", "--help"], 0, "random-words"),
    ):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == status
        shown = capsys.readouterr()
        assert expected in shown.out + shown.err


def test_the_hub_is_asked_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """For whether it is there at all: transformers asks for each of a model's files until a minute has gone."""
    asked = []

    class Session:
        def head(self, *call: object, **options: object) -> None:
            asked.append(call)
            raise ConnectionError("no network")

    monkeypatch.setattr(loading.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(loading, "get_session", Session)
    assert main(["profile", "nobody/nothing"]) == 1
    assert len(asked) == 1
    assert re.search("nobody/nothing and no such model .* cannot be reached .no network", capsys.readouterr().err)


@pytest.mark.parametrize("place", [[MODEL], ["--model", MODEL]])
def test_a_model_by_its_place_or_name(place: list[str]) -> None:
    for command in (["profile"], ["moments", "--out", "x"], ["tune"], ["serve-folder", "--out", "x"]):
        for arguments in ([*command, *place], [command[0], *place, *command[1:]]):
            assert make_parser().parse_args(arguments).model == MODEL


def test_help_waits_for_no_library() -> None:
    """Nor does a mistake."""
    for arguments in (["--help"], ["tune"], ["report", "m", "--text", "none", "--ask", "?", "--out", "x"]):
        code = f"""
import sys
from qada_cache.__main__ import main
try:
    main({arguments!r})
except SystemExit:
    pass
assert not {{"torch", "transformers"}} & {{*sys.modules}}
"""
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_as_a_module() -> None:
    run = subprocess.run([sys.executable, "-m", "qada_cache", "--version"], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == f"qada-cache {__version__}"


@pytest.mark.parametrize(("command", "status"), [(["profile", "--model"], 1), (["tune"], 2)])
def test_a_picture_without_matplotlib_is_refused_before_the_model_is_read(
    command: list[str], status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([*command, str(tmp_path / "no model"), "--plot", str(tmp_path / "made.png")]) == status
    assert "--plot needs matplotlib: pip install 'qada-cache[plot]'" in capsys.readouterr().err
