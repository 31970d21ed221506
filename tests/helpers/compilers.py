"""Whether kernels can be compiled and run here."""

import pytest

from qada_cache.kernels.cpu import building, prompt, selected_prompt


def compiler() -> str | None:
    """The one that would be used."""
    try:
        return building.find_compiler()
    except OSError:
        return None


needs_compiler = pytest.mark.skipif(compiler() is None, reason="needs Linux and a C++ compiler")
needs_pairs = pytest.mark.skipif(
    not prompt.read_instructions() >= prompt.NEEDED, reason="this processor multiplies no pairs of bfloat16"
)
needs_bytes = pytest.mark.skipif(
    not prompt.read_instructions() >= selected_prompt.NEEDED, reason="this processor selects no prompts"
)
