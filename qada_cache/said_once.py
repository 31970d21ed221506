"""Warnings that are given once in a process, however often their cause comes."""

import functools
import logging

MESSAGES = 512  # that are remembered, the last ones met: messages name files and models, so there is no end of them


@functools.lru_cache(MESSAGES)
def warn_once(logger: logging.Logger, message: str) -> None:
    """Warn by `logger`, unless it has said the same before."""
    logger.warning(message)
