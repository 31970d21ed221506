"""Files are written whole or not at all, where any other program would write them, and checked when they are read."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from forked import fork, wait
from models import exact, generate, limited_file_size, prompt, tiny
from safetensors.torch import save
from torch import Tensor

from qada_cache import QAdACache, files
from qada_cache.files import private_map, tensor_file


@pytest.mark.parametrize("failing", ["files.tensor_file._view_bytes", "files.os.replace"])
def test_an_interrupted_save_leaves_the_old_file(failing: str, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, model = saved.read_bytes(), tiny()
    cache = exact(model)
    generate(model, prompt(90)[0], cache)

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(f"qada_cache.{failing}", interrupt)
        with pytest.raises(KeyboardInterrupt):
            cache.save(saved)
    assert saved.read_bytes() == before
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]  # and nothing half-written beside it
    cache.save(saved)
    assert QAdACache.load(saved, model).get_seq_length() == cache.get_seq_length()


def test_a_full_disk_says_which_file(saved: Path) -> None:
    before, model = saved.read_bytes(), tiny()
    cache = QAdACache.load(saved, model)
    with limited_file_size(len(before) // 2), pytest.raises(OSError, match=f"File too large: '{saved}'") as caught:
        cache.save(saved)
    assert caught.value.errno == errno.EFBIG
    with pytest.raises(FileNotFoundError, match=f"'{saved.parent}/missing/cache'"):
        cache.save(saved.parent / "missing" / "cache")
    assert saved.read_bytes() == before
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


def test_what_killed_processes_left_is_removed_by_the_next_save(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = QAdACache.load(saved, tiny())
    with monkeypatch.context() as patch:
        patch.setattr(tensor_file, "_view_bytes", lambda tensor: os.kill(os.getpid(), signal.SIGKILL))
        assert wait(fork(lambda: cache.save(saved))) == -signal.SIGKILL
    left = set(saved.parent.iterdir()) - {saved}
    assert len(left) == 1
    other = saved.with_name("other")
    cache.save(other)
    assert set(saved.parent.iterdir()) - {saved, other} == left  # of another name, and young
    cache.save(saved)
    assert set(saved.parent.iterdir()) == {saved, other}


@pytest.mark.parametrize("locks", [True, False])
def test_what_a_process_is_writing_is_left_to_it(locks: bool, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another save of the same name, half done, whether or not the file system locks."""
    cache, sizes, content = QAdACache.load(saved, tiny()), [], tensor_file._view_bytes
    if not locks:
        monkeypatch.setattr(files.fcntl, "flock", mock.Mock(side_effect=OSError(errno.ENOLCK, "no locks")))

    def write_within(tensor: Tensor) -> memoryview:
        if not sizes:
            sizes.append(0)  # once
            sizes.append(len(list(saved.parent.iterdir())))
            cache.save(saved)
            sizes.append(len(list(saved.parent.iterdir())))
        return content(tensor)

    begun = files._begin

    def then_patch(*arguments: Any) -> Any:
        found = begun(*arguments)
        monkeypatch.setattr(tensor_file, "_view_bytes", write_within)
        return found

    monkeypatch.setattr(files, "_begin", then_patch)
    cache.save(saved)
    assert sizes == [0, 2, 2]
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]
    QAdACache.load(saved, tiny())


