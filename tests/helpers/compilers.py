"""Whether kernels can be compiled here."""

import pytest

from qada_cache.kernels.cpu import building


def compiler() -> str | None:
    """The one that would be used."""
    try:
        return building.find_compiler()
    except OSError:
        return None


needs_compiler = pytest.mark.skipif(compiler() is None, reason="needs Linux and a C++ compiler")
