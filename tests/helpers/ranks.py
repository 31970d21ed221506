"""Tests that start processes which work together, as `torchrun` and `accelerate launch` do, on a free port."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
HELPERS = Path(__file__).parent


def launch(*command: str | Path, python: str | Path = sys.executable, timeout: float = 240, **variables: str) -> str:
    """What `python -m command` and the processes that it starts print.

    All are gone afterwards, whether they ended, failed or hung; what they said is shown unless they ended well.
    """
    quiet = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [python, "-m", *map(str, command)],
        env={**os.environ, **quiet, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        said, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.terminate()  # launchers end what they have started
        said, _ = process.communicate(timeout=60)
        raise AssertionError(f"not done after {timeout} s:\n{said}") from None
    finally:
        process.kill()
    assert process.returncode == 0, said
    return said


def torchrun(script: Path, folder: Path, *arguments: str | Path, ranks: int = 2, **variables: str) -> list[Any]:
    """What each rank of the script, given `folder` and the arguments, wrote with `report`, in order."""
    path = os.pathsep.join(filter(None, [str(REPOSITORY), str(HELPERS), os.environ.get("PYTHONPATH")]))
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    launch(*launcher, script, folder, *arguments, PYTHONPATH=path, **variables)
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


def report(folder: str | Path, found: Any) -> None:
    """Write what this rank found; two that print would write into each other's lines."""
    Path(folder, f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found))


def refusal(call: Callable[[], object]) -> str:
    """What a call that is not supported says; empty, if it is."""
    try:
        call()
    except NotImplementedError as error:
        return str(error)
    return ""
