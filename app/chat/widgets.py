"""The chat's widgets: prompt, turns and the line of what is going on."""

import time

from textual import events
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.message import Message
from textual.timer import Timer
from textual.widgets import Markdown, Static, TextArea
from textual.widgets.markdown import MarkdownStream

from mlx_spec_app.figures import Figures, TurnEnd, decimal

_TICK_S = 0.5
_NEW_LINE_KEYS = ("shift+enter", "ctrl+j")


class PromptArea(TextArea):
    """A text area that grows with its text; Enter sends."""

    class Sent(Message):
        """The user pressed Enter.

        Attributes:
            text: What was written.
        """

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    def give_back(self, text: str) -> None:
        """Put a text before what has been written since."""
        self.text = f"{text}\n{self.text}".rstrip("\n")
        self.move_cursor(self.document.end)

    async def _on_key(self, event: events.Key) -> None:
        if event.key == "enter":
            event.prevent_default()
            event.stop()
            self.post_message(self.Sent(self.text))
            return
        if event.key in _NEW_LINE_KEYS:
            # At once: a binding runs only after the letters that follow it.
            event.prevent_default()
            event.stop()
            self.insert("\n")
            return
        await super()._on_key(event)


class StatusLine(Static):
    """What is going on, with the seconds it has taken."""

    def __init__(self) -> None:
        super().__init__("", id="status", markup=False)
        self._activity = ""
        self._since = 0.0
        self._timer: Timer | None = None

    def on_mount(self) -> None:
        self._timer = self.set_interval(_TICK_S, self._tick)

    def say(self, text: str) -> None:
        """Show a text until the next one."""
        self._activity = ""
        self.update(text)

    def busy(self, activity: str) -> None:
        """Show an activity, and the time since there has been one."""
        if not self._activity:
            self._since = time.monotonic()
        self._activity = activity
        self._tick()

    def _tick(self) -> None:
        if self._activity:
            self.update(f"{self._activity} … {time.monotonic() - self._since:.0f} s")


class UserTurn(Static):
    """What the user wrote."""

    def __init__(self, text: str) -> None:
        super().__init__(text, markup=False)
        self.text = text


class Notice(Static):
    """A line that is not part of the conversation."""

    def __init__(self, text: str, is_error: bool = False) -> None:
        super().__init__(text, markup=False)
        self.set_class(is_error, "-error")


class AnswerTurn(Vertical):
    """The model's answer: Markdown while it arrives, and a line of figures below.

    Attributes:
        text: The answer so far.
        finish_reason: Why it ended; None while it goes on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        self.finish_reason: TurnEnd | None = None
        self._markdown = Markdown()
        self._footer = Static("…", classes="figures", markup=False)
        self._stream: MarkdownStream | None = None

    def compose(self) -> ComposeResult:
        yield self._markdown
        yield self._footer

    async def append(self, text: str) -> None:
        """Add a piece of the answer."""
        self.text += text
        if self._stream is None:
            self._stream = Markdown.get_stream(self._markdown)
        await self._stream.write(text)

    async def finish(self, reason: TurnEnd, figures: Figures | None) -> None:
        """Show the whole answer once more, and how it went."""
        self.finish_reason = reason
        if self._stream is not None:
            await self._stream.stop()
        # One full parse: a fence cut in two by streaming is whole again.
        await self._markdown.update(self.text)
        self._footer.update(summary(reason, figures))


def summary(reason: TurnEnd, figures: Figures | None) -> str:
    """Describe a finished answer in a line."""
    if figures is None:
        return reason
    return (
        f"{figures.generation_tokens} tokens · {figures.generation_tps:.1f} tok/s · "
        f"acceptance length {decimal(figures.acceptance_length)} · {reason}"
    )
