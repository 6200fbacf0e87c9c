"""The chat, driven as a user drives it, with a scripted backend."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from threading import Event
from typing import Any

import pytest
from textual.command import CommandPalette
from textual.events import Paste
from textual.message import Message
from textual.pilot import Pilot
from textual.widget import Widget
from textual.widgets import Markdown, Static

from mlx_spec import SamplingParams
from mlx_spec_app import demo
from mlx_spec_app.chat import app as app_module
from mlx_spec_app.chat import commands
from mlx_spec_app.chat.app import ChatApp
from mlx_spec_app.chat.engine import Engine
from mlx_spec_app.chat.help_screen import HelpScreen
from mlx_spec_app.chat.messages import TextArrived, TurnFinished
from mlx_spec_app.chat.panel import FiguresPanel, FiguresStrip
from mlx_spec_app.chat.widgets import AnswerTurn, Notice, PromptArea, UserTurn
from mlx_spec_app.figures import Figures
from mlx_spec_app.request import LoadRequest, Request
from tests.app.fakes import FakeBackend, broken

WIDE, NARROW = (120, 36), (80, 24)


def request(**changes: Any) -> Request:
    settings = {"load": LoadRequest(model="some/model"), "max_tokens": 64} | changes
    return Request(sampling=SamplingParams(), **settings)


EMBEDDED = LoadRequest(model="/a/long/path/tiny-moe", is_embedded=True)
Body = Callable[[ChatApp, Pilot[None]], Awaitable[None]]


def run(
    backend: FakeBackend, body: Body, size: tuple[int, int] = WIDE, **changes: Any
) -> ChatApp:
    """Start the app, wait until the model is there, do ``body``, close it."""
    app = ChatApp(request(**changes), backend)

    async def main() -> None:
        async with app.run_test(size=size) as pilot:
            if backend.load_gate is None and backend.load_error is None:
                await until(pilot, lambda: app._is_loaded)
            await body(app, pilot)

    asyncio.run(main())
    return app


async def until(pilot: Pilot[None], condition: Callable[[], bool]) -> None:
    """Let the app work until a condition holds."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if condition():
            return
        await pilot.pause(0.01)
    raise AssertionError("the app never got there")


async def send(app: ChatApp, pilot: Pilot[None], text: str) -> None:
    app.query_one(PromptArea).insert(text)
    await pilot.press("enter")


async def answered(app: ChatApp, pilot: Pilot[None], count: int = 1) -> None:
    await until(
        pilot,
        lambda: len(app.query(AnswerTurn)) == count and not app.is_answering,
    )


def status(app: ChatApp) -> str:
    return str(app.query_one("#status", Static).content)


def text_of(widget: Widget) -> str:
    static = widget if isinstance(widget, Static) else widget.query_one(Static)
    return str(static.content)


def figures_line(app: ChatApp) -> str:
    return text_of(app.query_one(".figures", Static))


def test_a_message_is_answered_and_both_stay_on_screen() -> None:
    backend = FakeBackend([["Hello", " there", "."]])

    async def body(app: ChatApp, pilot: Pilot[None]) -> None:
        await send(app, pilot, "Hi")
        await answered(app, pilot)
        assert text_of(app.query_one(UserTurn)) == "Hi"
        assert app.query_one(AnswerTurn).text == "Hello there."
        assert app.query_one(PromptArea).text == ""
        expected = "3 tokens · 42.5 tok/s · acceptance length 1.50 · stop"
        assert figures_line(app) == expected

    run(backend, body)
    assert backend.asked[0][0] == [{"role": "user", "content": "Hi"}]


def test_the_next_turn_brings_the_whole_conversation() -> None:
    backend = FakeBackend([["One."], ["Two."]])

    async def body(app: ChatApp, pilot: Pilot[None]) -> None:
        await send(app, pilot, "First")
        await answered(app, pilot)
        await send(app, pilot, "Second")
        await answered(app, pilot, 2)

    run(backend, body, system_prompt="Be kind.")
    assert backend.asked[1][0] == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "First"},
        {"role": "assistant", "content": "One."},
        {"role": "user", "content": "Second"},
    ]
    assert backend.conversations == 1


