"""Locks in a forked process, which has none of the threads that held them."""

import os
from typing import TypeVar

Lock = TypeVar("Lock")


def renew(lock: Lock) -> Lock:
    """`lock`, which from now on is free in every process that is forked from this one."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lock._at_fork_reinit)  # type: ignore[attr-defined]  # as threading does
    return lock
