"""The one thread that loads and runs the models.

MLX streams belong to the thread that made them, so everything that computes happens
here. Requests come in through a queue, messages go out through ``post``.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Event, Thread
from typing import TYPE_CHECKING

from textual.message import Message

from mlx_spec_app.chat.messages import (
    LoadFailed,
    ModelLoaded,
    TextArrived,
    TurnFailed,
    TurnFinished,
)
from mlx_spec_app.figures import Figures, TurnEnd
from mlx_spec_app.request import Request

if TYPE_CHECKING:
    from mlx_spec.conversation import Conversation
    from mlx_spec.generation import GenerationResponse
    from mlx_spec.loading import LoadedModel
    from mlx_spec_app.backend import Backend

Messages = list[dict[str, str]]
_LEAVE_S = 1.0
_POST_INTERVAL_S = 0.05  # Textual's Markdown takes about 20 appends a second


@dataclass(frozen=True, slots=True)
class _Answer:
    messages: Messages


@dataclass(frozen=True, slots=True)
class _NewConversation:
    pass


class Engine:
    """Answers one turn after the other, on a thread of its own."""

    def __init__(
        self, request: Request, backend: "Backend", post: Callable[[Message], object]
    ) -> None:
        self._request = request
        self._backend = backend
        self._post = post
        self._jobs: SimpleQueue[_Answer | _NewConversation | None] = SimpleQueue()
        self._stop = Event()
        self._thread = Thread(target=self._work, name="engine", daemon=True)

    def start(self) -> None:
        """Load the model, then wait for turns."""
        self._thread.start()

    def answer(self, messages: Messages) -> None:
        """Answer a conversation that ends with the user's message."""
        self._stop.clear()
        self._jobs.put(_Answer(messages))

    def new_conversation(self) -> None:
        """Forget the conversation and its cache."""
        self._jobs.put(_NewConversation())

    def interrupt(self) -> None:
        """Stop the answer at its next token; what there is of it stays."""
        self._stop.set()

    def close(self) -> None:
        """Ask the thread to end after the token it is at."""
        self._stop.set()
        self._jobs.put(None)

    def join(self) -> bool:
        """Give the thread a moment to end; tell whether it has."""
        if self._thread.is_alive():
            self._thread.join(_LEAVE_S)
        return not self._thread.is_alive()

    def _work(self) -> None:
        # The thread's boundary: whatever goes wrong becomes a message.
        try:
            model = self._backend.load(self._request.load)
            conversation = self._backend.new_conversation(model)
        except Exception as error:
            self._post(LoadFailed(error))
            return
        self._post(ModelLoaded(_name_of(model.drafter)))
        while (job := self._jobs.get()) is not None:
            if isinstance(job, _NewConversation):
                conversation = self._backend.new_conversation(model)
                continue
            try:
                self._run(model, conversation, job.messages)
            except Exception as error:
                self._post(TurnFailed(error))

    def _run(
        self, model: "LoadedModel", conversation: "Conversation", messages: Messages
    ) -> None:
        outbox = _Outbox(self._post)
        reason: TurnEnd = "interrupted"
        responses = self._backend.answer(
            model, self._request.messages(messages), self._request, conversation
        )
        for response in responses:
            outbox.add(response)
            if response.finish_reason is not None:
                reason = response.finish_reason
                break
            if self._stop.is_set():
                break
        outbox.flush()
        self._post(TurnFinished(reason, outbox.figures))


class _Outbox:
    """Gathers text, so that the app is not told of every single token."""

    def __init__(self, post: Callable[[Message], object]) -> None:
        self._post = post
        self._texts: list[str] = []
        self._last_post = 0.0
        self._response: GenerationResponse | None = None

    @property
    def figures(self) -> Figures | None:
        """Figures of the latest response."""
        return None if self._response is None else Figures.of(self._response)

    def add(self, response: "GenerationResponse") -> None:
        self._response = response
        self._texts.append(response.text)
        if time.monotonic() - self._last_post >= _POST_INTERVAL_S:
            self.flush()

    def flush(self) -> None:
        figures = self.figures
        if figures is None or not self._texts:
            return
        self._post(TextArrived("".join(self._texts), figures))
        self._texts.clear()
        self._last_post = time.monotonic()


def _name_of(drafter: object) -> str:
    """Name a drafter the way it is asked for."""
    return "none" if drafter is None else getattr(drafter, "name", "own")