def test_what_another_process_removed_before_it_was_locked_is_begun_again(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, lock, before = QAdACache.load(saved, tiny()), files.fcntl.flock, []

    def lose(descriptor: int, operation: int) -> None:
        if operation == files.fcntl.LOCK_EX and not before:
            before.extend(path for path in saved.parent.iterdir() if path != saved)
            before[0].unlink()
        lock(descriptor, operation)

    monkeypatch.setattr(files.fcntl, "flock", lose)
    saved.unlink()
    cache.save(saved)
    assert len(before) == 1
    assert list(saved.parent.iterdir()) == [saved]


def test_links_are_written_through(saved: Path) -> None:
    cache, link = QAdACache.load(saved, tiny()), saved.with_name("link")
    for target in (saved.name, "new"):  # the second of them leads nowhere yet
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        cache.save(link)
        assert link.is_symlink()
        assert QAdACache.load(saved.with_name(target), tiny()).get_seq_length() == cache.get_seq_length()


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
@pytest.mark.parametrize("linked", [False, True])
def test_what_is_no_file_is_not_replaced(linked: bool, make: Callable[[Path], None], saved: Path) -> None:
    cache, path = QAdACache.load(saved, tiny()), saved.with_name("taken")
    make(path)
    before = path.stat()
    if linked:
        path = saved.with_name("link")
        path.symlink_to("taken")
    with pytest.raises(OSError, match=f"not a regular file: '{path}'"):
        cache.save(path)
    assert path.stat() == before


def test_permissions_are_those_of_any_new_file(saved: Path) -> None:
    cache, path = QAdACache.load(saved, tiny()), saved.with_name("other")
    umask = os.umask(0o027)
    try:
        cache.save(path)
        assert path.stat().st_mode & 0o777 == 0o640
        path.chmod(0o604)
        cache.save(path)
    finally:
        os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o604  # an old one keeps its own


def test_every_dtype_that_is_written_can_be_read(tmp_path: Path) -> None:
    tensors = {str(dtype): torch.tensor([0, 1, 0]).to(dtype) for dtype in tensor_file._DTYPES}
    tensors |= {"empty": torch.zeros(0, 3), "scalar": torch.tensor(2.0), "a view": torch.arange(6).view(2, 3).T}
    tensors["one of every fourth"] = torch.arange(8.0)[1::4][:1]  # contiguous, as it is of one number
    tensor_file.write(tmp_path / "file", "qada-test", tensors, {})
    found, _ = tensor_file.read(tmp_path / "file", "qada-test")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    with pytest.raises(NotImplementedError, match=r"complex is of torch\.complex64"):
        tensor_file.write(tmp_path / "file", "qada-test", {"complex": torch.zeros(2, dtype=torch.complex64)}, {})


def test_files_read_from_memory_or_mapped_are_checked_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_map, "WORTH", 1)
    tensor_file.write(tmp_path / "file", "qada-test", {"x": torch.arange(5)}, {"y": 1})
    content = (tmp_path / "file").read_bytes()
    tensors, state = tensor_file.decode(content, "qada-test", tmp_path / "file")
    assert tensors["x"].tolist() == [0, 1, 2, 3, 4]
    assert state == {"y": 1}
    for damaged, message in (
        (content[:-1], "truncated"),
        (content[:-1] + b"x", "was altered"),
        (content.replace(b"I64", b"U64"), "was altered"),
        (b"", "truncated"),
        (save({"x": torch.ones(1)}), "is not a qada-test file"),
    ):
        with pytest.raises(ValueError, match=message):
            tensor_file.decode(damaged, "qada-test", tmp_path / "file")
        (tmp_path / "damaged").write_bytes(damaged)
        with pytest.raises(ValueError, match=message):
            tensor_file.map_file(tmp_path / "damaged", "qada-test")


def test_what_is_mapped_lies_as_aligned_as_what_torch_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mapped tensors are aligned as torch aligns its own; otherwise matrix products would differ in their last bits."""
    monkeypatch.setattr(private_map, "WORTH", 1)
    tensors = {"count": torch.ones(3), "keys": torch.ones(2, 16), "codes": torch.ones(5, 64, dtype=torch.uint8)}
    for note in ("", "a longer header"):
        tensor_file.write(tmp_path / "file", "qada-test", tensors, {"note": note})
        found, _, source = tensor_file.map_file(tmp_path / "file", "qada-test")
        assert source is not None
        assert [found[name].data_ptr() % 64 for name in ("keys", "codes")] == [0, 0]
