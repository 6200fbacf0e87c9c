"""What a run did, counted the same way everywhere it is shown."""

from dataclasses import dataclass, field, replace
from typing import Literal

import mlx.core as mx

FinishReason = Literal["length", "stop"]


@dataclass(frozen=True, slots=True)
class RoundEvent:
    """One round of the loop, or the prefill.

    Attributes:
        tokens: Emitted ids; the first ``accepted`` of them were drafted.
        drafted: Number of tokens that were proposed and verified.
        accepted: Number of drafted tokens that were emitted.
        evaluated: Number of drafted tokens the rule looked at: up to and including
            the first rejection.
        is_prefill: Whether this was the prompt's forward, which is not a round.
        finish_reason: Why the run ends here, None if it goes on.
        logits: (len(tokens), V), the target's row each token was chosen from.
    """

    tokens: tuple[int, ...]
    drafted: int = 0
    accepted: int = 0
    evaluated: int = 0
    is_prefill: bool = False
    finish_reason: FinishReason | None = None
    logits: mx.array | None = field(default=None, repr=False, compare=False)

    def cut(self, count: int, reason: FinishReason) -> "RoundEvent":
        """Return the event as if the run had ended with its ``count``-th token."""
        return replace(
            self,
            tokens=self.tokens[:count],
            accepted=min(self.accepted, count),
            evaluated=min(self.evaluated, count),
            finish_reason=reason,
        )


@dataclass(slots=True)
class SpeculativeDecodeResult:
    """The tokens of a run and its counters.

    Attributes:
        generated_tokens: Emitted ids.
        forward_calls: Forward passes of the target, the prefill counting as one.
        tokens_generated: Number of emitted ids.
        verification_steps: Rounds; the prefill is none.
        drafted_tokens: Tokens proposed and verified.
        accepted_tokens: Drafted tokens that were emitted.
        evaluated_at_position: How often the rule looked at draft position i.
        accepted_at_position: How often it accepted there.
        finish_reason: Why the run ended, None if it was stopped from outside.
    """

    generated_tokens: list[int] = field(default_factory=list)
    forward_calls: int = 0
    tokens_generated: int = 0
    verification_steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    evaluated_at_position: list[int] = field(default_factory=list)
    accepted_at_position: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def observe(self, event: RoundEvent) -> None:
        """Add one event of ``speculative_stream``."""
        self.generated_tokens.extend(event.tokens)
        self.tokens_generated += len(event.tokens)
        self.forward_calls += 1
        self.verification_steps += not event.is_prefill
        self.drafted_tokens += event.drafted
        self.accepted_tokens += event.accepted
        self.finish_reason = event.finish_reason
        new_positions = event.evaluated - len(self.evaluated_at_position)
        self.evaluated_at_position.extend([0] * new_positions)
        self.accepted_at_position.extend([0] * new_positions)
        for position in range(event.evaluated):
            self.evaluated_at_position[position] += 1
            self.accepted_at_position[position] += position < event.accepted

    def tokens_per_call(self) -> float | None:
        """Emitted tokens per forward pass, None if there was none."""
        return _ratio(self.tokens_generated, self.forward_calls)

    def acceptance_length(self) -> float | None:
        """Generated tokens per verification round, None if there was no round."""
        return _ratio(self.tokens_generated, self.verification_steps)

    def accept_rate(self) -> float | None:
        """Accepted share of the *evaluated* drafted tokens, None if there were none.

        Tokens behind a rejection were never judged and do not count.
        """
        return _ratio(self.accepted_tokens, sum(self.evaluated_at_position))

    def accept_rate_per_position(self) -> list[float | None]:
        """Accepted share at each draft position, of the times it was evaluated."""
        return [
            _ratio(accepted, evaluated)
            for accepted, evaluated in zip(
                self.accepted_at_position, self.evaluated_at_position, strict=True
            )
        ]


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None
