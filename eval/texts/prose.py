"""Real prose that needs no download."""

import pydoc_data.topics


def reference_text() -> str:
    """The Python language reference, which every Python carries: real prose, without a download."""
    return "\n\n".join(pydoc_data.topics.topics.values())
