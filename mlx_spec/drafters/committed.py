"""What a drafter has seen of the target, in step with what is committed."""

from bisect import bisect_left
from collections.abc import Sequence

import mlx.core as mx

from mlx_spec.drafters.followed import FollowedTokens
from mlx_spec.target import Features


class CommittedRows:
    """The positions a drafter keeps rows of, and features that wait to become rows.

    A position's row may depend on tokens behind it, its *lookahead*: such a row can
    be made, and is good, only as long as those are committed. Positions that were
    never seen, as with a cache that another drafter warmed, are left out.
    """

    def __init__(self, lookahead: int) -> None:
        self._lookahead = lookahead
        self._followed = FollowedTokens()
        self._positions: list[int] = []
        self._waiting: list[Features] = []

    def __len__(self) -> int:
        return len(self._positions)

    @property
    def num_waiting(self) -> int:
        """Features that are no rows yet."""
        return sum(len(features.hidden) for features in self._waiting)

    @property
    def is_in_step(self) -> bool:
        """Whether every committed position before the anchor's ends in a row."""
        anchor = len(self._followed.tokens) - 1
        return bool(self._positions) and self._positions[-1] == anchor - 1

    def follow(self, history: Sequence[int]) -> None:
        """Forget the rows and features that ``history`` contradicts."""
        shared = self._followed.follow(history)
        self._forget(shared - self._lookahead, shared)

    def add(self, features: Features) -> None:
        """Let features wait; they replace what was known from their position on."""
        self._forget(features.position, features.position)
        self._waiting.append(features)

    def take(self) -> tuple[list[int], Features] | None:
        """Count waiting features as rows, as far as their lookahead is committed.

        Returns:
            Their positions and their features; None if there are none.
        """
        end = len(self._followed.tokens) - self._lookahead
        ready, rest = [], []
        for features in self._waiting:
            count = min(max(end - features.position, 0), len(features.hidden))
            ready.append(features.part(0, count))
            rest.append(features.part(count, len(features.hidden)))
        ready = [f for f in ready if len(f.hidden)]
        self._waiting = [f for f in rest if len(f.hidden)]
        if not ready:
            return None
        positions = [f.position + row for f in ready for row in range(len(f.hidden))]
        self._positions += positions
        hidden = mx.concatenate([f.hidden for f in ready])
        columns = zip(*(f.taps for f in ready), strict=True)
        taps = tuple(mx.concatenate(list(column)) for column in columns)
        return positions, Features(positions[0], hidden, taps)

    def _forget(self, rows_from: int, features_from: int) -> None:
        del self._positions[bisect_left(self._positions, rows_from) :]
        kept = (f.part(0, max(features_from - f.position, 0)) for f in self._waiting)
        self._waiting = [f for f in kept if len(f.hidden)]
