"""Draws drafted tokens as the target draws its own, without waiting for the host."""

from collections.abc import Sequence

import mlx.core as mx

from mlx_spec.draft import DraftBlock
from mlx_spec.sampling import (
    Purpose,
    Sampler,
    SamplingParams,
    block_contexts,
    processed_logits,
)


class DraftSampler:
    """The settings that drafts are drawn with.

    Args:
        num_tokens: Number of tokens the drafter can propose; rows may be wider.
    """

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = self._width = self._noise_size = num_tokens
        self._sampling = SamplingParams()
        self._sampler = Sampler(0)
        self._purpose = Purpose.DRAFT

    def follow(
        self, sampling: SamplingParams, seed: int, is_coupled: bool, vocab_size: int
    ) -> None:
        """Draw as the target does; see ``SamplingDrafter``."""
        self._width = min(self._num_tokens, vocab_size)
        self._noise_size = vocab_size
        self._sampling = sampling
        self._sampler = Sampler(seed)
        self._purpose = Purpose.TARGET if is_coupled else Purpose.DRAFT

    def begin(self, history: Sequence[int]) -> "Draft":
        """Begin a draft that continues ``history``."""
        return Draft(self, history)

    def draw(
        self, row: mx.array, history: Sequence[int], drafted: list[mx.array]
    ) -> tuple[mx.array, mx.array | None]:
        """Draw one token (1,) from a row of logits.

        Returns:
            The token, and the q (V,) it was drawn from, None if without chance.
        """
        before = mx.concatenate(drafted) if drafted else mx.zeros((0,), mx.int32)
        contexts = block_contexts(history, before, self._sampling)
        scores = processed_logits(
            row[None, : self._width],
            self._sampling,
            None if contexts is None else contexts[-1:],
        )
        if self._sampling.is_greedy:
            return mx.argmax(scores, axis=-1).astype(mx.int32), None
        position = len(history) + len(drafted)
        # As much noise as the target draws: less of it would be other noise.
        noise = self._sampler.gumbel_at([position], self._purpose, self._noise_size)
        token = mx.argmax(scores + noise[:, : scores.shape[-1]], axis=-1)
        return token.astype(mx.int32), mx.softmax(scores[0])


class Draft:
    """A block while it is being drawn, on the device."""

    def __init__(self, sampler: DraftSampler, history: Sequence[int]) -> None:
        self._sampler = sampler
        self._history = history
        self._tokens: list[mx.array] = []
        self._q: list[mx.array] = []

    @property
    def last(self) -> mx.array:
        """The token drawn last, (1,) int32."""
        return self._tokens[-1]

    def draw(self, row: mx.array) -> mx.array:
        """Draw the next token (1,) from a row of logits (V,)."""
        token, q = self._sampler.draw(row, self._history, self._tokens)
        self._tokens.append(token)
        if q is not None:
            self._q.append(q)
        return token

    def block(self) -> DraftBlock:
        """Return what was drawn."""
        q = mx.stack(self._q) if self._q else None
        return DraftBlock.on_device(mx.concatenate(self._tokens), q)
