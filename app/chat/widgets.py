"""The chat's widgets: prompt, turns and the panel of figures."""

from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message
from textual.widgets import Markdown, Static, TextArea
from textual.widgets.markdown import MarkdownStream

from mlx_spec_app.figures import NONE, Figures, decimal, megabytes, percent

_WIDTH = 26
_BAR_WIDTH = 18
_DIM = "$text-muted"
_LEVELS = " ▁▂▃▄▅▆▇█"


class PromptArea(TextArea):
    """A text area that grows with its text; Enter sends."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("shift+enter,ctrl+j", "new_line", "New line", show=False),
    ]

    class Sent(Message):
        """The user pressed Enter.

        Attributes:
            text: What was written.
        """

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    def action_new_line(self) -> None:
        """Insert a line break."""
        self.insert("\n")

    async def _on_key(self, event: events.Key) -> None:
        if event.key == "enter":
            event.prevent_default()
            event.stop()
            self.post_message(self.Sent(self.text))
            return
        await super()._on_key(event)


class UserTurn(Static):
    """What the user wrote."""

    def __init__(self, text: str) -> None:
        super().__init__(text, markup=False)


class Notice(Static):
    """A line that is not part of the conversation."""

    def __init__(self, text: str, is_error: bool = False) -> None:
        super().__init__(text, markup=False)
        self.set_class(is_error, "-error")


class AnswerTurn(Vertical):
    """The model's answer: Markdown while it arrives, and a line of figures below."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""
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

    async def finish(self, end: str, figures: Figures | None) -> None:
        """Show the whole answer once more, and how it went."""
        if self._stream is not None:
            await self._stream.stop()
        # One full parse: a fence cut in two by streaming is whole again.
        await self._markdown.update(self.text)
        self._footer.update(summary(end, figures))


def summary(end: str, figures: Figures | None) -> str:
    """Describe a finished answer in a line."""
    if figures is None:
        return end
    parts = [
        f"{figures.generation_tokens} tokens",
        f"{figures.generation_tps:.1f} tok/s",
        f"acceptance length {decimal(figures.acceptance_length)}",
    ]
    if end != "stop":
        parts.append("stopped" if end == "interrupted" else "reached --max-tokens")
    return " · ".join(parts)


class FiguresPanel(Static):
    """Live figures beside the conversation."""

    def __init__(self) -> None:
        super().__init__(markup=False)
        self.border_title = "speculation"

    def show(self, figures: Figures | None, drafter: str) -> None:
        """Show figures; None before the first answer."""
        self.update(Content("\n").join(panel_lines(figures, drafter)))


class FiguresStrip(Static):
    """The same in one line, for narrow terminals."""

    def __init__(self) -> None:
        super().__init__(markup=False)

    def show(self, figures: Figures | None, drafter: str) -> None:
        """Show figures; None before the first answer."""
        self.update(strip_line(figures, drafter))


def panel_lines(figures: Figures | None, drafter: str) -> list[Content]:
    """Lay the figures out in lines of 26 columns."""
    blank = Content("")
    if figures is None:
        hint = "figures appear with\nthe first answer"
        return [_row("drafter", drafter), blank, Content.styled(hint, _DIM)]
    rates = figures.accept_rate_per_position
    bars = [_bar(position, rate) for position, rate in enumerate(rates, start=1)]
    return [
        _row("speed", f"{figures.generation_tps:.1f} tok/s"),
        _row("acceptance length", decimal(figures.acceptance_length)),
        _row("accept rate", percent(figures.accept_rate)),
        blank,
        Content.styled("accept rate by position", _DIM),
        *(bars or [Content(f" {NONE} nothing drafted yet")]),
        blank,
        _row("drafter", drafter),
        _row("answer", f"{figures.generation_tokens} tokens"),
        _row("prompt", f"{figures.prompt_tokens} tokens"),
        _row("reused", f"{figures.cached_tokens} tokens"),
        _row("cache", megabytes(figures.cache_bytes)),
        _row("peak memory", f"{figures.peak_memory:.2f} GB"),
    ]


def strip_line(figures: Figures | None, drafter: str) -> str:
    """Lay the figures out in one line."""
    if figures is None:
        return f"drafter {drafter}"
    bars = "".join(
        _LEVELS[round((rate or 0) * 8)] for rate in figures.accept_rate_per_position
    )
    return (
        f"{figures.generation_tps:.1f} tok/s · "
        f"acceptance length {decimal(figures.acceptance_length)} · "
        f"accepted {percent(figures.accept_rate)} {bars} · {drafter}"
    )


def _row(name: str, value: str) -> Content:
    return Content.assemble((name, _DIM), f"{value:>{_WIDTH - len(name)}}")


def _bar(position: int, rate: float | None) -> Content:
    filled = round((rate or 0) * _BAR_WIDTH)
    return Content.assemble(
        f"{position:>2} ",
        ("━" * filled, "$accent"),
        ("─" * (_BAR_WIDTH - filled), "$text-disabled"),
        f" {percent(rate):>4}",
    )
