"""The most memory of this process, where Linux tells."""

import contextlib
from pathlib import Path

_STATUS, _FORGET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class PeakMemory:
    """What the process takes above what it has now, since this was made."""

    def __init__(self) -> None:
        with contextlib.suppress(OSError):
            _FORGET.write_text("5", encoding="utf-8")  # the highest so far
        self._before = _read_bytes("VmRSS")

    @property
    def nbytes(self) -> int | None:
        """Bytes, at the highest; None where the system does not tell."""
        highest = _read_bytes("VmHWM")
        return None if highest is None or self._before is None else max(0, highest - self._before)


def _read_bytes(name: str) -> int | None:
    try:
        lines = _STATUS.read_text(encoding="utf-8").splitlines()
        return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), None)
    except OSError:
        return None
