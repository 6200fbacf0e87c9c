"""The figures of speculation, live: a panel beside the chat, or a line below it."""

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from mlx_spec_app.figures import NONE, Figures, decimal, megabytes, percent

_WIDTH = 26
_BAR_WIDTH = 18
_LABEL = "$foreground 60%"
_TRACK = "$foreground 25%"
_LEVELS = "▁▂▃▄▅▆▇█"


class FiguresPanel(VerticalScroll, can_focus=False):
    """All figures, with a bar for each position of a draft."""

    def __init__(self) -> None:
        super().__init__()
        self.border_title = "speculation"
        self._body = Static("", markup=False)

    def compose(self) -> ComposeResult:
        yield self._body

    def show(self, figures: Figures | None, drafter: str) -> None:
        """Show figures; None before the first answer."""
        self.border_subtitle = f"drafter: {drafter}" if drafter else ""
        self._body.update(Content("\n").join(panel_lines(figures)))


class FiguresStrip(Static):
    """The same in one line, for narrow terminals."""

    def __init__(self) -> None:
        super().__init__(markup=False)

    def show(self, figures: Figures | None, drafter: str) -> None:
        """Show figures; None before the first answer."""
        self.update(strip_line(figures, drafter))


def panel_lines(figures: Figures | None) -> list[Content]:
    """Lay the figures out in lines of 26 columns."""
    blank = Content("")
    if figures is None:
        hint = "figures appear with\nthe first answer"
        return [Content.styled(hint, _LABEL)]
    rates = figures.accept_rate_per_position
    bars = [_bar(position, rate) for position, rate in enumerate(rates, start=1)]
    return [
        _row("speed", f"{figures.generation_tps:.1f} tok/s", "bold"),
        _row("acceptance length", decimal(figures.acceptance_length), "bold $accent"),
        _row("accept rate", percent(figures.accept_rate), "bold"),
        blank,
        Content.styled("accept rate by position", _LABEL),
        *(bars or [Content.styled(f" {NONE} nothing drafted yet", _LABEL)]),
        blank,
        _row("answer", f"{figures.generation_tokens} tokens"),
        _row("prompt", f"{figures.prompt_tokens} tokens"),
        _row("reused", f"{figures.cached_tokens} tokens"),
        _row("cache", megabytes(figures.cache_bytes)),
        _row("peak memory", f"{figures.peak_memory:.2f} GB"),
    ]


def strip_line(figures: Figures | None, drafter: str) -> str:
    """Lay the figures out in one line."""
    if figures is None:
        return f"drafter: {drafter}" if drafter else ""
    bars = "".join(
        _LEVELS[round((rate or 0) * 7)] for rate in figures.accept_rate_per_position
    )
    return (
        f"{figures.generation_tps:.1f} tok/s · "
        f"acceptance length {decimal(figures.acceptance_length)} · "
        f"accept rate {percent(figures.accept_rate)} {bars} · {drafter}"
    )


def _row(name: str, value: str, style: str = "") -> Content:
    return Content.assemble((name, _LABEL), (f"{value:>{_WIDTH - len(name)}}", style))


def _bar(position: int, rate: float | None) -> Content:
    filled = round((rate or 0) * _BAR_WIDTH)
    return Content.assemble(
        (f"{position:>2} ", _LABEL),
        ("━" * filled, "$accent"),
        ("━" * (_BAR_WIDTH - filled), _TRACK),
        f" {percent(rate):>4}",
    )
