"""The ``mlx-spec`` command: finds the sub-command and owns errors and exit codes.

Only the chosen sub-command's module is imported; help and version load neither MLX
nor Textual.
"""

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from types import TracebackType
from typing import NoReturn, Protocol

from mlx_spec._version import __version__
from mlx_spec.errors import SpecError
from mlx_spec_app.backend import Backend, LibraryBackend
from mlx_spec_app.errors import UsageError, report
from mlx_spec_app.settings import flags_from, quiet_libraries
from mlx_spec_app.streams import is_terminal, prepare

RUNTIME_ERROR, USAGE_ERROR, INTERRUPTED = 1, 2, 130

COMMANDS = {
    "chat": ("mlx_spec_app.chat_command", "chat in the terminal (the default)"),
    "generate": ("mlx_spec_app.generate_command", "answer one prompt on stdout"),
    "bench": ("mlx_spec_app.bench_command", "measure speed on this machine"),
}


class Command(Protocol):
    """What a sub-command's module offers."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the flags."""
        ...

    def run(self, args: argparse.Namespace, backend: Backend) -> int:
        """Do the work; return the exit code."""
        ...


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are errors of usage like all others."""

    def error(self, message: str) -> NoReturn:
        """Refuse the command line."""
        raise UsageError(message, f"{self.prog} --help lists the options")


def main(argv: Sequence[str] | None = None, backend: Backend | None = None) -> int:
    """Run the command line; return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    is_debug = "--debug" in words
    prepare()
    if argv is None and not is_debug:
        sys.excepthook = _report_unforeseen
    try:
        return _run(words, backend or LibraryBackend())
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader is gone; keep the interpreter from complaining at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return RUNTIME_ERROR
    except (SpecError, OSError) as error:
        if is_debug:
            traceback.print_exc()
        report(error)
        return USAGE_ERROR if isinstance(error, UsageError) else RUNTIME_ERROR


def _report_unforeseen(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Show what nobody foresaw without its traceback; Python then exits with 1."""
    print(f"error: {kind.__name__}: {error}", file=sys.stderr)
    print("hint: --debug shows where it came from", file=sys.stderr)


def _run(words: list[str], backend: Backend) -> int:
    name = _command_name(words)
    if name is None:
        return _without_command(words)
    module, text = COMMANDS[name]
    command: Command = import_module(module)
    parser = Parser(
        prog=f"mlx-spec {name}",
        description=f"{text[0].upper()}{text[1:]}.",
        epilog="MLX_SPEC_MODEL, MLX_SPEC_TEMP and the like give defaults of flags.",
    )
    command.add_arguments(parser)
    _add_version(parser)
    parser.add_argument(
        "--debug", action="store_true", help="show where an error came from"
    )
    args = _parse(parser, words[1:])
    # In the chat the screen is the whole terminal.
    quiet_libraries(with_progress=name != "chat" and is_terminal(sys.stderr))
    return command.run(args, backend)


def _parse(parser: Parser, words: list[str]) -> argparse.Namespace:
    """Parse what was typed, on top of those environment variables that apply."""
    flags = []
    for variable, flag in flags_from(parser.parse_args(words)).items():
        try:
            _, unknown = parser.parse_known_args([flag])
        except UsageError as error:
            raise UsageError(f"{variable}: {error.message}", error.hint) from error
        if not unknown:
            flags.append(flag)
    return parser.parse_args([*flags, *words])


def _command_name(words: list[str]) -> str | None:
    """Return the sub-command, putting the implied one in front of ``words``."""
    if words and words[0] in COMMANDS:
        return words[0]
    if words and (not words[0].startswith("-") or words[0] in _TOP_LEVEL):
        return None
    has_prompt = any(
        word == "--prompt" or word.startswith(("-p", "--prompt=")) for word in words
    )
    name = "chat" if is_terminal(sys.stdin) and not has_prompt else "generate"
    words.insert(0, name)
    return name


_TOP_LEVEL = ("-h", "--help", "--version")


def _without_command(words: list[str]) -> int:
    parser = _top_parser()
    if words[0] in _TOP_LEVEL:
        parser.parse_args(words[:1])  # prints, and exits
    parser.print_usage(sys.stderr)
    known = ", ".join(COMMANDS)
    report(UsageError(f"there is no command {words[0]!r}", f"commands: {known}"))
    return USAGE_ERROR


def _add_version(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--version",
        action="version",
        version=f"mlx-spec {__version__}",
        help="show the version and exit",
    )


def _top_parser() -> argparse.ArgumentParser:
    listing = "\n".join(f"  {name:<10} {text}" for name, (_, text) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="mlx-spec",
        usage="mlx-spec [COMMAND] [OPTIONS]",
        description="Lossless speculative decoding on MLX.",
        epilog=f"commands:\n{listing}\n\n"
        "mlx-spec COMMAND --help lists the options of a command. Without a command, a "
        "terminal\ngets the chat; with -p or a pipe the answer goes to stdout. "
        "Without a model, the\nsmall demo model that is installed with mlx-spec is "
        "used.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_version(parser)
    return parser
