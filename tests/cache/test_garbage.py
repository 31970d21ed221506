"""Garbage is not collected while somebody must not be disturbed."""

import gc
from contextlib import ExitStack

from qada_cache.garbage import without_collecting


def test_the_last_one_inside_lets_garbage_be_collected() -> None:
    """However threads come and go."""
    assert gc.isenabled()
    first, second = ExitStack(), ExitStack()
    first.enter_context(without_collecting())
    second.enter_context(without_collecting())
    first.close()
    assert not gc.isenabled()
    second.close()
    assert gc.isenabled()
    gc.disable()
    try:
        with without_collecting():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
