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
_running: dict[subprocess.Popen[str], threading.Thread] = {}  # commands, and who waits for each
_is_over = False  # whether the interpreter ends


def _forget_commands() -> None:
    _running.clear()
    _starting.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_starting.acquire, after_in_parent=_starting.release, after_in_child=_forget_commands)


def run_command(
    command: list[str], *, timeout: float, scratch: str | Path | None = None
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run`, with the command's output; SubprocessError, if it takes longer than `timeout` seconds. Its
    temporary files are in `scratch`. An interpreter that ends meanwhile ends it, so that daemons can wait for it, and
    starts no other."""
    with _start(command, scratch) as process:
        try:
            output = process.communicate(timeout=timeout)
        except BaseException:
            _kill(process)
            raise
        finally:
            _running.pop(process, None)
    return subprocess.CompletedProcess(command, process.returncode, *output)


def _start(command: list[str], scratch: str | Path | None) -> subprocess.Popen[str]:
    environment = None if scratch is None else {**os.environ, "TMPDIR": str(scratch)}
    with _starting:
        if _is_over:
            raise OSError("the interpreter ends")
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",  # compilers speak the user's language, in whatever encoding
            env=environment,
            start_new_session=True,  # one signal ends all of it
        )
        _running[process] = threading.current_thread()
    return process


def _kill(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)


@atexit.register
def _end() -> None:
    global _is_over
    with _starting:
        _is_over = True
        running = list(_running.items())
    for process, thread in running:
        _kill(process)
        thread.join(END_SECONDS)
