"""Forks of this process, which need not import again what takes seconds to import."""

import os
import traceback
import warnings
from collections.abc import Callable
from typing import Any


def fork(run: Callable[[], Any]) -> int:
    """Start a process that calls `run`; return its id. It ends with 0 if `run` returns something true, else with 1."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # there are other threads
        if child := os.fork():
            return child
    code = 1
    try:
        code = 0 if run() else 1
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def wait(child: int) -> int:
    """Wait for a process to end; return its exit code, or minus the number of the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
