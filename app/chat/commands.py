"""The slash commands, in one table."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SlashCommand:
    """One command.

    Attributes:
        names: What the user types after the slash; the first is shown.
        action: The app's action it stands for.
        help: What it does, for the help text.
    """

    names: tuple[str, ...]
    action: str
    help: str


COMMANDS = (
    SlashCommand(("help", "?"), "help", "show this help"),
    SlashCommand(("new", "clear"), "new", "start a new conversation"),
    SlashCommand(("stats",), "stats", "show the figures of the last answer"),
    SlashCommand(("quit", "exit", "bye"), "quit", "leave"),
)
_BY_NAME = {name: command for command in COMMANDS for name in command.names}


def find(text: str) -> SlashCommand | None:
    """Return the command a line such as ``/new`` names, if there is one."""
    return _BY_NAME.get(text.removeprefix("/").strip().lower())


def is_command(text: str) -> bool:
    """Tell whether a message is a command; ``//`` begins one that is not."""
    return text.startswith("/") and not text.startswith("//")


def unescaped(text: str) -> str:
    """Turn a leading ``//`` into the slash that is meant."""
    return text[1:] if text.startswith("//") else text


def help_text() -> str:
    """Describe keys, commands and figures, as Markdown."""
    commands = "\n".join(
        f"| `/{'`, `/'.join(command.names)}` | {command.help} |" for command in COMMANDS
    )
    return f"""\
| | |
|---|---|
| **Enter** | send |
| **Shift+Enter**, **Ctrl+J** | new line |
| **Esc** | stop the answer, keeping its text |
| **Ctrl+C** twice, **Ctrl+D** | leave |
{commands}
| `//text` | send a message that begins with a slash |

**tok/s** counts generated tokens, without the prompt.
**Acceptance length** is generated tokens per verification round.
**Accept rate** is the accepted share of the drafted tokens that were judged: those \
behind a rejection do not count. The bars show it for each position of a draft.
"""