def test_escape_stops_at_once_and_keeps_the_text() -> None:
    gate = Event()
    backend = FakeBackend([["Partial", " never"] * 50, ["More."]], gate=gate)

    async def body(app: ChatApp, pilot: Pilot[None]) -> None:
        await send(app, pilot, "Go")
        await until(pilot, lambda: bool(app.query(AnswerTurn)))
        await until(pilot, lambda: app.query_one(AnswerTurn).text == "Partial")
        await pilot.press("escape")
        gate.set()
        await answered(app, pilot)
        kept = app.query_one(AnswerTurn).text
        assert kept.startswith("Partial")
        assert len(kept) < 40
        assert app.query_one(AnswerTurn).finish_reason == "interrupted"
        assert figures_line(app).endswith("· interrupted")
        await send(app, pilot, "On")
        await answered(app, pilot, 2)
        assert backend.asked[1][0][1] == {"role": "assistant", "content": kept}

    run(backend, body)


def test_enter_while_answering_keeps_the_message_and_says_why() -> None:
    gate = Event()
    backend = FakeBackend([["a", "b"]], gate=gate)

    async def body(app: ChatApp, pilot: Pilot[None]) -> None:
        await send(app, pilot, "Go")
        await until(pilot, lambda: app.is_answering)
        await send(app, pilot, "again")
        assert app.query_one(PromptArea).text == "again"
        assert "Esc stops it" in status(app)
        gate.set()
        await answered(app, pilot)

    run(backend, body)
    assert len(backend.asked) == 1


def test_the_screen_is_there_while_the_model_loads() -> None:
    gate = Event()
    backend = FakeBackend([["ok"]], load_gate=gate)

    async def body(app: ChatApp, pilot: Pilot[None]) -> None:
        assert "loading some/model" in status(app)
        await send(app, pilot, "early")
        assert app.query_one(PromptArea).text == "early"
        assert "still loading" in status(app)
        gate.set()
        await until(pilot, lambda: app._is_loaded)
        await pilot.press("enter")
        await answered(app, pilot)

    run(backend, body)


@pytest.mark.parametrize("size", [WIDE, NARROW])
def test_the_embedded_model_introduces_itself_and_names_a_real_one(
    size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "usable_memory", lambda: 24 * 10**9)
    backend = FakeBackend()

    async def body(app: ChatApp, pilot: Pilot[None]) -> None:
        notice = app.query_one(Notice)
        text = text_of(notice)
        assert text.startswith("A 4-million-parameter demo model")
        assert text.endswith("mlx-spec chat mlx-community/Qwen3-30B-A3B-4bit")
        assert notice.size.height <= 3
        assert status(app) == "tiny-moe (embedded)"
        await send(app, pilot, "Hi")
        await answered(app, pilot)
        assert status(app) == "tiny-moe (embedded)"

    run(backend, body, size, load=EMBEDDED)
    assert backend.loads == [EMBEDDED]


def test_a_named_model_is_not_introduced() -> None:
    async def body(app: ChatApp, pilot: Pilot[None]) -> None:
        assert not app.query(Notice)
        assert status(app) == "some/model"

    run(FakeBackend(), body)


def test_a_model_that_cannot_be_loaded_ends_the_app_with_the_error() -> None:
    backend = FakeBackend(load_error=broken("no such model"))

    async def body(app: ChatApp, pilot: Pilot[None]) -> None:
        await until(pilot, lambda: app.failure is not None)

    app = run(backend, body)
    assert str(app.failure) == "no such model (do something else)"


@pytest.mark.parametrize("error", [broken(), RuntimeError("it broke")])
def test_an_error_gives_the_users_words_back(error: Exception) -> None:
    backend = FakeBackend([error, ["fine"]])

    async def body(app: ChatApp, pilot: Pilot[None]) -> None:
        await send(app, pilot, "my long question")
        await until(pilot, lambda: bool(app.query(Notice)))
        assert "it broke" in text_of(app.query_one(Notice))
        assert app.query_one(PromptArea).text == "my long question"
        assert not app.query(AnswerTurn)
        assert not app.query(UserTurn)
        await pilot.press("enter")
        await answered(app, pilot)

    run(backend, body)
    assert backend.asked[1][0] == [{"role": "user", "content": "my long question"}]


