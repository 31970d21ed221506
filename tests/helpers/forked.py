"""Other processes that need not import what takes seconds: copies of this one."""

import os
import traceback
import warnings
from collections.abc import Callable
from typing import Any


def fork(run: Callable[[], Any]) -> int:
    """The number of a process that runs this, and ends well if it returns something."""
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
    """How it ended: 0, what it said, or the number of the signal that ended it, negative."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
