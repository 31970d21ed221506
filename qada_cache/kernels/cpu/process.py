"""A command that does not outlive this process, nor do those that it starts, as compilers do."""

import atexit
import contextlib
import os
import signal
import subprocess
import threading
from pathlib import Path

END_SECONDS = 5  # for a thread to clear up behind its command, before the interpreter ends

# No process is forked while another starts: it would have the ends of pipes whose closing is waited for.
_starting = threading.Lock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_starting.acquire, after_in_parent=_starting.release, after_in_child=_starting.release)


def run_command(
    command: list[str], *, timeout: float, scratch: str | Path | None = None
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run`, with the command's output; SubprocessError, if it takes longer than `timeout` seconds. Its
    temporary files are in `scratch`. An interpreter that ends meanwhile ends it, so that daemons can wait for it."""
    running = _Running()
    atexit.register(running.end)
    try:
        with running.start(command, scratch) as process:
            try:
                output = process.communicate(timeout=timeout)
            except BaseException:
                running.kill()
                raise
    finally:
        atexit.unregister(running.end)
    return subprocess.CompletedProcess(command, process.returncode, *output)


class _Running:
    """A command, and the thread that waits for it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._is_over = False
        self._owner, self._thread = os.getpid(), threading.current_thread()

    def start(self, command: list[str], scratch: str | Path | None) -> subprocess.Popen[str]:
        environment = None if scratch is None else {**os.environ, "TMPDIR": str(scratch)}
        with _starting:
            if self._is_over:
                raise OSError("the interpreter ends")
            self._process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",  # compilers speak the user's language, in whatever encoding
                env=environment,
                start_new_session=True,  # one signal ends all of it
            )
        return self._process

    def kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> None:
        """For the end of the interpreter."""
        if os.getpid() == self._owner:  # a forked process has this function, too
            with _starting:
                self._is_over = True
            self.kill()
            self._thread.join(END_SECONDS)
