"""The chat on the real library: one cache a conversation, reused from turn to turn."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mlx_spec import LoadError, SamplingParams
from mlx_spec_app.backend import LibraryBackend
from mlx_spec_app.chat.app import ChatApp
from mlx_spec_app.chat.widgets import AnswerTurn, PromptArea
from mlx_spec_app.figures import Figures
from mlx_spec_app.request import LoadRequest, Request
from tests.app.test_chat import until
from tests.checkpoints import write_text_checkpoint


def request_for(folder: Path, max_tokens: int) -> Request:
    return Request(
        load=LoadRequest(model=str(folder)),
        sampling=SamplingParams(),
        max_tokens=max_tokens,
    )


def figures_of_turns(
    folder: Path, max_tokens: int, questions: list[str]
) -> list[Figures]:
    """Ask one question after the other in the chat; return each answer's figures."""
    app = ChatApp(request_for(folder, max_tokens), LibraryBackend())
    found: list[Figures] = []

    async def main() -> None:
        async with app.run_test(size=(120, 36)) as pilot:
            await until(pilot, lambda: app._is_loaded)
            for question in questions:
                app.query_one(PromptArea).insert(question)
                await pilot.press("enter")
                await until(
                    pilot,
                    lambda: (
                        len(app.query(AnswerTurn)) == len(found) + 1
                        and not app.is_answering
                    ),
                )
                assert app._figures is not None
                found.append(app._figures)

    asyncio.run(main())
    assert app.failure is None
    return found


def test_the_second_turn_reads_only_what_is_new(tmp_path: Path) -> None:
    folder = write_text_checkpoint(tmp_path / "model")
    first, second = figures_of_turns(folder, 12, ["abcabc", "And again?"])
    assert first.cached_tokens == 0
    # A random model's bytes need not be the same tokens when they come back as text.
    assert second.cached_tokens >= first.prompt_tokens


def test_a_model_without_chat_template_is_refused_at_load(tmp_path: Path) -> None:
    folder = write_text_checkpoint(tmp_path / "model")
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    del settings["chat_template"]
    file.write_text(json.dumps(settings))
    app = ChatApp(request_for(folder, 12), LibraryBackend())

    async def main() -> None:
        async with app.run_test() as pilot:
            await until(pilot, lambda: app.failure is not None)

    asyncio.run(main())
    assert isinstance(app.failure, LoadError)
    assert app.failure.message == f"{folder} has no chat template"
    assert "use mlx-spec generate" in app.failure.hint


@pytest.mark.model
@pytest.mark.slow
def test_the_second_turn_of_a_real_chat_reuses_prompt_and_answer(
    smollm2: Callable[[str], Path],
) -> None:
    questions = ["Say the word yes.", "Now say the word no."]
    first, second = figures_of_turns(smollm2("4bit"), 12, questions)
    held = first.prompt_tokens + first.generation_tokens - 1
    assert second.cached_tokens == held
    assert second.prompt_tokens > held
