"""A drafter's own copy of the committed tokens."""

from collections.abc import Sequence

from mlx_spec.cache import common_length

_LOOK_BACK = 16


class FollowedTokens:
    """Committed tokens, brought up to date at the cost of those that are new."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._source: Sequence[int] | None = None

    def follow(self, history: Sequence[int]) -> int:
        """Take over ``history``; return how many leading tokens stayed the same."""
        known = len(self.tokens)
        # The loop hands over one growing list: then a look at its end is enough.
        grew = (
            history is self._source
            and len(history) >= known
            and list(history[max(known - _LOOK_BACK, 0) : known])
            == self.tokens[-_LOOK_BACK:]
        )
        shared = known if grew else common_length(self.tokens, history)
        del self.tokens[shared:]
        self.tokens += history[shared:]
        self._source = history
        return shared
