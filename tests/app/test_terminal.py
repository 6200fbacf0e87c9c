"""The chat in a terminal of its own: how it begins and how it ends."""

import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.checkpoints import write_text_checkpoint

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


EMBEDDED = """
import sys
from pathlib import Path
from mlx_spec_app.cli import main
from mlx_spec_models import embedded

embedded.EMBEDDED_MODEL = Path(sys.argv[1])
sys.exit(main([]))
"""


def test_a_chat_without_a_model_loads_the_embedded_one(tmp_path: Path) -> None:
    folder = write_text_checkpoint(tmp_path / "model")
    terminal = Terminal("-c", EMBEDDED, str(folder))
    terminal.read_until("demo model")
    terminal.read_until("drafter: lookup")
    assert "tiny-moe (embedded)" in terminal.shown
    assert str(folder) not in terminal.shown
    terminal.type(b"\x04")
    assert terminal.exit_code() == 0


def test_a_chat_without_its_embedded_model_says_so_before_the_screen() -> None:
    terminal = Terminal("-c", EMBEDDED, "/no/such/folder")
    assert terminal.exit_code() == 1
    assert "error: the embedded model is missing" in terminal.shown
    assert "\x1b[?1049h" not in terminal.shown
