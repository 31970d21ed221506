"""An offloaded bulk with small blocks, counted."""

from collections.abc import Iterator
from unittest import mock

import pytest
from scenarios import small_buffers
from stand_in import Copies, accelerator

from qada_cache.storage import bulk


@pytest.fixture
def copies(request: pytest.FixtureRequest) -> Iterator[Copies]:
    """Streams in blocks of 7 tokens; on the CPU, offloads as an accelerator would."""
    with (
        mock.patch.object(bulk, "STREAM_TOKENS", 7),
        small_buffers(),
        accelerator(request.node.callspec.params["device"]) as spy,
    ):
        yield spy
