"""What this package keeps between processes: where, and as safetensors files that it can tell from any others."""

import hashlib
import json
import os
import secrets
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

FORMAT_VERSION = 2


def home() -> Path:
    """The folder for what is kept between processes: `QADA_HOME`, else "qada" beside the Hugging Face cache."""
    from huggingface_hub.constants import HF_HOME

    return Path(os.environ.get("QADA_HOME") or Path(HF_HOME).parent / "qada")


def write(path: str | os.PathLike, kind: str, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    """Write `tensors` and the JSON-able `state` to `path`, whole or not at all.

    `kind` names what the file is, e.g. "qada-cache"; `read` asks for it.
    """
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    header = {"kind": kind, "version": str(FORMAT_VERSION), "state": json.dumps(state)}
    header["sha256"] = _digest(header["state"], tensors)
    path = Path(path)
    # Beside the target, so that the rename cannot cross file systems; another process sees the old file or the new.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        save_file(tensors, temporary, metadata=header)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read(path: str | os.PathLike, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors (on the CPU) and state that `write` put into `path`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is truncated, altered, of another kind, or of another format; the message says which.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no {kind} file at {path}")
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file, or is truncated: {error}") from error
    if header.get("kind") != kind:
        raise ValueError(f"{path} is not a {kind} file (it says {header.get('kind', 'nothing about what it is')!r})")
    if (version := header.get("version", "")) != str(FORMAT_VERSION):
        old = version.isdigit() and int(version) < FORMAT_VERSION
        way_out = "make it again" if old else "upgrade qada-cache"
        raise ValueError(f"{path} has format version {version!r}, this qada-cache reads {FORMAT_VERSION}: {way_out}")
    if header.get("sha256") != _digest(header.get("state", ""), tensors):
        raise ValueError(f"{path} was altered after it was written (checksum mismatch)")
    return tensors, json.loads(header["state"])


def _digest(state: str, tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(state.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