def test_an_error_in_mid_answer_gives_the_users_words_back_before_newer_ones() -> None:
    gate = Event()
    backend = FakeBackend([["some", "text"]], gate=gate, break_at=1)

    async def body(app: ChatApp, pilot: Pilot[None]) -> None:
        await send(app, pilot, "first")
        await until(pilot, lambda: bool(app.query(AnswerTurn)))
        app.query_one(PromptArea).insert("newer")
        gate.set()
        await until(pilot, lambda: bool(app.query(Notice)))
        assert app.query_one(PromptArea).text == "first\nnewer"

    run(backend, body)


def test_a_code_fence_that_arrives_in_pieces_is_complete() -> None:
    pieces = ["Here:\n\n`", "``py", "thon\nx ", "= 1\n", "y = 2\n", "`", "``\n\nDone."]
    backend = FakeBackend([pieces])

    async def body(app: ChatApp, pilot: Pilot[None]) -> None:
        await send(app, pilot, "code")
        await answered(app, pilot)
        await pilot.pause()
        answer = app.query_one(AnswerTurn)
        assert answer.text == "".join(pieces)
        assert answer.query_one(Markdown).source == answer.text
        fence = answer.query("MarkdownFence").first()
        assert fence.code == "x = 1\ny = 2"  # type: ignore[attr-defined]

    run(backend, body)


@pytest.mark.parametrize("size", [WIDE, NARROW])
def test_figures_are_shown_beside_or_below_the_conversation(
    size: tuple[int, int],
) -> None:
    backend = FakeBackend([["a", "b", "c"]])

    async def body(app: ChatApp, pilot: Pilot[None]) -> None:
        await send(app, pilot, "Hi")
        await answered(app, pilot)
        await pilot.pause()
        panel, strip = app.query_one(FiguresPanel), app.query_one(FiguresStrip)
        assert panel.display == (size == WIDE)
        assert strip.display == (size == NARROW)
        for widget in (panel, strip):
            shown = text_of(widget)
            assert "42.5 tok/s" in shown
            assert "0%" in shown
            assert "1.50" in shown
        assert "12 tokens" in text_of(panel)
        assert app.query_one(PromptArea).region.bottom < size[1]

    run(backend, body, size)


def test_new_line_keys_write_a_line_and_the_prompt_grows() -> None:
    async def body(app: ChatApp, pilot: Pilot[None]) -> None:
        prompt = app.query_one(PromptArea)
        height = prompt.size.height
        await pilot.press("a", "ctrl+j", "b", "shift+enter", "c")
        await pilot.pause()
        assert prompt.text == "a\nb\nc"
        assert prompt.size.height > height

    run(FakeBackend(), body)


def test_slash_commands() -> None:
    backend = FakeBackend([["ok"], ["ok"]])

    async def body(app: ChatApp, pilot: Pilot[None]) -> None:
        await send(app, pilot, "Hi")
        await answered(app, pilot)
        await send(app, pilot, "/stats")
        await until(pilot, lambda: bool(app.query(Notice)))
        assert "acceptance length" in text_of(app.query_one(Notice))
        await send(app, pilot, "/new")
        await until(pilot, lambda: not app.query(AnswerTurn))
        await send(app, pilot, "//literal")
        await answered(app, pilot)
        await until(pilot, lambda: backend.conversations == 2)

    run(backend, body)
    assert backend.asked[-1][0] == [{"role": "user", "content": "/literal"}]


@pytest.mark.parametrize("text", ["/nonsense", "/usr/bin/env: what is it?"])
def test_an_unknown_command_is_an_error_that_keeps_the_text(text: str) -> None:
    backend = FakeBackend()

    async def body(app: ChatApp, pilot: Pilot[None]) -> None:
        await send(app, pilot, text)
        await until(pilot, lambda: bool(app.query(Notice)))
        assert f"no command {text.split()[0]}" in text_of(app.query_one(Notice))
        assert app.query_one(Notice).has_class("-error")
        assert app.query_one(PromptArea).text == text

    run(backend, body)
    assert backend.asked == []


