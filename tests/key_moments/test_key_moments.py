"""Another prompt's key moments as objects and files: validation, lengths, what a file must survive."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import averaged_moments, rotary_matrix
from torch import Tensor

from qada_cache import KeyMoments
from qada_cache.key_moments import of_layer
from qada_cache.key_moments.of_layer import LayerMoments
from qada_cache.key_moments.rotation import Rotation, round_length
from qada_cache.models.sharding import UNSHARDED

CPU = torch.device("cpu")


def moments(**changes: Any) -> KeyMoments:
    """Moments for every length, of 2 layers, 3 KV heads and 8 dims; the first layer's keys are rotated, the second's
    not."""
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(1, 2, 3, 8, 8, generator=generator)
    fields = {
        "mean": torch.randn(1, 2, 3, 8, generator=generator),
        "covariance": root @ root.mT,
        "lengths": (),
        "rotations": (Rotation(8, (0.5, 0.01), "interleaved"), Rotation(8)),
        "tokens": 100,
        "model_type": "llama",
        "prompt": "random-words",
    }
    return KeyMoments(**(fields | changes))


def listed(*lengths: int) -> KeyMoments:
    """Moments for a list of lengths, whose means are each length's index in it."""
    mean = torch.arange(len(lengths)).float()[:, None, None, None].expand(-1, 2, 3, 8).contiguous()
    covariance = torch.eye(8).expand(len(lengths), 2, 3, 8, 8).contiguous()
    return moments(mean=mean, covariance=covariance, lengths=lengths, rotations=())


