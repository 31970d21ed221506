"""Default moments: collected once, kept in memory and on disk, found again, and never another model's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from models import SMALL, prompt, tiny
from transformers import LlamaForCausalLM, PreTrainedModel

from qada_cache import KeyMoments, QAdACache
from qada_cache.key_moments import defaults
from qada_cache.versions import pass_cache

pytestmark = pytest.mark.usefixtures("folder")


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(defaults, "_remembered", {})


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The prompts that moments were collected on, while the test runs."""
    prompts: list[str] = []
    original = KeyMoments.collect

    def counting(model: Any, tokenizer: Any, prompt: Any, **options: Any) -> KeyMoments:
        prompts.append(prompt)
        return original(model, tokenizer, prompt, **options)

    monkeypatch.setattr(KeyMoments, "collect", counting)
    return prompts


def of(cache: QAdACache) -> KeyMoments:
    moments = cache.options.other_moments
    assert isinstance(moments, KeyMoments)
    return moments


def saved(model: PreTrainedModel, path: Path) -> PreTrainedModel:
    """The model as one that was loaded from a folder."""
    model.save_pretrained(path)
    return LlamaForCausalLM.from_pretrained(path, local_files_only=True).eval()


def test_once_per_model(collected: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    first = of(QAdACache(model, moments="random-words"))
    assert first.prompt == "random-tokens"  # there is no tokenizer
    assert first.tokens == 1024
    assert of(QAdACache(model, threshold=0.1, moments="random-words")) is first  # in memory
    assert of(QAdACache(tiny(), moments="random-words")) is first  # the same weights
    assert collected == ["random-tokens"]
    forget(monkeypatch)  # another process
    again = of(QAdACache(model, moments="random-words"))
    assert torch.equal(again.covariance, first.covariance)
    assert collected == ["random-tokens"]
    (path,) = folder.iterdir()
    assert path.name.startswith("llama-random-tokens-")
    of(QAdACache(model, moments="single-word"))
    assert collected == ["random-tokens", "single-token"]


def test_those_used_last_stay_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(defaults, "REMEMBERED", 2)
    first, second = (of(QAdACache(tiny(seed=seed))) for seed in (1, 2))
    assert of(QAdACache(tiny(seed=1))) is first
    of(QAdACache(tiny(seed=3)))
    assert of(QAdACache(tiny(seed=1))) is first
    assert of(QAdACache(tiny(seed=2))) is not second  # read again


@pytest.mark.parametrize(
    "other",
    [
        lambda: tiny(seed=1),
        lambda: tiny(dtype=torch.bfloat16),
        lambda: tiny(rope_parameters={"rope_type": "default", "rope_theta": 500.0}),
        lambda: tiny(num_hidden_layers=3),
    ],
    ids=["weights", "dtype", "rope", "layers"],
)
def test_another_model_gets_its_own(other: Any, collected: list[str]) -> None:
    first, second = of(QAdACache(tiny(), moments="random-words")), of(QAdACache(other(), moments="random-words"))
    assert first is not second
    assert len(collected) == 2


def test_weights_changed_in_place(collected: list[str]) -> None:
    """Weights that change in place, as by training, get moments of their own."""
    model = tiny()
    before = of(QAdACache(model, moments="random-words"))
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.01)
    assert of(QAdACache(model, moments="random-words")) is not before
    assert len(collected) == 2


def test_two_prompts(collected: list[str], tmp_path: Path) -> None:
    """The default goes by the current prompt's and those of random tokens, which `current+` says in one string."""
    model = tiny()
    tokens = of(QAdACache(model, moments="random-tokens"))
    tokens.save(tmp_path / "tokens.safetensors")
    for moments in ("current+random-tokens", ("current", "random-tokens"), ["current", tokens]):
        cache = QAdACache(model, moments=moments)
        assert of(cache) is tokens
        assert cache.options.current_moments
        assert "moments current and of random-tokens," in repr(cache)
    assert of(QAdACache(model)) is tokens
    assert QAdACache(model).options.current_moments
    assert not QAdACache(model, moments=tokens).options.current_moments
    assert of(QAdACache(model, moments=f"current+{tmp_path / 'tokens.safetensors'}")).prompt == "random-tokens"
    assert collected == ["random-tokens"]


