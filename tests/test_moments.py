"""Running moments against two passes in float64, and the moments of another prompt as objects and files."""

import json
from pathlib import Path

import pytest
import torch
from models import prompt, tiny
from reference import key_moments
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DynamicCache

from qada_cache import KeyMoments, moments
from qada_cache.moments import RunningMoments

EPSILON = torch.finfo(torch.float32).eps


def keys_with_mean(
    tokens: int, mean: float, *, batch: int = 2, kv_heads: int = 2, dtype: torch.dtype = torch.float32
) -> Tensor:
    generator = torch.Generator().manual_seed(tokens)
    return (torch.randn(batch, kv_heads, tokens, 8, generator=generator) + mean).to(dtype)


def running(keys: Tensor, split: list[int]) -> RunningMoments:
    made = RunningMoments(keys.shape[0], keys.shape[1], keys.shape[3], keys.device)
    for part in keys.split(split, dim=2):
        made.update(slice(0, keys.shape[0]), part)
    return made


def errors(found: RunningMoments, keys: Tensor) -> tuple[float, float]:
    """The largest errors of mean and covariance against float64."""
    true = [[key_moments(keys=head) for head in row] for row in keys]
    mean = torch.stack([torch.stack([head[0] for head in row]) for row in true])
    covariance = torch.stack([torch.stack([head[1] for head in row]) for row in true])
    assert found.mean.dtype == found.scatter.dtype == torch.float32
    return float((found.mean - mean).abs().max()), float((found.covariance - covariance).abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mean", [0.0, 1e3])
@pytest.mark.parametrize("tokens", [1, 63, 111, 257])
def test_any_split_equals_float64(tokens: int, mean: float, dtype: torch.dtype) -> None:
    """Also of keys a thousand standard deviations from 0, where E[k^2] - E[k]^2 in float32 would be noise."""
    keys = keys_with_mean(tokens, mean, dtype=dtype)
    first = tokens // 3
    for split in ([tokens], [1] * tokens, [first, 0, tokens - first], [min(tokens, 7)] * (tokens // 7) + [tokens % 7]):
        made = running(keys, split)
        assert made.count == [tokens] * 2
        mean_error, covariance_error = errors(made, keys)
        # One rounding of a mean per merge, which enters the covariance at most linearly.
        budget = 4 * EPSILON * (1 + mean) * (1 + len(split) ** 0.5)
        assert mean_error <= budget
        assert covariance_error <= budget


def test_large_mean_makes_naive_moments_useless() -> None:
    """The test above could not fail otherwise: the naive formula is off by more than the variance."""
    keys = keys_with_mean(257, 1e3)
    naive = (keys.square().mean(dim=2) - keys.mean(dim=2).square()) - keys.double().var(dim=2, correction=0)
    assert naive.abs().max() > 0.05  # the budget above is 0.001 to 0.009


def test_blocks_bound_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = keys_with_mean(111, 5.0)
    monkeypatch.setattr(moments, "BLOCK_TOKENS", 10)
    made = running(keys, [111])
    assert made.count == [111, 111]
    assert max(errors(made, keys)) <= 1e-5


def test_rows_are_apart() -> None:
    keys = keys_with_mean(63, 2.0, batch=3)
    made = RunningMoments(3, 2, 8, keys.device)
    made.update(slice(0, 3), keys[:, :, :20])
    made.update(slice(1, 2), keys[1:2, :, 20:])
    assert made.count == [20, 63, 20]
    apart = running(keys[1:2], [63])
    torch.testing.assert_close(made.covariance[1], apart.covariance[0])
    first = running(keys[:1, :, :20], [20])
    torch.testing.assert_close(made.covariance[0], first.covariance[0])
    made.select([1, 1, 0, 2])
    assert made.count == [63, 63, 20, 20]
    torch.testing.assert_close(made.mean[:2], apart.mean.expand(2, -1, -1))
    torch.testing.assert_close(made.mean[2], first.mean[0])
    made.clear(slice(1, 3))
    assert made.count == [63, 0, 0, 20]
    assert not made.mean[1:3].any()
    assert not made.covariance[1:3].any()
    torch.testing.assert_close(made.covariance[0], apart.covariance[0])
    made.update(slice(1, 2), keys[1:2])  # begins anew
    torch.testing.assert_close(made.covariance[1], apart.covariance[0])


def test_no_keys_no_moments() -> None:
    made = running(keys_with_mean(1, 3.0)[:, :, :0], [0])
    assert made.count == [0, 0]
    assert not made.mean.any()
    assert not made.covariance.any()


# -- moments of another prompt ---------------------------------------------------------------------------------------


def other_prompt(**changes: object) -> KeyMoments:
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(2, 3, 8, generator=generator)
    fields = {"mean": mean, "covariance": torch.randn(2, 3, 8, 8, generator=generator), "tokens": 100}
    return KeyMoments(**(fields | {"model_type": "llama", "prompt": "random-words"} | changes))


def test_layer_of_another_prompt() -> None:
    made = other_prompt()
    mean, covariance = made.layer(1, torch.device("cpu"))
    assert torch.equal(mean, made.mean[1:2])
    assert torch.equal(covariance, made.covariance[1:2])
    half = other_prompt(mean=made.mean.half()).layer(0, torch.device("cpu"))[0]
    assert half.dtype == torch.float32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mean": torch.zeros(2, 3)}, r"mean \[layers, kv_heads, dim\].*got \[2, 3\]"),
        ({"mean": torch.zeros(2, 3, 7)}, r"got \[2, 3, 7\] and \[2, 3, 8, 8\]"),
        ({"covariance": torch.zeros(2, 3, 8, 7)}, r"got \[2, 3, 8\] and \[2, 3, 8, 7\]"),
        ({"covariance": torch.zeros(1, 3, 8, 8)}, r"got \[2, 3, 8\] and \[1, 3, 8, 8\]"),
        ({"mean": torch.full((2, 3, 8), torch.nan)}, "nan or infinity"),
        ({"covariance": torch.full((2, 3, 8, 8), torch.inf)}, "nan or infinity"),
    ],
)
def test_validation(changes: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=f"KeyMoments.*{message}"):
        other_prompt(**changes)


def test_save_and_load(tmp_path: Path) -> None:
    made = other_prompt()
    made.save(tmp_path / "moments.safetensors")
    loaded = KeyMoments.load(str(tmp_path / "moments.safetensors"))
    assert torch.equal(loaded.mean, made.mean)
    assert torch.equal(loaded.covariance, made.covariance)
    assert (loaded.tokens, loaded.model_type, loaded.prompt) == (100, "llama", "random-words")
    assert [path.name for path in tmp_path.iterdir()] == ["moments.safetensors"]  # no temporary is left


def test_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "moments.safetensors"
    other_prompt().save(path)
    before = path.read_bytes()

    def full_disk(*args: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("os.replace", full_disk)
    with pytest.raises(OSError, match="no space"):
        other_prompt(tokens=5).save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def rewritten(path: Path, *, tensors: dict[str, Tensor] | None = None, **header: str) -> None:
    """The file again, with other tensors or header fields: what a mistaken or malicious edit would leave."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    old = json.loads(content[8 : 8 + length])["__metadata__"]
    save_file(load_file(path) | (tensors or {}), path, metadata=old | header)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), "truncated"),
        (lambda path: path.write_bytes(path.read_bytes()[:20]), "truncated"),
        (lambda path: path.write_bytes(b""), "truncated"),
        (lambda path: path.write_text("moments: none"), "not a safetensors file"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\x7f"), "altered"),
        (lambda path: rewritten(path, tensors={"moments.mean": torch.zeros(2, 3, 8)}), "altered"),
        (lambda path: rewritten(path, tensors={"extra": torch.zeros(1)}), "altered"),
        (lambda path: rewritten(path, state='{"tokens": 5, "model_type": "llama", "prompt": "x"}'), "altered"),
        (lambda path: rewritten(path, sha256=""), "altered"),
        (lambda path: rewritten(path, kind="qada-cache"), "not a qada-moments file.*'qada-cache'"),
        (lambda path: rewritten(path, version="2"), "format version '2'.*upgrade"),
        (lambda path: rewritten(path, version="one"), "format version 'one'"),
        (lambda path: save_file({"weight": torch.zeros(3)}, path), "not a qada-moments file.*nothing"),
    ],
)
def test_damaged_files(tmp_path: Path, damage: object, message: str) -> None:
    path = tmp_path / "moments.safetensors"
    other_prompt().save(path)
    damage(path)
    with pytest.raises(ValueError, match=message) as caught:
        KeyMoments.load(path)
    assert str(path) in str(caught.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no qada-moments file at .*missing\.safetensors"):
        KeyMoments.load(tmp_path / "missing.safetensors")
    with pytest.raises(FileNotFoundError, match="qada-moments"):
        KeyMoments.load(tmp_path)  # a folder


@pytest.mark.parametrize("family", ["llama", "mistral_sliding"])
def test_collect_equals_float64(family: str) -> None:
    """Of every key of one forward pass but the sinks': what a `DynamicCache` holds, sliding layers in full."""
    model, ids = tiny(family, num_hidden_layers=3), prompt(111)[0]
    cache = DynamicCache()
    with torch.no_grad():
        model(ids, past_key_values=cache)
    made = KeyMoments.collect(model, ids, prompt="random-words")
    assert made.mean.dtype == made.covariance.dtype == torch.float32
    assert made.mean.shape == (3, 2, 8)
    assert (made.tokens, made.model_type, made.prompt) == (111, model.config.model_type, "random-words")
    assert not made.mean.requires_grad
    for layer, cached in enumerate(cache.layers):
        assert cached.keys.shape[2] == 111
        for head, keys in enumerate(cached.keys[0, :, 16:]):
            mean, covariance = key_moments(keys=keys)
            budget = 8 * EPSILON * float(1 + keys.abs().max() ** 2)
            assert float((made.mean[layer, head] - mean).abs().max()) <= budget
            assert float((made.covariance[layer, head] - covariance).abs().max()) <= budget


@pytest.mark.parametrize(
    "ids", [torch.ones(2, 19), torch.ones(1, 16), torch.ones(19)], ids=lambda ids: str(list(ids.shape))
)
def test_collect_refuses_other_shapes(ids: Tensor) -> None:
    with pytest.raises(ValueError, match=r"input_ids must be \[1, tokens\].*got \["):
        KeyMoments.collect(tiny(), ids.long())
