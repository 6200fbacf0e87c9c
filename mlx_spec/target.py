"""What the round loop needs from a target model."""

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx

from mlx_spec.cache import ModelCache
from mlx_spec.memory import MemoryPlan

Tokens = Sequence[int] | mx.array


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
