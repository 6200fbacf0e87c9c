"""A backend that answers from a script, at the pace a test sets."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from threading import Event
from typing import Any

import mlx.core as mx

from mlx_spec import SpecError
from mlx_spec.generation import GenerationResponse
from mlx_spec.stats import RoundEvent, SpeculativeDecodeResult
from mlx_spec_app.request import LoadRequest, Request


def response(
    texts: Sequence[str], index: int, stats: SpeculativeDecodeResult
) -> GenerationResponse:
    """The response that carries ``texts[index]``."""
    return GenerationResponse(
        text=texts[index],
        token=index,
        from_draft=bool(index % 2),
        prompt_tokens=12,
        cached_tokens=3,
        prompt_tps=100.0,
        generation_tokens=index + 1,
        generation_tps=42.5,
        peak_memory=1.25,
        cache_bytes=5_000_000,
        stats=stats,
        finish_reason="stop" if index == len(texts) - 1 else None,
        _row=mx.zeros((4,)),
    )


@dataclass
class FakeDrafter:
    """Stands for the lookup drafter."""


@dataclass
class FakeModel:
    drafter: object = None


@dataclass
class FakeBackend:
    """Answers each turn with the next script.

    Attributes:
        scripts: Texts of each answer, token by token; an exception is raised.
        loads: What was asked to be loaded.
        asked: Prompt and request of every turn.
        gate: If given, each token after the first waits for it.
        break_at: If given, answers break at this token.
        load_gate: If given, loading waits for it.
        load_error: Raised by ``load``.
        conversations: How many were begun.
    """

    scripts: list[list[str] | Exception] = field(default_factory=list)
    loads: list[LoadRequest] = field(default_factory=list)
    asked: list[tuple[Any, Request]] = field(default_factory=list)
    gate: Event | None = None
    break_at: int | None = None
    load_gate: Event | None = None
    load_error: Exception | None = None
    conversations: int = 0

    def load(self, request: LoadRequest) -> Any:
        if self.load_gate is not None:
            self.load_gate.wait(60)
        if self.load_error is not None:
            raise self.load_error
        self.loads.append(request)
        return FakeModel(FakeDrafter())

    def new_conversation(self, model: Any) -> Any:
        self.conversations += 1
        return object()

    def answer(
        self, model: Any, prompt: Any, request: Request, conversation: Any
    ) -> Iterator[GenerationResponse]:
        self.asked.append((prompt, request))
        script = self.scripts.pop(0) if self.scripts else ["ok"]
        if isinstance(script, Exception):
            raise script
        stats = SpeculativeDecodeResult()
        for index in range(len(script)):
            if index and self.gate is not None:
                self.gate.wait(60)
            if index == self.break_at:
                raise broken()
            stats.observe(
                RoundEvent(
                    tokens=(index,),
                    drafted=2 if index else 0,
                    accepted=0,
                    evaluated=1 if index else 0,
                    is_prefill=index == 0,
                )
            )
            yield response(script, index, stats)


def broken(message: str = "it broke") -> SpecError:
    """An error as the library raises them."""
    return SpecError(message, "do something else")