@pytest.mark.parametrize("text", ["/new now", "/NEW\nnow", "/quit please"])
def test_a_command_with_an_argument_is_an_error_that_keeps_the_text(text: str) -> None:
    async def body(app: ChatApp, pilot: Pilot[None]) -> None:
        await send(app, pilot, text)
        await until(pilot, lambda: bool(app.query(Notice)))
        name = text.split()[0]
        assert text_of(app.query_one(Notice)) == f"error: {name} takes no argument"
        assert app.query_one(Notice).has_class("-error")
        assert app.query_one(PromptArea).text == text
        assert app.is_running

    run(FakeBackend(), body)


@pytest.mark.parametrize("size", [WIDE, NARROW])
@pytest.mark.parametrize("way", ["f1", "/help", "/?"])
def test_help_fits_the_screen_and_escape_closes_it(
    way: str, size: tuple[int, int]
) -> None:
    async def body(app: ChatApp, pilot: Pilot[None]) -> None:
        if way.startswith("/"):
            await send(app, pilot, way)
        else:
            await pilot.press(way)
        await until(pilot, lambda: isinstance(app.screen, HelpScreen))
        await pilot.pause()
        box = app.screen.query_one("#help")
        assert box.max_scroll_y == 0, "all of it is in view"
        num_lines = len(text_of(box).splitlines())
        assert box.query_one(Static).size.height == num_lines, "no line is broken"
        await pilot.press("escape")
        await until(pilot, lambda: not isinstance(app.screen, HelpScreen))

    run(FakeBackend(), body, size)


def test_the_palette_offers_the_commands_and_escape_closes_it() -> None:
    async def body(app: ChatApp, pilot: Pilot[None]) -> None:
        titles = {entry.title for entry in app.get_system_commands(app.screen)}
        assert titles >= {"Help", "New", "Stats", "Quit"}
        await pilot.press("ctrl+p")
        await until(pilot, lambda: isinstance(app.screen, CommandPalette))
        await pilot.press("escape")
        await until(pilot, lambda: not isinstance(app.screen, CommandPalette))
        await pilot.press("ctrl+p", *"stats")
        await until(pilot, lambda: bool(app.screen.query("OptionList")))
        await pilot.pause()
        await pilot.press("enter")
        await until(pilot, lambda: bool(app.screen_stack[0].query(Notice)))

    run(FakeBackend(), body)


@pytest.mark.parametrize("word", ["/quit", "/exit", "/bye"])
def test_leaving_by_command(word: str) -> None:
    async def body(app: ChatApp, pilot: Pilot[None]) -> None:
        await send(app, pilot, word)
        await until(pilot, lambda: not app.is_running)

    run(FakeBackend(), body)


def test_control_c_asks_first_and_stops_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(app_module, "_QUIT_WINDOW_S", 600)  # a busy machine is slow
    gate = Event()
    backend = FakeBackend([["a", "b", "c"]], gate=gate)

    async def body(app: ChatApp, pilot: Pilot[None]) -> None:
        await send(app, pilot, "Hi")
        await until(pilot, lambda: app.is_answering)
        await pilot.press("ctrl+c")
        assert "again" in status(app)
        gate.set()
        await answered(app, pilot)
        assert app.is_running
        await pilot.press("ctrl+c")
        await until(pilot, lambda: not app.is_running)

    run(backend, body)


def test_control_d_leaves() -> None:
    async def body(app: ChatApp, pilot: Pilot[None]) -> None:
        await pilot.press("ctrl+d")
        await until(pilot, lambda: not app.is_running)

    run(FakeBackend(), body)


def test_control_c_copies_a_selection() -> None:
    async def body(app: ChatApp, pilot: Pilot[None]) -> None:
        prompt = app.query_one(PromptArea)
        prompt.insert("copy me")
        prompt.select_all()
        await pilot.press("ctrl+c")
        assert app.clipboard == "copy me"
        assert "copied" in status(app)
        assert app.is_running

    run(FakeBackend(), body)