def test_nothing_is_collected_that_is_not_used(collected: list[str], folder: Path) -> None:
    for criterion in ("oracle", "dense", "local"):
        QAdACache(tiny(), criterion=criterion, moments="random-words")
    QAdACache(tiny(), moments="current")
    QAdACache(tiny("mistral_sliding"), moments="random-words")  # no layer for us
    with pytest.raises(ValueError, match="threshold"):
        QAdACache(tiny(), threshold=7)
    assert collected == []
    assert not folder.exists()


def test_damaged_file_is_made_again(
    collected: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny()
    wanted = of(QAdACache(model, moments="random-words")).covariance
    (path,) = folder.iterdir()
    path.write_bytes(path.read_bytes()[:-200])
    forget(monkeypatch)
    assert torch.equal(of(QAdACache(model, moments="random-words")).covariance, wanted)
    assert len(collected) == 2
    assert "truncated" in caplog.text
    assert torch.equal(KeyMoments.load(path).covariance, wanted)


def test_folder_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("QADA_HOME", str(tmp_path / "file"))
    assert of(QAdACache(tiny(), moments="random-words")).tokens == 1024
    assert "cannot be kept in" in caplog.text


# -- from the config alone -------------------------------------------------------------------------------------------


def test_config_finds_what_its_model_left(tmp_path: Path, collected: list[str], monkeypatch: Any) -> None:
    model = saved(tiny(), tmp_path / "model")
    wanted = of(QAdACache(model, moments="random-words"))
    forget(monkeypatch)
    assert torch.equal(of(QAdACache(config=model.config, moments="random-words")).covariance, wanted.covariance)
    assert len(collected) == 1
    assert QAdACache(config=model.config, moments="wiki").options.other_moments is None


def test_config_says_once_that_it_found_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = saved(tiny(), tmp_path / "model")
    for _ in range(3):
        assert QAdACache(config=model.config, moments="random-words").options.other_moments is None
    assert caplog.text.count("goes by the current prompt's") == 1


def test_a_link_that_leads_nowhere(tmp_path: Path) -> None:
    """Beside the weights, as in a cache of the Hub that was cleaned by hand."""
    model = saved(tiny(), tmp_path / "model")
    wanted = of(QAdACache(model))
    (tmp_path / "model" / "pytorch_model.bin").symlink_to(tmp_path / "gone")
    assert of(QAdACache(model)) is wanted
    assert of(QAdACache(config=model.config))


def test_a_tokenizer_that_cannot_be_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A newer library wrote its file, perhaps: the error has no class of its own."""
    content = '{"added_tokens": [], "pre_tokenizer": {"type": "Unheard"}, "model": {"type": "WordLevel", "vocab": {}}}'
    model = saved(tiny(), tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text(content)
    (tmp_path / "model" / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    assert of(QAdACache(model, moments="random-words")).prompt == "random-tokens"
    assert f"none was found at {tmp_path / 'model'} (" in caplog.text


def test_config_never_gets_another_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Other weights under the same name, weights changed in memory, no name at all."""
    model = saved(tiny(), tmp_path / "model")
    QAdACache(model, moments="random-words")
    retrained = saved(tiny(seed=1), tmp_path / "model")
    assert QAdACache(config=retrained.config, moments="random-words").options.other_moments is None
    wanted = of(QAdACache(retrained, moments="random-words")).covariance
    forget(monkeypatch)
    assert torch.equal(of(QAdACache(config=retrained.config, moments="random-words")).covariance, wanted)
    with torch.no_grad():
        retrained.lm_head.weight.add_(1.0)
    QAdACache(retrained, moments="random-words")  # two files now go by this config's name
    assert QAdACache(config=retrained.config, moments="random-words").options.other_moments is None
    assert "none, or several (its weights changed), are kept in" in caplog.text
    nameless = tiny()
    QAdACache(nameless, moments="random-words")
    assert QAdACache(config=nameless.config, moments="random-words").options.other_moments is None


def test_moments_do_not_depend_on_what_the_model_did_before() -> None:
    """Collected after a cache was used, they are those collected before."""
    model = tiny()
    before = KeyMoments.collect(model, progress=False)
    model.generate(prompt(90)[0], **pass_cache(QAdACache(model, **SMALL)), max_new_tokens=4, do_sample=False)
    after = KeyMoments.collect(model, progress=False)
    assert torch.equal(before.covariance, after.covariance)
