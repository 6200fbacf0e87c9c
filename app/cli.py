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
from typing import Protocol

from mlx_spec._version import __version__
from mlx_spec.errors import SpecError
from mlx_spec_app.backend import Backend, LibraryBackend
from mlx_spec_app.errors import UsageError, report
from mlx_spec_app.settings import flags_from, quiet_libraries

OK, RUNTIME_ERROR, USAGE_ERROR, INTERRUPTED = 0, 1, 2, 130

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


def main(argv: Sequence[str] | None = None, backend: Backend | None = None) -> int:
    """Run the command line; return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    name = _command_name(words)
    if name is None:
        return _without_command(words)
    args = _parser(name, words).parse_args(_with_environment(words))
    quiet_libraries()
    command: Command = import_module(COMMANDS[name][0])
    try:
        return command.run(args, backend or LibraryBackend())
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader is gone; keep the interpreter from complaining at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return RUNTIME_ERROR
    except (SpecError, OSError) as error:
        if args.debug:
            traceback.print_exc()
        report(error)
        return USAGE_ERROR if isinstance(error, UsageError) else RUNTIME_ERROR


def _command_name(words: list[str]) -> str | None:
    """Return the sub-command, putting the implied one in front of ``words``."""
    if words and words[0] in COMMANDS:
        return words[0]
    if words and (not words[0].startswith("-") or words[0] in _TOP_LEVEL):
        return None
    has_prompt = any(
        word in ("-p", "--prompt") or word.startswith("--prompt=") for word in words
    )
    name = "generate" if has_prompt or not sys.stdin.isatty() else "chat"
    words.insert(0, name)
    return name


_TOP_LEVEL = ("-h", "--help", "--version")


def _without_command(words: list[str]) -> int:
    parser = _top_parser()
    if words[0] == "--version":
        print(f"mlx-spec {__version__}")
        return OK
    if words[0] in _TOP_LEVEL:
        parser.print_help()
        return OK
    parser.print_usage(sys.stderr)
    known = ", ".join(COMMANDS)
    report(UsageError(f"there is no command {words[0]!r}", f"commands: {known}"))
    return USAGE_ERROR


def _top_parser() -> argparse.ArgumentParser:
    listing = "\n".join(f"  {name:<10} {text}" for name, (_, text) in COMMANDS.items())
    return argparse.ArgumentParser(
        prog="mlx-spec",
        usage="mlx-spec [COMMAND] [OPTIONS]",
        description="Lossless speculative decoding on MLX.",
        epilog=f"commands:\n{listing}\n\n"
        "mlx-spec COMMAND --help lists the options of a command. Without a command, a "
        "terminal\ngets the chat; with -p or a pipe the answer goes to stdout.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=True,
    )


def _parser(name: str, words: list[str]) -> argparse.ArgumentParser:
    module, text = COMMANDS[name]
    parser = argparse.ArgumentParser(
        prog=f"mlx-spec {name}", description=f"{text[0].upper()}{text[1:]}."
    )
    command: Command = import_module(module)
    command.add_arguments(parser)
    parser.add_argument(
        "--debug", action="store_true", help="show where an error came from"
    )
    return parser


def _with_environment(words: list[str]) -> list[str]:
    """Put what the environment says before what was typed."""
    return [*(flags_from() if words[0] != "bench" else []), *words[1:]]