def test_at_averages_over_the_bulks_positions() -> None:
    """A bulk of 37 tokens lies behind 16 sinks, at positions 16 to 52; the layer without a rotation is as it was."""
    made = moments()
    mean, covariance = made.at(37)
    assert mean.dtype == covariance.dtype == torch.float64
    assert (mean.shape, covariance.shape) == ((2, 3, 8), (2, 3, 8, 8))
    turns = [
        rotary_matrix(dim=8, frequencies=(0.5, 0.01), layout="interleaved", position=position)
        for position in range(16, 53)
    ]
    expected = averaged_moments(mean=made.mean[0, 0], covariance=made.covariance[0, 0], turns=turns)
    torch.testing.assert_close(mean[0], expected[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(covariance[0], expected[1], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(mean[1], made.mean[0, 1].double())
    torch.testing.assert_close(covariance[1], made.covariance[0, 1].double())


def test_at_takes_the_longest_list_entry_that_fits() -> None:
    """A shorter prompt's moments do little harm, a longer one's much."""
    made = listed(100, 200, 400)
    found = {length: int(made.at(length)[0][0, 0, 0]) for length in (1, 99, 100, 199, 200, 399, 400, 100_000)}
    assert found == {1: 0, 99: 0, 100: 0, 199: 0, 200: 1, 399: 1, 400: 2, 100_000: 2}
    for length in (0, -5):
        with pytest.raises(ValueError, match=f"at least 1 token, got length {length}"):
            made.at(length)


def test_layer_is_at() -> None:
    made = moments()
    for length in (1, 64, 65, 3968, 3969, 32769):
        [(mean, covariance)] = made.find_layer(0, [length], CPU)
        whole = made.at(length)
        torch.testing.assert_close(mean, whole[0][:1].float())
        torch.testing.assert_close(covariance, whole[1][:1].float())
        assert mean.dtype == covariance.dtype == torch.float32
        assert made.find_layer(0, [length], CPU)[0][0] is mean  # kept, as every token asks again


def test_what_callers_keep_is_not_made_again() -> None:
    """Any number of caches take turns, each of which keeps its own; what nobody has is let go of."""
    made = moments()
    each = 3 * 8 * 4 + 3 * 8 * 8 * 4
    for length in range(1, 2000):  # a growing one leaves no trail
        made.find_layer(0, [round_length(length)], CPU)
    assert made.device_bytes == 0
    lengths = (100, 2000, 5000, 9000)
    turns = {length: made.find_layer(0, [length], CPU)[0] for length in lengths}
    assert made.device_bytes == 4 * each
    for length in lengths * 2:
        found = made.find_layer(0, [length], CPU)[0]
        assert all(again is before for again, before in zip(found, turns[length], strict=True))
    turns.clear()
    assert made.device_bytes == each  # the last one found
    del found
    assert made.device_bytes == 0


def test_rows_of_several_lengths_are_made_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the same tensors: a row whose length has changed is written anew, and no other. It takes the moments of a row
    that has them already."""
    made, kept, asked, original = moments(), LayerMoments(), [], KeyMoments._find_layer_at

    def counted(self: KeyMoments, layer: int, length: int, *where: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        asked.append(length)
        return original(self, layer, length, *where)

    monkeypatch.setattr(KeyMoments, "_find_layer_at", counted)
    first = kept.get(made, 1, (64, 128, 64), CPU, UNSHARDED)
    changes = {
        (64, 128, 64): [],
        (64, 192, 64): [192],
        (64, 192, 128): [128],
        (192, 192, 256): [256],
        (256, 128, 128): [128],
    }
    for lengths, new in changes.items():
        asked.clear()
        found = kept.get(made, 1, lengths, CPU, UNSHARDED)
        assert asked == new
        assert found is first
        for row, length in enumerate(lengths):
            for part, whole in zip(found, original(made, 1, length), strict=True):
                torch.testing.assert_close(part.view(len(lengths), *whole.shape)[row], whole.float())
    assert kept.nbytes == 3 * (3 * 8 * 4 + 3 * 8 * 8 * 4)
    assert made.device_bytes == 0
    (shared,), alone = made.find_layer(1, [64], CPU), kept.get(made, 1, (64,), CPU, UNSHARDED)
    assert all(mine.data_ptr() == theirs.data_ptr() for mine, theirs in zip(alone, shared, strict=True))
    assert kept.nbytes == 0
    assert copy.deepcopy(kept).get(made, 1, (64,), CPU, UNSHARDED)[0].data_ptr() == shared[0].data_ptr()


def test_where_graphs_replay_one_length_is_written_in_place_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs of other layers and caches stay as they are."""
    monkeypatch.setattr(of_layer, "REPLAYING", ("cpu",))
    made, kept, others = moments(), LayerMoments(), LayerMoments()
    first, before = kept.get(made, 1, (64,), CPU, UNSHARDED), others.get(made, 1, (64,), CPU, UNSHARDED)
    assert kept.get(made, 1, (128,), CPU, UNSHARDED) is first
    for length, found in ((128, first), (64, before)):
        for part, whole in zip(found, made._find_layer_at(1, length), strict=True):
            torch.testing.assert_close(part.view(whole.shape), whole.float())
    assert kept.nbytes == 3 * 8 * 4 + 3 * 8 * 8 * 4


@pytest.mark.parametrize(("name", "calls", "lengths"), [("cat", 0, (64, 128, 192)), ("_find_layer_at", 1, (192, 256))])
def test_errors_leave_nothing_half_written(
    name: str, calls: int, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither one row instead of several, nor one row of the new length and one of the old."""
    made, kept, where = moments(), LayerMoments(), torch if name == "cat" else KeyMoments
    before = [part.clone() for part in kept.get(made, 0, (64, 128), CPU, UNSHARDED)]
    works = [getattr(where, name)] * calls

    def fails(*args: Any) -> Any:
        if works:
            return works.pop()(*args)
        raise RuntimeError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(where, name, fails)
        with pytest.raises(RuntimeError, match="no room"):
            kept.get(made, 0, lengths, CPU, UNSHARDED)
    torch.testing.assert_close([*kept.get(made, 0, (64, 128), CPU, UNSHARDED)], before, rtol=0, atol=0)


def test_rounding() -> None:
    """Up, by at most 64 or one part in 32; monotone; to itself; exact where longrope models change."""
    before = 0
    for length in [*range(1, 5000), 32767, 32768, 32769, 131072, 131073, 1_000_001]:
        up = round_length(length)
        assert length <= up <= length + max(63, length / 32)
        assert up >= before
        assert round_length(up) == up
        before = up
    assert round_length(4096 - 128) == 4096 - 128  # 4,096 tokens with sinks and window, and one more is beyond
    assert len({round_length(length) for length in range(16384, 32768)}) <= 33


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mean": torch.zeros(2, 3)}, r"mean \[lengths, layers, kv_heads, dim\].*got \[2, 3\]"),
        ({"mean": torch.zeros(1, 2, 3, 7)}, r"got \[1, 2, 3, 7\] and \[1, 2, 3, 8, 8\]"),
        ({"covariance": torch.zeros(1, 2, 3, 8, 7)}, r"got \[1, 2, 3, 8\] and \[1, 2, 3, 8, 7\]"),
        ({"mean": torch.full((1, 2, 3, 8), torch.nan)}, "nan or infinity"),
        ({"covariance": torch.full((1, 2, 3, 8, 8), torch.inf)}, "nan or infinity"),
        ({"lengths": (100,)}, "one for each layer, and no lengths"),
        ({"rotations": (Rotation(8),)}, "one for each layer"),
        ({"rotations": (Rotation(8), Rotation(6))}, "one for each layer"),
        ({"rotations": ()}, r"take 1 ascending lengths, got \[\]"),
        ({"rotations": (), "lengths": (5, 6)}, r"take 1 ascending lengths, got \[5, 6\]"),
        ({"rotations": (), "lengths": (0,)}, r"take 1 ascending lengths, got \[0\]"),
    ],
)
def test_validation(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"KeyMoments.*{message}"):
        moments(**changes)


def test_lengths_ascend() -> None:
    for lengths in ((200, 100), (100, 100)):
        with pytest.raises(ValueError, match="ascending lengths"):
            listed(*lengths)


# -- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("made", [moments(), listed(100, 200)], ids=["rotations", "lengths"])
def test_save_and_load(tmp_path: Path, made: KeyMoments) -> None:
    made = moments(
        **{name: getattr(made, name) for name in ("mean", "covariance", "lengths", "rotations")},
        rope={"rope_parameters": {"rope_theta": 1e4}},
        origin={"seed": 3},
    )
    made.save(tmp_path / "moments.safetensors")
    loaded = KeyMoments.load(str(tmp_path / "moments.safetensors"))
    for name in vars(made).keys() - {"_placed"}:
        ours, theirs = getattr(made, name), getattr(loaded, name)
        assert torch.equal(ours, theirs) if isinstance(ours, Tensor) else ours == theirs
    assert torch.equal(loaded.at(333)[1], made.at(333)[1])  # frequencies too, to the bit
    assert [path.name for path in tmp_path.iterdir()] == ["moments.safetensors"]  # no temporary is left


def test_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "moments.safetensors"
    moments().save(path)
    before = path.read_bytes()

    def full_disk(*args: object, **named: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("os.replace", full_disk)
    with pytest.raises(OSError, match="no space"):
        moments(tokens=5).save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no qada-moments file at .*missing\.safetensors"):
        KeyMoments.load(tmp_path / "missing.safetensors")
    with pytest.raises(FileNotFoundError, match="qada-moments"):
        KeyMoments.load(tmp_path)  # a folder
    with pytest.raises(ValueError, match="revision is for a repository"):
        KeyMoments.load(tmp_path, revision="main")
