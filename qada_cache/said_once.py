"""Warnings that are given once in a process, however often their cause comes."""

import functools
import logging


@functools.cache
def warn_once(logger: logging.Logger, message: str) -> None:
    """Warn by `logger`, unless it has said the same before."""
    logger.warning(message)
