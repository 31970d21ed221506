"""Averaging over positions in closed form, against turning the same keys to every position one by one."""

import math

import pytest
import torch
from reference import key_moments, rotary_matrix
from stand_in import GPU
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from qada_cache.key_moments.rotation import Rotation, find_rotation_at, read_rope_settings

SCHEMES = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 256},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [2.0, 3.0, 4.0, 5.0],
        "factor": 2.0,
        "original_max_position_embeddings": 512,
    },
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
}
LENGTHS = (1, 2, 111)


def frequencies(scheme: str) -> tuple[float, ...]:
    from transformers import LlamaConfig

    if scheme == "default":
        return tuple(1e4 ** (-index / 4) for index in range(4))
    settings = {"hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 1024}
    config = LlamaConfig(**settings, rope_parameters=dict(SCHEMES[scheme]))
    return tuple(ROPE_INIT_FUNCTIONS[scheme](config, "cpu", seq_len=1111)[0].double().tolist())


def brute_force(keys: Tensor, rotation: Rotation, first: int, length: int) -> tuple[Tensor, Tensor]:
    rotated = []
    for position in range(first, first + length):
        matrix = rotary_matrix(
            dim=rotation.dim, frequencies=rotation.frequencies, layout=rotation.layout, position=position
        )
        rotated.append(keys @ matrix.T)
    heads = [key_moments(keys=head) for head in torch.cat(rotated, dim=1)]
    return torch.stack([mean for mean, _ in heads]), torch.stack([covariance for _, covariance in heads])


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("dim", [8, 13], ids=["whole", "partial"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_average_equals_brute_force(scheme: str, dim: int, layout: str, length: int) -> None:
    """Each key at each position, for every scheme's frequencies, to float64 rounding."""
    rotation = Rotation(dim, frequencies(scheme), layout)
    keys = torch.randn(2, 17, dim, generator=torch.Generator().manual_seed(length), dtype=torch.float64) + 1
    heads = [key_moments(keys=head) for head in keys]
    mean, covariance = (torch.stack(parts) for parts in zip(*heads, strict=True))
    for first in (0, 16):
        found = rotation.average(mean, covariance, first=first, length=length)
        for ours, theirs in zip(found, brute_force(keys, rotation, first, length), strict=True):
            assert ours.dtype == torch.float64
            assert float((ours - theirs).abs().max()) < 1e-11


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=GPU)])
def test_average_on_a_device(device: str) -> None:
    rotation = Rotation(8, frequencies(next(iter(SCHEMES))))
    mean, covariance = torch.randn(3, 8), torch.randn(3, 8, 8)
    here, there = (
        rotation.average(mean, covariance, first=16, length=1001, device=torch.device(each)) for each in ("cpu", device)
    )
    for ours, theirs in zip(there, here, strict=True):
        assert ours.device.type == device
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-12, atol=1e-12)


def test_average_without_rotation_and_with_whole_turns() -> None:
    mean, covariance = torch.randn(3, 6).double(), torch.eye(6).double().expand(3, 6, 6)
    for rotation in (Rotation(6), Rotation(6, (0.0, 0.0))):
        found = rotation.average(mean, covariance, first=5, length=1001)
        torch.testing.assert_close(found[0], mean)
        torch.testing.assert_close(found[1], covariance)
    # Two equal frequencies differ by 0, and a slow one turns by less than rounding in one step.
    slow = Rotation(6, (0.7, 0.7, 1e-13))
    found = slow.average(mean, covariance, first=0, length=100_000)
    expected = brute_force_mean(mean, slow, 100_000)
    torch.testing.assert_close(found[0], expected, rtol=0, atol=1e-9)


def brute_force_mean(mean: Tensor, rotation: Rotation, length: int) -> Tensor:
    total = torch.zeros_like(mean)
    for pair, frequency in enumerate(rotation.frequencies):
        angles = torch.arange(length, dtype=torch.float64) * frequency
        cos, sin = angles.cos().mean(), angles.sin().mean()
        other = pair + len(rotation.frequencies)
        total[:, pair] = cos * mean[:, pair] - sin * mean[:, other]
        total[:, other] = cos * mean[:, other] + sin * mean[:, pair]
    return total


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_turn(layout: str) -> None:
    """Token by token as the matrices say, and back."""
    rotation = Rotation(7, (1.0, 0.1), layout)
    keys, positions = torch.randn(2, 5, 7, dtype=torch.float64), torch.tensor([0, 1, 2, 100, 3])
    rotated = rotation.rotate(keys, positions)
    for token, position in enumerate(positions.tolist()):
        matrix = rotary_matrix(dim=7, frequencies=(1.0, 0.1), layout=layout, position=position)
        torch.testing.assert_close(rotated[:, token], keys[:, token] @ matrix.T)
    torch.testing.assert_close(rotation.rotate(rotated, -positions), keys)


def test_wrong_rotations() -> None:
    with pytest.raises(ValueError, match="unknown rotary layout 'split': use one of half, interleaved"):
        Rotation(8, (1.0,), "split")
    with pytest.raises(ValueError, match="5 rotary frequencies need more than 8 dims"):
        Rotation(8, (1.0,) * 5)


@pytest.mark.parametrize("nested", [False, True])
def test_frequencies_that_follow_the_length(nested: bool) -> None:
    """longrope changes once, when the whole sequence passes the original length; dynamic with every length."""
    from transformers import PreTrainedConfig

    def at(scheme: str, length: int) -> tuple[float, ...]:
        parameters = dict(SCHEMES[scheme])
        config = PreTrainedConfig(
            hidden_size=32, num_attention_heads=4, max_position_embeddings=1024, rope_parameters=parameters
        )
        settings = read_rope_settings(config)
        if nested:
            settings |= {"rope_parameters": {"full_attention": parameters}, "layer_types": ["other", "full_attention"]}
        return find_rotation_at(Rotation(8, (1.0,) * 4), settings, 1, length).frequencies

    base = [1e4 ** (-index / 4) for index in range(4)]
    short = tuple(value / factor for value, factor in zip(base, (1.0, 1.1, 1.2, 1.3), strict=True))
    long = tuple(value / factor for value, factor in zip(base, (2.0, 3.0, 4.0, 5.0), strict=True))
    assert at("longrope", 512 - 128) == pytest.approx(short)
    assert at("longrope", 512 - 127) == pytest.approx(long)
    assert at("dynamic", 1024 - 128) == pytest.approx(tuple(base))
    stretched = 1e4 * (4.0 * 5128 / 1024 - 3) ** (8 / 6)
    assert at("dynamic", 5000) == pytest.approx(tuple(stretched ** (-index / 4) for index in range(4)))
    for scheme in ("default", "linear", "llama3", "yarn"):
        assert at(scheme, 5000) == (1.0,) * 4  # as found, at every length
    assert math.isfinite(sum(at("dynamic", 10**6)))
