"""The standard streams: any of them may be a terminal, a pipe, or closed."""

import io
import os
import sys
from typing import TextIO

from mlx_spec_app.errors import UsageError

_STDERR = 2


def prepare() -> None:
    """Write UTF-8 whatever the locale says, and keep files off closed streams."""
    # A checkpoint opened as file descriptor 0 looks like a failure to MLX.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        pass
    os.close(descriptor)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="replace")


def is_terminal(stream: TextIO | None) -> bool:
    """Tell whether a stream is open and a terminal."""
    return stream is not None and stream.isatty()


def read_stdin() -> str:
    """Read what is piped in, to its end; nothing if standard input is closed.

    Raises:
        UsageError: If it is not UTF-8.
    """
    if sys.stdin is None:
        return ""
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"the text on stdin is not UTF-8: byte {error.start} is "
            f"0x{error.object[error.start]:02x}",
            "convert it first, for example with iconv",
        ) from error
