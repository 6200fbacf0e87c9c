"""What a drafter has seen of the target, in step with what is committed."""

from bisect import bisect_left
from collections.abc import Sequence

import mlx.core as mx

from mlx_spec.cache import common_length
from mlx_spec.target import Features


class CommittedRows:
    """The positions a drafter keeps rows of, and features that wait to become rows.

    A position's row may depend on tokens behind it, its *lookahead*: such a row can
    be made, and is good, only as long as those are committed. Positions that were
    never seen, as with a cache that another drafter warmed, are left out.
    """

    def __init__(self, lookahead: int) -> None:
        self._lookahead = lookahead
        self._tokens: list[int] = []
        self._positions: list[int] = []
        self._waiting: list[Features] = []

    def __len__(self) -> int:
        return len(self._positions)

    @property
    def num_waiting(self) -> int:
        """Features that are no rows yet."""
        return sum(len(features.hidden) for features in self._waiting)

    def observe(self, history: Sequence[int], features: Features) -> None:
        """Let features wait, and forget what they or ``history`` replace."""
        shared = common_length(self._tokens, history)
        good = min(shared - self._lookahead, features.position)
        del self._positions[bisect_left(self._positions, good) :]
        known = min(shared, features.position)
        kept = (f.part(0, max(known - f.position, 0)) for f in self._waiting)
        self._waiting = [f for f in kept if len(f.hidden)]
        self._waiting.append(features)
        self._tokens = list(history)

    def is_in_step(self, history: Sequence[int]) -> bool:
        """Whether everything before the anchor was seen, and is a row by now."""
        return (
            bool(self._positions)
            and self._positions[-1] == len(history) - 2
            and common_length(self._tokens, history) == len(self._tokens)
        )

    def take(self, history: Sequence[int]) -> tuple[list[int], Features] | None:
        """Count waiting features as rows, as far as their lookahead is committed.

        Returns:
            Their positions and features; None if there are none.
        """
        end = len(history) - self._lookahead
        if common_length(self._tokens, history) < len(self._tokens):
            return None
        self._tokens = list(history)
        ready = [f.part(0, max(end - f.position, 0)) for f in self._waiting]
        rest = [f.part(max(end - f.position, 0), len(f.hidden)) for f in self._waiting]
        ready = [f for f in ready if len(f.hidden)]
        self._waiting = [f for f in rest if len(f.hidden)]
        if not ready:
            return None
        positions = [
            p for f in ready for p in range(f.position, f.position + len(f.hidden))
        ]
        self._positions += positions
        hidden = mx.concatenate([f.hidden for f in ready])
        columns = zip(*(f.taps for f in ready), strict=True)
        taps = tuple(mx.concatenate(list(column)) for column in columns)
        return positions, Features(positions[0], hidden, taps)
