"""A command that does not outlive this process, nor do those that it starts, as compilers do."""

import atexit
import contextlib
import functools
import os
import signal
import subprocess
import threading

END_SECONDS = 5  # for a thread to clear up behind its command, before the interpreter ends


def run_command(command: list[str], *, timeout: float) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run`, with the command's output; SubprocessError, if it takes longer than `timeout` seconds. An
    interpreter that ends meanwhile ends it, so that threads can wait for it."""
    # Compilers speak the user's language, in whatever encoding. A session of its own: one signal ends all of it.
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        end = functools.partial(_end, process, os.getpid(), threading.current_thread())
        atexit.register(end)
        try:
            output = process.communicate(timeout=timeout)
        except BaseException:
            _kill(process)
            raise
        finally:
            atexit.unregister(end)
    return subprocess.CompletedProcess(command, process.returncode, *output)


def _kill(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)


def _end(process: subprocess.Popen[str], owner: int, thread: threading.Thread) -> None:
    if os.getpid() == owner:  # a forked process has this function, too
        _kill(process)
        thread.join(END_SECONDS)
