"""Warnings that are said once in a process."""

import functools
import logging


@functools.cache
def warn_once(logger: logging.Logger, message: str) -> None:
    """`logger.warning`, for every message the first time only."""
    logger.warning("%s", message)
