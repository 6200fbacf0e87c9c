"""The slash commands, in one table, and what the help says."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SlashCommand:
    """One command.

    Attributes:
        names: What the user types after the slash; the first is shown.
        action: The app's action it stands for.
        help: What it does, for help and palette.
    """

    names: tuple[str, ...]
    action: str
    help: str


COMMANDS = (
    SlashCommand(("help", "?"), "help", "show this help (F1)"),
    SlashCommand(("new", "clear"), "new", "start a new conversation (Ctrl+N)"),
    SlashCommand(("stats",), "stats", "show the figures of the last answer"),
    SlashCommand(("quit", "exit", "bye"), "quit", "leave (Ctrl+D)"),
)
_BY_NAME = {name: command for command in COMMANDS for name in command.names}
_KEYS = (
    ("Enter", "send"),
    ("Shift+Enter, Ctrl+J", "new line"),
    ("Esc", "stop the answer, keeping its text"),
    ("Ctrl+C", "copy the selection, or stop; twice: leave"),
    ("Ctrl+P", "commands, themes, screenshot"),
)
FIGURES_HELP = (
    ("tok/s", "generated tokens a second, without the prompt"),
    ("acceptance length", "generated tokens per verification round"),
    ("accept rate", "accepted share of the drafted tokens that were judged"),
    ("", "(behind a rejection none is), in all and by position"),
)


def find(name: str) -> SlashCommand | None:
    """Return the command of a name such as ``/new``, if there is one."""
    return _BY_NAME.get(name.removeprefix("/").lower())


def is_command(text: str) -> bool:
    """Tell whether a message is a command; ``//`` begins one that is not."""
    return text.startswith("/") and not text.startswith("//")


def unescaped(text: str) -> str:
    """Turn a leading ``//`` into the slash that is meant."""
    return text[1:] if text.startswith("//") else text


def help_rows() -> list[tuple[str, str]]:
    """Describe keys and commands, each with what it does."""
    commands = [
        (" ".join(f"/{name}" for name in command.names), command.help)
        for command in COMMANDS
    ]
    return [*_KEYS, *commands, ("//text", "send a message that begins with a slash")]
