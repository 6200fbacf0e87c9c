"""``mlx-spec chat``: the terminal chat."""

import argparse
import os
import sys
from typing import TYPE_CHECKING

from mlx_spec_app.arguments import (
    add_generation_arguments,
    add_model_arguments,
    request_from,
)
from mlx_spec_app.errors import UsageError
from mlx_spec_app.streams import is_terminal

if TYPE_CHECKING:
    from mlx_spec_app.backend import Backend


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add_model_arguments(parser)
    add_generation_arguments(parser, max_tokens=4096)


def run(args: argparse.Namespace, backend: "Backend") -> int:
    """Run the chat until the user leaves; return the exit code."""
    request = request_from(args)
    if not all(map(is_terminal, (sys.stdin, sys.stdout, sys.stderr))):
        raise UsageError(
            "the chat needs a terminal", "use mlx-spec generate with -p or a pipe"
        )
    from mlx_spec_app.chat.app import ChatApp

    app = ChatApp(request, backend)
    app.run()
    code = app.return_code or 0
    if not app.engine.join():
        # Python aborts if it ends while a thread is in the middle of a forward pass.
        os._exit(code)
    if app.failure is not None:
        raise app.failure
    return code
