"""The chat application: owns the conversation and all widgets."""

import time
from typing import TYPE_CHECKING, ClassVar

from textual import on
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.widgets import Footer, Markdown, Static

from mlx_spec_app.chat import commands
from mlx_spec_app.chat.engine import Engine
from mlx_spec_app.chat.messages import (
    LoadFailed,
    ModelLoaded,
    TextArrived,
    TurnFailed,
    TurnFinished,
)
from mlx_spec_app.chat.widgets import (
    AnswerTurn,
    FiguresPanel,
    FiguresStrip,
    Notice,
    PromptArea,
    UserTurn,
)
from mlx_spec_app.figures import Figures
from mlx_spec_app.request import Request

if TYPE_CHECKING:
    from mlx_spec_app.backend import Backend

_QUIT_WINDOW_S = 2.0


class ChatApp(App[None]):
    """A conversation with one model."""

    CSS_PATH = "chat.tcss"
    TITLE = "mlx-spec"
    ENABLE_COMMAND_PALETTE = True
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-wide")]  # noqa: RUF012
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "interrupt", "Stop", priority=True),
        Binding("f1", "help", "Help"),
        Binding("ctrl+n", "new", "New"),
        Binding("ctrl+c", "quit_twice", "Quit (twice)", priority=True),
        Binding("ctrl+d", "quit", "Quit", show=False, priority=True),
    ]

    def __init__(self, request: Request, backend: "Backend") -> None:
        super().__init__()
        self.failure: Exception | None = None
        self._request = request
        self._engine = Engine(request, backend, self.post_message)
        self._messages: list[dict[str, str]] = []
        self._answer: AnswerTurn | None = None
        self._figures: Figures | None = None
        self._drafter = NOT_LOADED
        self._is_loaded = False
        self._quit_asked_at = float("-inf")

    def compose(self) -> ComposeResult:
        with Horizontal(id="main"):
            with Vertical(id="conversation"):
                yield VerticalScroll(id="turns")
                yield FiguresStrip()
                prompt = PromptArea(id="prompt")
                prompt.placeholder = "Message (Enter sends, Ctrl+J new line)"
                yield prompt
                yield Static("", id="status", markup=False)
            yield FiguresPanel()
        yield Footer()

    def on_mount(self) -> None:
        self.query_one(PromptArea).focus()
        self._turns.anchor()
        self._set_status(f"loading {self._request.load.model} …")
        self._show_figures(None)
        # After the first paint, so that the screen is there while the model loads.
        self.call_after_refresh(self._engine.start)

    def on_unmount(self) -> None:
        self._engine.close()

    @property
    def is_answering(self) -> bool:
        """Whether an answer is on its way."""
        return self._answer is not None

    @property
    def _turns(self) -> VerticalScroll:
        return self.query_one("#turns", VerticalScroll)

    @on(ModelLoaded)
    def _on_model_loaded(self, message: ModelLoaded) -> None:
        self._is_loaded = True
        self._drafter = message.drafter
        self._set_status(self._request.load.model)
        self._show_figures(None)

    @on(LoadFailed)
    def _on_load_failed(self, message: LoadFailed) -> None:
        self.failure = message.error
        self.exit()

    @on(PromptArea.Sent)
    async def _on_sent(self, message: PromptArea.Sent) -> None:
        text = message.text.strip()
        if not text:
            return
        if commands.is_command(text):
            await self._run_command(text)
        elif not self._is_loaded:
            self._set_status("the model is still loading; your message stays here")
        elif self.is_answering:
            self._set_status("an answer is on its way; Esc stops it")
        else:
            await self._send(commands.unescaped(text))

    async def _run_command(self, text: str) -> None:
        command = commands.find(text)
        self.query_one(PromptArea).clear()
        if command is None:
            await self._notice(f"there is no command {text}; /help lists them", True)
        else:
            await self.run_action(command.action)

    async def _send(self, text: str) -> None:
        self.query_one(PromptArea).clear()
        self._messages.append({"role": "user", "content": text})
        self._answer = AnswerTurn()
        await self._turns.mount(UserTurn(text), self._answer)
        self._turns.anchor()
        self._set_status("answering … Esc stops")
        self._engine.answer(list(self._messages))

    @on(TextArrived)
    async def _on_text_arrived(self, message: TextArrived) -> None:
        if self._answer is not None:
            await self._answer.append(message.text)
            self._show_figures(message.figures)

    @on(TurnFinished)
    async def _on_turn_finished(self, message: TurnFinished) -> None:
        answer = self._answer
        if answer is None:
            return
        await answer.finish(message.end, message.figures)
        self._messages.append({"role": "assistant", "content": answer.text})
        self._answer = None
        self._show_figures(message.figures)
        self._set_status(self._request.load.model)

    @on(TurnFailed)
    async def _on_turn_failed(self, message: TurnFailed) -> None:
        answer, self._answer = self._answer, None
        if answer is not None:
            await answer.remove()
        # The user's words go back to where they can be changed and sent again.
        prompt = self.query_one(PromptArea)
        if self._messages and self._messages[-1]["role"] == "user":
            text = self._messages.pop()["content"]
            prompt.text = f"{text}\n{prompt.text}".rstrip("\n")
            prompt.move_cursor(prompt.document.end)
        await self._notice(f"error: {message.error}", True)
        self._set_status(self._request.load.model)

    def action_interrupt(self) -> None:
        """Stop the answer."""
        if self.is_answering:
            self._set_status("stopping …")
            self._engine.interrupt()

    async def action_new(self) -> None:
        """Start a new conversation."""
        if self.is_answering:
            self._set_status("an answer is on its way; Esc stops it")
            return
        self._messages.clear()
        await self._turns.remove_children()
        self._engine.new_conversation()
        self._show_figures(None)

    async def action_help(self) -> None:
        """Show keys, commands and what the figures mean."""
        await self._turns.mount(Markdown(commands.help_text(), classes="help"))
        self._turns.anchor()

    async def action_stats(self) -> None:
        """Show all figures of the last answer."""
        lines = ["no answer yet"] if self._figures is None else self._figures.lines()
        await self._notice("\n".join(lines))

    def action_quit_twice(self) -> None:
        """Stop the answer, or ask to be pressed again."""
        now = time.monotonic()
        if now - self._quit_asked_at < _QUIT_WINDOW_S:
            self.exit()
            return
        self._quit_asked_at = now
        self.action_interrupt()
        self._set_status("press Ctrl+C again to quit")

    async def _notice(self, text: str, is_error: bool = False) -> None:
        await self._turns.mount(Notice(text, is_error))
        self._turns.anchor()

    def _set_status(self, text: str) -> None:
        self.query_one("#status", Static).update(text)

    def _show_figures(self, figures: Figures | None) -> None:
        self._figures = figures
        self.query_one(FiguresPanel).show(figures, self._drafter)
        self.query_one(FiguresStrip).show(figures, self._drafter)


NOT_LOADED = "loading"
