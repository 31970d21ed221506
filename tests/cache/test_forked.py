"""Locks in forked processes."""

import os
import threading

import pytest

from qada_cache.forked import renew
from qada_cache.key_moments import defaults
from qada_cache.storage import sharing, transfers


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system forks no processes")
@pytest.mark.parametrize(
    "lock",
    [renew(threading.Lock()), defaults._remembering, sharing._moving, transfers.WAITING],
    ids=["new", "moments", "sharing", "waiting"],
)
def test_a_forked_process_waits_for_no_thread_that_it_lacks(lock: threading.Lock) -> None:
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)
    if (process := os.fork()) == 0:
        os._exit(0 if lock.acquire(timeout=5) else 1)
    _, status = os.waitpid(process, 0)
    done.set()
    thread.join()
    assert status == 0
