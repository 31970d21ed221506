"""Warnings that are given once, in a process that runs for long."""

import logging

import pytest

from qada_cache.said_once import MESSAGES, warn_once

logger = logging.getLogger("qada_cache.of_these_tests")


def test_what_recurs_is_said_once_among_messages_without_end(caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    for number in range(3 * MESSAGES):
        warn_once(logger, "the same")
        warn_once(logger, f"file {number}")
    assert [record.getMessage() for record in caplog.records].count("the same") == 1
    assert len(caplog.records) == 3 * MESSAGES + 1
    assert warn_once.cache_info().currsize == MESSAGES
