"""Key moments in a repository of the Hub, which is not there."""

import socket
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from models import tiny
from test_key_moments import moments

from qada_cache import KeyMoments, QAdACache


def test_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pushed and loaded under one name, through the Hub's client; the Hub itself is a folder here."""

    class Hub:
        def create_repo(self, repository: str, **options: Any) -> None:
            assert options == {"exist_ok": True, "private": None}
            (tmp_path / repository).mkdir(parents=True)

        def upload_file(self, *, path_or_fileobj: str, path_in_repo: str, repo_id: str, **options: Any) -> str:
            (tmp_path / repo_id / path_in_repo).write_bytes(Path(path_or_fileobj).read_bytes())
            assert options == {"revision": "v1", "commit_message": "Key moments of llama, random-words"}
            return "https://hub/commit"

    def download(repository: str, name: str, *, revision: str | None) -> str:
        assert revision == "v1"
        return str(tmp_path / repository / name)

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    made = moments()
    assert made.push_to_hub("me/moments", revision="v1") == "https://hub/commit"
    assert torch.equal(KeyMoments.load("hf://me/moments", revision="v1").mean, made.mean)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (LocalEntryNotFoundError("offline"), "cannot be reached"),
        (EntryNotFoundError("404"), "no moments.safetensors in"),
    ],
)
def test_hub_without_the_file(error: Exception, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*args: object, **options: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    with pytest.raises(FileNotFoundError, match=f"no file at hf://me/moments, and .*{message}"):
        KeyMoments.load("hf://me/moments")


@pytest.mark.parametrize("mistyped", ["my/moment", "moments/of/mine", "random_tokens"])
def test_a_mistyped_path_asks_nothing_of_the_network(mistyped: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a request was made")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    for moments_of in (mistyped, ("current", mistyped), f"current+{mistyped}"):
        with pytest.raises(FileNotFoundError, match=f"no qada-moments file at {mistyped}.* hf://owner/name"):
            QAdACache(tiny(), moments=moments_of)
