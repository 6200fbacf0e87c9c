"""``mlx-spec chat``: the terminal chat."""

import argparse
import sys
from typing import TYPE_CHECKING

from mlx_spec_app.arguments import (
    add_generation_arguments,
    add_model_arguments,
    request_from,
)
from mlx_spec_app.errors import UsageError, report

if TYPE_CHECKING:
    from mlx_spec_app.backend import Backend


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add_model_arguments(parser)
    add_generation_arguments(parser, max_tokens=4096)


def run(args: argparse.Namespace, backend: "Backend") -> int:
    """Run the chat until the user leaves; return the exit code."""
    request = request_from(args)
    if not all(s.isatty() for s in (sys.stdin, sys.stdout, sys.stderr)):
        raise UsageError(
            "the chat needs a terminal", "use mlx-spec generate with -p or a pipe"
        )
    from mlx_spec_app.chat.app import ChatApp

    app = ChatApp(request, backend)
    app.run()
    if app.failure is not None:
        report(app.failure)
        return 1
    return 0
