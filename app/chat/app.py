"""The chat application: owns the conversation and all widgets."""

import time
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from textual import on
from textual.app import App, ComposeResult, SystemCommand
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.screen import Screen
from textual.widgets import Footer

from mlx_spec_app.chat import commands
from mlx_spec_app.chat.engine import Engine
from mlx_spec_app.chat.help_screen import HelpScreen
from mlx_spec_app.chat.messages import (
    LoadFailed,
    ModelLoaded,
    TextArrived,
    TurnFailed,
    TurnFinished,
)
from mlx_spec_app.chat.panel import FiguresPanel, FiguresStrip
from mlx_spec_app.chat.widgets import (
    AnswerTurn,
    Notice,
    PromptArea,
    StatusLine,
    UserTurn,
)
from mlx_spec_app.demo import introduction
from mlx_spec_app.figures import Figures
from mlx_spec_app.request import Request

if TYPE_CHECKING:
    from mlx_spec_app.backend import Backend

_QUIT_WINDOW_S = 2.0
_ONE_AT_A_TIME = "an answer is on its way; Esc stops it"


class ChatApp(App[None]):
    """A conversation with one model."""

    CSS_PATH = "chat.tcss"
    TITLE = "mlx-spec"
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-wide")]  # noqa: RUF012
    VERTICAL_BREAKPOINTS = [(0, "-short"), (30, "-tall")]  # noqa: RUF012
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "interrupt", "Stop", id="chat.interrupt"),
        Binding("f1", "help", "Help", id="chat.help"),
        Binding("ctrl+n", "new", "New", id="chat.new"),
        Binding("ctrl+c", "leave", "Quit (twice)", priority=True, id="chat.leave"),
        Binding("ctrl+d", "quit", "Quit", show=False, priority=True, id="chat.quit"),
    ]

    def __init__(self, request: Request, backend: "Backend") -> None:
        super().__init__()
        self.failure: Exception | None = None
        self.engine = Engine(request, backend, self.post_message)
        self._request = request
        self._messages: list[dict[str, str]] = []
        self._question: UserTurn | None = None
        self._answer: AnswerTurn | None = None
        self._figures: Figures | None = None
        self._drafter = ""
        self._is_loaded = False
        self._quit_asked_at = float("-inf")
        greeting = [Notice(introduction("chat"))] if request.load.is_embedded else []
        self._turns = VerticalScroll(*greeting, id="turns")
        self._prompt = PromptArea(
            id="prompt", placeholder="Message (Enter sends, Ctrl+J new line)"
        )
        self._status = StatusLine()
        self._panel, self._strip = FiguresPanel(), FiguresStrip()

    def compose(self) -> ComposeResult:
        with Horizontal(id="main"):
            with Vertical(id="conversation"):
                yield self._turns
                yield self._strip
                yield self._prompt
                yield self._status
            yield self._panel
        yield Footer()

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """Offer the slash commands in the palette too."""
        yield from super().get_system_commands(screen)
        for command in commands.COMMANDS:
            if command.action != "quit":  # Textual has its own
                run = partial(self.run_action, command.action)
                yield SystemCommand(command.names[0].title(), command.help, run)

    def on_mount(self) -> None:
        self._prompt.focus()
        self._turns.anchor()
        self._status.busy(f"loading {self._request.load.name}")
        self._show_figures(None)
        # After the first paint, so that the screen is there while the model loads.
        self.call_after_refresh(self.engine.start)

    def on_unmount(self) -> None:
        self.engine.close()

    @property
    def is_answering(self) -> bool:
        """Whether an answer is on its way."""
        return self._answer is not None

    @on(ModelLoaded)
    def _on_model_loaded(self, message: ModelLoaded) -> None:
        self._is_loaded = True
        self._drafter = message.drafter
        self._status.say(self._request.load.name)
        self._show_figures(None)

    @on(LoadFailed)
    def _on_load_failed(self, message: LoadFailed) -> None:
        self.failure = message.error
        self.exit(return_code=1)

    @on(PromptArea.Sent)
    async def _on_sent(self, message: PromptArea.Sent) -> None:
        text = message.text.strip("\n").rstrip()  # code may begin with spaces
        if not text:
            return
        if commands.is_command(text.lstrip()):
            await self._run_command(text.lstrip())
        elif not self._is_loaded:
            self._status.busy("your message stays here; the model is still loading")
        elif self.is_answering:
            self._status.say(_ONE_AT_A_TIME)
        else:
            await self._send(commands.unescaped(text))

    async def _run_command(self, text: str) -> None:
        name, *arguments = text.split()
        command = commands.find(name)
        if command is None:
            await self._notice(
                f"error: there is no command {name}; /help lists them, "
                "// begins a message with a slash",
                is_error=True,
            )
        elif arguments:
            await self._notice(f"error: {name} takes no argument", is_error=True)
        else:
            self._prompt.clear()
            await self.run_action(command.action)

    async def _send(self, text: str) -> None:
        self._prompt.clear()
        self._messages.append({"role": "user", "content": text})
        self._question, self._answer = UserTurn(text), AnswerTurn()
        await self._turns.mount(self._question, self._answer)
        self._turns.anchor()
        self._status.busy("reading the prompt, Esc stops")
        self.engine.answer(list(self._messages))

    @on(TextArrived)
    async def _on_text_arrived(self, message: TextArrived) -> None:
        if self._answer is None or not self.is_running:
            return
        if not self._answer.text:
            self._status.busy("answering, Esc stops")
        await self._answer.append(message.text)
        self._show_figures(message.figures)

    @on(TurnFinished)
    async def _on_turn_finished(self, message: TurnFinished) -> None:
        answer = self._answer
        if answer is None or not self.is_running:
            return
        await answer.finish(message.reason, message.figures)
        self._messages.append({"role": "assistant", "content": answer.text})
        self._answer = None
        self._show_figures(message.figures)
        self._status.say(self._request.load.name)

    @on(TurnFailed)
    async def _on_turn_failed(self, message: TurnFailed) -> None:
        question, answer = self._question, self._answer
        if question is None or answer is None or not self.is_running:
            return
        # The user's words go back to where they can be changed and sent again.
        self._messages.pop()
        self._prompt.give_back(question.text)
        await question.remove()
        await answer.remove()
        self._answer = None
        await self._notice(f"error: {message.error}", is_error=True)
        self._status.say(self._request.load.name)

    def action_interrupt(self) -> None:
        """Stop the answer."""
        if self.is_answering:
            self._status.busy("stopping")
            self.engine.interrupt()

    async def action_new(self) -> None:
        """Start a new conversation."""
        if self.is_answering:
            self._status.say(_ONE_AT_A_TIME)
            return
        self._messages.clear()
        await self._turns.remove_children()
        self.engine.new_conversation()
        self._show_figures(None)

    def action_help(self) -> None:
        """Show keys, commands and what the figures mean."""
        self.push_screen(HelpScreen())

    async def action_stats(self) -> None:
        """Show all figures of the last answer."""
        lines = ["no answer yet"] if self._figures is None else self._figures.lines()
        await self._notice("\n".join(lines))

    def action_leave(self) -> None:
        """Copy the selection or stop the answer; leave if pressed again."""
        now = time.monotonic()
        if now - self._quit_asked_at < _QUIT_WINDOW_S:
            self.exit()
            return
        self._quit_asked_at = now
        if selected := self.screen.get_selected_text() or self._prompt.selected_text:
            self.copy_to_clipboard(selected)
            self.screen.clear_selection()
            self._status.say("copied; press Ctrl+C again to quit")
            return
        self.action_interrupt()
        self._status.say("press Ctrl+C again to quit")

    async def _notice(self, text: str, is_error: bool = False) -> None:
        await self._turns.mount(Notice(text, is_error))
        self._turns.anchor()

    def _show_figures(self, figures: Figures | None) -> None:
        self._figures = figures
        self._panel.show(figures, self._drafter)
        self._strip.show(figures, self._drafter)
