"""What the round loop needs from a target model."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import mlx.core as mx

from mlx_spec.cache import ModelCache
from mlx_spec.memory import MemoryPlan

Tokens = Sequence[int] | mx.array


class Forward(NamedTuple):
    """What one forward pass gives.

    Attributes:
        logits: (T, V), or (1, V) if only the last position was asked for.
        hidden: (T, H), after the final norm.
        taps: (T, H) residual stream after each layer that was asked for.
    """

    logits: mx.array
    hidden: mx.array
    taps: tuple[mx.array, ...]


class Features(NamedTuple):
    """What a drafter gets to see of T consecutive positions of the target.

    Attributes:
        position: Of the first row in the sequence; for a drafter, in the history.
        hidden: (T, H), after the final norm.
        taps: (T, H) for each layer the drafter asked for.
    """

    position: int
    hidden: mx.array
    taps: tuple[mx.array, ...]

    def part(self, start: int, stop: int) -> "Features":
        """Return rows ``start`` to ``stop``."""
        taps = tuple(tap[start:stop] for tap in self.taps)
        return Features(self.position + start, self.hidden[start:stop], taps)


Observer = Callable[[Features], None]


class Target(Protocol):
    """A model whose distribution is preserved."""

    @property
    def vocab_size(self) -> int:
        """Number of logits of a row."""
        ...

    @property
    def max_context(self) -> int | None:
        """Longest sequence in tokens, None if there is no limit."""
        ...

    @property
    def memory_plan(self) -> MemoryPlan:
        """What weights and caches need at each context length."""
        ...

    def new_cache(self) -> ModelCache:
        """Return an empty cache for one sequence."""
        ...

    def prefill(
        self, tokens: Tokens, start_pos: int, cache: ModelCache, step: int = 2048
    ) -> tuple[mx.array, mx.array]:
        """Run a prompt; return the last position's logits (V,) and hidden (H,)."""
        ...

    def forward_batch_with_hidden(
        self, tokens: Tokens, start_pos: int, cache: ModelCache
    ) -> tuple[mx.array, mx.array]:
        """Run T tokens; return logits (T, V) and final hidden states (T, H)."""
        ...


class FeatureTarget(Target, Protocol):
    """A target that lets drafters see its layers and use its embedding and head."""

    @property
    def hidden_size(self) -> int:
        """Width H of the residual stream."""
        ...

    @property
    def num_layers(self) -> int:
        """Number of layers that can be tapped."""
        ...

    def embed(self, tokens: Tokens) -> mx.array:
        """Return the input (T, H) of the first layer for T tokens."""
        ...

    def logits_of(self, hidden: mx.array) -> mx.array:
        """Return the logits (T, V) of final hidden states (T, H)."""
        ...

    def forward(
        self,
        tokens: Tokens,
        start_pos: int,
        cache: ModelCache,
        *,
        taps: Sequence[int] = (),
    ) -> Forward:
        """Run T tokens; return logits, final hidden states and tapped layers."""
        ...

    def prefill(
        self,
        tokens: Tokens,
        start_pos: int,
        cache: ModelCache,
        step: int = 2048,
        *,
        taps: Sequence[int] = (),
        observer: Observer | None = None,
    ) -> tuple[mx.array, mx.array]:
        """Run a prompt, and show ``observer`` every row of it, chunk by chunk."""
        ...
