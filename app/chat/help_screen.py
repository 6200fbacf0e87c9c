"""The help, over the conversation; any of the usual keys closes it."""

from collections.abc import Iterable
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

from mlx_spec_app.chat.commands import FIGURES_HELP, help_rows

_NAME_WIDTH = 20


class HelpScreen(ModalScreen[None]):
    """Keys, commands and what the figures mean."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,f1,q,enter,space", "dismiss", "Close", id="help.close"),
    ]

    def compose(self) -> ComposeResult:
        body = Content("\n\n").join([_table(help_rows()), _table(FIGURES_HELP)])
        with VerticalScroll(id="help") as box:
            box.border_title = "help"
            box.border_subtitle = "Esc closes"
            yield Static(body)


def _table(rows: Iterable[tuple[str, str]]) -> Content:
    return Content("\n").join(
        Content.assemble((f"{name:<{_NAME_WIDTH}}", "bold $accent"), text)
        for name, text in rows
    )
