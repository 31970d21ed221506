"""Starts processes that work together, as `torchrun` and `accelerate launch` do, on a free port."""

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
    """Run `python -m command`; return the output of it and of the processes that it starts.

    Afterwards all have ended, also if they failed or hung. The error of a failure shows their output.
    """
    quiet = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
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
    """Run the script with `folder` and the arguments in `ranks` processes; return what each wrote with `report`, in the
    order of ranks."""
    path = os.pathsep.join(filter(None, [str(REPOSITORY), str(HELPERS), os.environ.get("PYTHONPATH")]))
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    launch(*launcher, script, folder, *arguments, PYTHONPATH=path, **variables)
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


def report(folder: str | Path, found: Any) -> None:
    """Write this rank's result to a file in `folder`: printed lines of several ranks would mix."""
    Path(folder, f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found))


def refusal(call: Callable[[], object]) -> str:
    """The message of the `NotImplementedError` that a call raises; empty if it raises none."""
    try:
        call()
    except NotImplementedError as error:
        return str(error)
    return ""
