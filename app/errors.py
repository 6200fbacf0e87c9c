"""Errors of the command line itself, and how errors are shown."""

import sys

from mlx_spec.errors import SpecError


class UsageError(SpecError):
    """The command line asks for something that cannot be."""


def report(error: Exception) -> None:
    """Print an error in one line on stderr, and its hint in another."""
    message = error.message if isinstance(error, SpecError) else str(error)
    print(f"error: {message or type(error).__name__}", file=sys.stderr)
    if isinstance(error, SpecError) and error.hint:
        print(f"hint: {error.hint}", file=sys.stderr)