def test_leaving_in_mid_answer_is_quiet() -> None:
    gate = Event()
    backend = FakeBackend([["a", "b", "c"]], gate=gate)

    async def body(app: ChatApp, pilot: Pilot[None]) -> None:
        await send(app, pilot, "Hi")
        await until(pilot, lambda: app.is_answering)
        await pilot.press("ctrl+d")
        gate.set()

    app = run(backend, body)
    app.engine.join()
    assert app.return_code == 0


def test_leaving_does_not_wait_for_the_model() -> None:
    gate = Event()
    backend = FakeBackend(load_gate=gate)

    async def body(app: ChatApp, pilot: Pilot[None]) -> None:
        await pilot.press("ctrl+d")
        await until(pilot, lambda: not app.is_running)

    app = run(backend, body)
    assert not gate.is_set()
    gate.set()
    app.engine.join()
    assert backend.asked == []


def test_pasted_lines_are_one_message_with_their_indentation() -> None:
    backend = FakeBackend()

    async def body(app: ChatApp, pilot: Pilot[None]) -> None:
        app.post_message(Paste("    if x:\n        y()\n"))
        await until(pilot, lambda: bool(app.query_one(PromptArea).text))
        assert backend.asked == []
        await pilot.press("enter")
        await answered(app, pilot)

    run(backend, body)
    assert backend.asked[0][0][0]["content"] == "    if x:\n        y()"


def test_every_command_is_in_the_help() -> None:
    text = str(commands.help_rows())
    for command in commands.COMMANDS:
        for name in command.names:
            assert f"/{name}" in text
            assert commands.find(f"/{name}") is command
            assert hasattr(ChatApp, f"action_{command.action}")


def test_text_is_sent_on_at_most_twenty_times_a_second() -> None:
    posted: list[Message] = []
    finished = Event()

    def post(message: Message) -> None:
        posted.append(message)
        if isinstance(message, TurnFinished):
            finished.set()

    engine = Engine(request(), FakeBackend([["x"] * 500]), post)
    begin = time.monotonic()
    engine.start()
    engine.answer([{"role": "user", "content": "Hi"}])
    assert finished.wait(60)
    elapsed = time.monotonic() - begin
    engine.close()
    engine.join()
    pieces = [message for message in posted if isinstance(message, TextArrived)]
    assert "".join(piece.text for piece in pieces) == "x" * 500
    assert len(pieces) <= 2 + 20 * elapsed


@pytest.mark.parametrize("size", [(120, 36), (120, 24), (100, 24)])
def test_the_panel_shows_ten_positions_without_scrolling(
    size: tuple[int, int],
) -> None:
    figures = Figures(
        prompt_tokens=12345,
        cached_tokens=12000,
        prompt_tps=1000.0,
        generation_tokens=4096,
        generation_tps=123.4,
        acceptance_length=5.64,
        accept_rate=0.93,
        accept_rate_per_position=(1.0, *(0.5,) * 8, None),
        drafted_tokens=10,
        accepted_tokens=9,
        verification_steps=1,
        forward_calls=2,
        cache_bytes=2_500_000_000,
        peak_memory=17.25,
    )

    async def body(app: ChatApp, pilot: Pilot[None]) -> None:
        panel = app.query_one(FiguresPanel)
        panel.show(figures, "lookup")
        await pilot.pause()
        shown = text_of(panel).splitlines()
        assert {len(line) for line in shown if line.rstrip()} <= {26, 23}
        assert panel.max_scroll_y == 0
        assert shown[5].endswith("100%")
        assert shown[14] == "10 " + "━" * 18 + "    –"
        assert panel.border_subtitle == "drafter: lookup"

    run(FakeBackend(), body, size)


def test_everything_computes_on_one_thread() -> None:
    import threading

    threads: set[str] = set()

    class Watching(FakeBackend):
        def load(self, request: LoadRequest) -> Any:
            threads.add(threading.current_thread().name)
            return super().load(request)

        def answer(self, *args: Any) -> Any:
            threads.add(threading.current_thread().name)
            return super().answer(*args)

    backend = Watching([["a"], ["b"]])

    async def body(app: ChatApp, pilot: Pilot[None]) -> None:
        for turn in (1, 2):
            await send(app, pilot, "Hi")
            await answered(app, pilot, turn)

    run(backend, body)
    assert threads == {"engine"}
