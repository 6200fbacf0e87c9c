"""One conversation's cache, reused from turn to turn."""

from collections.abc import Iterator, Sequence

from mlx_spec.cache import ModelCache, common_length
from mlx_spec.draft import Drafter, FeatureDrafter
from mlx_spec.errors import SpecError
from mlx_spec.speculative import SpeculativeOptions, speculative_stream
from mlx_spec.stats import RoundEvent
from mlx_spec.target import Target


class Conversation:
    """The tokens so far, and a cache that holds a part of them.

    Each run gives the whole prompt; only what differs from the tokens so far is
    processed. An edited or retried turn is no special case.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self.cache: ModelCache = target.new_cache()
        self.tokens: list[int] = []
        self.turn = 0

    def prepare(self, prompt: Sequence[int], drafter: Drafter | None = None) -> int:
        """Begin a turn: set the cache back to what ``prompt`` shares with the tokens.

        A turn before it that was not closed has no more say.

        Args:
            prompt: All tokens of the turn.
            drafter: The turn's drafter, which may need to see some tokens again.
        Returns:
            Number of prompt tokens that need no processing.
        """
        self.turn += 1
        held = self.tokens[: self.cache.shortest]
        # The last prompt token is run in any case: its row gives the first token.
        shared = min(common_length(held, prompt), len(prompt) - 1)
        lookback = drafter.lookback if isinstance(drafter, FeatureDrafter) else 0
        reached = self.cache.rewind(max(shared - lookback, 0))
        self.tokens = list(prompt[:reached])
        return reached

    def run(
        self,
        prompt: Sequence[int],
        drafter: Drafter | None,
        options: SpeculativeOptions,
    ) -> Iterator[RoundEvent]:
        """Continue with a prompt that ``prepare`` was called with.

        ``options.start_pos`` is what it returned. Tokens are taken up into the
        conversation by ``keep``, so that the consumer decides where a turn ends.
        """
        context, rest = prompt[: options.start_pos], prompt[options.start_pos :]
        events = speculative_stream(
            self._target, self.cache, rest, drafter, options, context=context
        )
        turn = self.turn
        for index, event in enumerate(events):
            if index == 0 and turn == self.turn:
                self.tokens = list(prompt)
            yield event
            if turn != self.turn:
                raise SpecError(
                    "another turn of this conversation has begun",
                    "one turn after the other, or a conversation each",
                )

    def keep(self, token: int, turn: int) -> None:
        """Count one generated token as a part of the conversation."""
        if turn == self.turn:
            self.tokens.append(token)

    def close_turn(self, turn: int) -> None:
        """Take back whatever the cache holds past the last token that was kept."""
        if turn != self.turn:
            return
        # A pass that an exception cut short leaves layers of different lengths.
        reached = min(self.cache.shortest, max(len(self.tokens) - 1, 0))
        self.cache.rewind(reached)
