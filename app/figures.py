"""The figures of a run, in the words in which they are shown everywhere."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from mlx_spec.generation import GenerationResponse

NONE = "–"
TurnEnd = Literal["stop", "length", "interrupted"]


@dataclass(frozen=True, slots=True)
class Figures:
    """A copy of a response's figures, safe to hand to another thread."""

    prompt_tokens: int
    cached_tokens: int
    prompt_tps: float
    generation_tokens: int
    generation_tps: float
    acceptance_length: float | None
    accept_rate: float | None
    accept_rate_per_position: tuple[float | None, ...]
    drafted_tokens: int
    accepted_tokens: int
    verification_steps: int
    forward_calls: int
    cache_bytes: int
    peak_memory: float

    @classmethod
    def of(cls, response: "GenerationResponse") -> "Figures":
        """Copy the figures of a response."""
        stats = response.stats
        return cls(
            prompt_tokens=response.prompt_tokens,
            cached_tokens=response.cached_tokens,
            prompt_tps=response.prompt_tps,
            generation_tokens=response.generation_tokens,
            generation_tps=response.generation_tps,
            acceptance_length=stats.acceptance_length(),
            accept_rate=stats.accept_rate(),
            accept_rate_per_position=tuple(stats.accept_rate_per_position()),
            drafted_tokens=stats.drafted_tokens,
            accepted_tokens=stats.accepted_tokens,
            verification_steps=stats.verification_steps,
            forward_calls=stats.forward_calls,
            cache_bytes=response.cache_bytes,
            peak_memory=response.peak_memory,
        )

    def lines(self) -> Iterator[str]:
        """Describe the run, a line for each of prompt, answer, drafts and memory."""
        reused = f", {self.cached_tokens} from the cache" if self.cached_tokens else ""
        yield (
            f"prompt: {self.prompt_tokens} tokens{reused}, {self.prompt_tps:.1f} tok/s"
        )
        yield (
            f"answer: {self.generation_tokens} tokens, "
            f"{self.generation_tps:.1f} tok/s, {self.forward_calls} forward calls"
        )
        positions = " ".join(map(percent, self.accept_rate_per_position)) or NONE
        yield (
            f"drafts: acceptance length {decimal(self.acceptance_length)}, "
            f"accept rate {percent(self.accept_rate)}, per position {positions}"
        )
        yield (
            f"memory: peak {self.peak_memory:.2f} GB, "
            f"cache {megabytes(self.cache_bytes)}"
        )


def percent(share: float | None) -> str:
    """Show a share, 0 … 1, as a percentage."""
    return NONE if share is None else f"{100 * share:.0f}%"


def decimal(value: float | None) -> str:
    """Show a number with two digits behind the point."""
    return NONE if value is None else f"{value:.2f}"


def megabytes(num_bytes: int) -> str:
    """Show bytes in MB, or GB from a thousand MB on."""
    if num_bytes >= 1e9:
        return f"{num_bytes / 1e9:.2f} GB"
    return f"{num_bytes / 1e6:.1f} MB"
