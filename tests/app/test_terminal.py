"""The chat in a terminal of its own: how it begins and how it ends."""

import os
import pty
import select
import subprocess
import sys
import time

import pytest

BUSY = """
import sys
from mlx_spec_app.cli import main

class Busy:
    def load(self, request):
        import mlx.core as mx
        while True:
            mx.eval(mx.ones((3000, 3000), stream=mx.cpu))

sys.exit(main(["chat", "some/model"], Busy()))
"""


class Terminal:
    """A process whose standard streams are a terminal."""

    def __init__(self, *words: str) -> None:
        self._fd, inner = pty.openpty()
        self.shown = ""
        self._process = subprocess.Popen(
            [sys.executable, *words],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            start_new_session=True,
            env={
                "PATH": "/usr/bin:/bin",
                "PYTHONPATH": ":".join(sys.path),
                "TERM": "xterm-256color",
                "COLUMNS": "80",
                "LINES": "24",
            },
        )
        os.close(inner)

    def read_until(self, text: str) -> None:
        """Read what is shown until a text is."""
        deadline = time.monotonic() + 60
        while text not in self.shown:
            assert time.monotonic() < deadline, self.shown
            if select.select([self._fd], [], [], 0.1)[0]:
                self.shown += os.read(self._fd, 65536).decode(errors="replace")

    def type(self, keys: bytes) -> None:
        os.write(self._fd, keys)

    def exit_code(self) -> int:
        """Read the rest, and wait for the end."""
        deadline = time.monotonic() + 60
        while self._process.poll() is None:
            assert time.monotonic() < deadline, self.shown
            if select.select([self._fd], [], [], 0.1)[0]:
                try:
                    self.shown += os.read(self._fd, 65536).decode(errors="replace")
                except OSError:  # Linux: the other side is closed
                    break
        return self._process.wait(60)


def test_leaving_while_the_model_is_busy_ends_quietly() -> None:
    terminal = Terminal("-c", BUSY)
    terminal.read_until("loading some/model")
    time.sleep(1)  # so that the thread is at it
    begin = time.monotonic()
    terminal.type(b"\x04")
    assert terminal.exit_code() == 0
    assert time.monotonic() - begin < 30
    assert "terminate" not in terminal.shown
    assert "Traceback" not in terminal.shown


@pytest.mark.parametrize("command", [[], ["chat"]])
def test_a_model_that_is_not_there_is_an_error_after_the_screen(
    command: list[str],
) -> None:
    terminal = Terminal("-m", "mlx_spec_app", *command, "--model", "/no/such/folder")
    assert terminal.exit_code() == 1
    terminal.read_until("check the path of the model")
    screen_left = terminal.shown.rindex("\x1b[?1049l")
    assert terminal.shown.index("error: there is no folder") > screen_left


def test_a_chat_without_a_model_says_so() -> None:
    terminal = Terminal("-m", "mlx_spec_app")
    assert terminal.exit_code() == 2
    assert "error: no model is given" in terminal.shown
