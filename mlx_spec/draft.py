"""What a drafter proposes: tokens, and the distribution each was drawn from."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_spec.errors import SpecError
from mlx_spec.sampling import SamplingParams
from mlx_spec.target import Features

_SUM_TOLERANCE = 1e-3


class DraftDist:
    """The distribution q of one drafted token, stored on its support only."""

    def __init__(self, probabilities: Mapping[int, float]) -> None:
        total = sum(probabilities.values())
        if (lowest := min(probabilities, default=0)) < 0:
            raise SpecError(f"there is no token {lowest}", "token ids begin at 0")
        is_sound = all(p >= 0 for p in probabilities.values())  # no NaN either
        if not (is_sound and abs(total - 1) <= _SUM_TOLERANCE):
            raise SpecError(
                f"draft probabilities sum to {total:.4g}",
                "q must be the distribution the token was drawn from",
            )
        self._probabilities = {t: p for t, p in probabilities.items() if p > 0}

    @classmethod
    def deterministic(cls, token: int) -> "DraftDist":
        """Return the point mass on one token."""
        return cls({token: 1.0})

    @classmethod
    def from_dense(cls, probabilities: npt.ArrayLike | mx.array) -> "DraftDist":
        """Read q from its values (V,) over the whole vocabulary."""
        dense = np.array(probabilities, np.float32)
        return cls({int(t): float(dense[t]) for t in np.flatnonzero(dense)})

    @classmethod
    def from_support(
        cls, support: Mapping[int, float] | Iterable[tuple[int, float]]
    ) -> "DraftDist":
        """Read q from (token, probability) pairs; every other token has none."""
        return cls(dict(support))

    @property
    def support(self) -> tuple[tuple[int, float], ...]:
        """The (token, probability) pairs with a probability above zero."""
        return tuple(self._probabilities.items())

    @property
    def is_deterministic(self) -> bool:
        """Whether all mass is on one token."""
        return len(self._probabilities) == 1

    def prob(self, token: int) -> float:
        """Return q(token)."""
        return self._probabilities.get(token, 0.0)


class DraftBlock:
    """K proposed tokens with, for each, the distribution it was drawn from.

    A block that a model drafted stays on the device: its tokens are read by the
    round loop together with the verdict, so that drafting never waits for the host.
    """

    def __init__(
        self,
        token_array: mx.array,
        q: mx.array | None,
        tokens: list[int] | None,
        dists: list[DraftDist] | None,
    ) -> None:
        self._array = token_array
        self._q = q
        self._tokens = tokens
        self._dists = dists

    @classmethod
    def empty(cls) -> "DraftBlock":
        """Return a block that proposes nothing."""
        return cls.deterministic([])

    @classmethod
    def new(cls, tokens: Sequence[int], dists: Sequence[DraftDist]) -> "DraftBlock":
        """Pair tokens with their distributions.

        Raises:
            SpecError: If there are not as many of one as of the other.
        """
        if len(tokens) != len(dists):
            raise SpecError(
                f"{len(tokens)} draft tokens with {len(dists)} distributions",
                "give one distribution a token",
            )
        ids = [int(token) for token in tokens]
        return cls(mx.array(ids, mx.int32), None, ids, list(dists))

    @classmethod
    def deterministic(cls, tokens: Sequence[int]) -> "DraftBlock":
        """Propose tokens that were chosen without chance."""
        return cls.new(tokens, [DraftDist.deterministic(int(t)) for t in tokens])

    @classmethod
    def on_device(cls, tokens: mx.array, q: mx.array | None) -> "DraftBlock":
        """Propose tokens (K,) int32 not yet computed, with q (K, V) float32.

        ``q`` None says that each was chosen without chance.
        """
        return cls(tokens, q, None, None)

    def __len__(self) -> int:
        return int(self._array.shape[0])

    @property
    def tokens(self) -> list[int]:
        """The proposed ids; waits for the device if they are not known yet."""
        if self._tokens is None:
            values: list[int] = self._array.tolist()  # type: ignore[assignment]
            self._tokens = values
        return self._tokens

    @property
    def dists(self) -> list[DraftDist]:
        """One distribution a token; waits for the device if they are not known yet."""
        if self._dists is None:
            if self._q is None:
                self._dists = [DraftDist.deterministic(t) for t in self.tokens]
            else:
                self._dists = [DraftDist.from_dense(row) for row in self._q]
        return self._dists

    @property
    def token_array(self) -> mx.array:
        """The proposed ids (K,) int32, on the device."""
        return self._array

    def truncate(self, length: int) -> "DraftBlock":
        """Keep the first ``length`` tokens; return the block itself."""
        self._array = self._array[:length]
        self._q = None if self._q is None else self._q[:length]
        self._tokens = None if self._tokens is None else self._tokens[:length]
        self._dists = None if self._dists is None else self._dists[:length]
        return self

    def resolve(self, tokens: list[int]) -> None:
        """Take note of the ids, which the round loop has read from the device."""
        self._tokens = tokens

    def q_rows(self, vocab_size: int) -> mx.array | None:
        """Return q (K, vocab_size) float32, or None if all are point masses."""
        if self._q is not None:
            missing = vocab_size - self._q.shape[-1]
            if missing < 0:
                raise _too_many_tokens(self._q.shape[-1] - 1, vocab_size)
            return mx.pad(self._q, [(0, 0), (0, missing)]) if missing > 0 else self._q
        if self._dists is None or all(
            dist.is_deterministic and dist.prob(token) > 0
            for dist, token in zip(self._dists, self.tokens, strict=True)
        ):
            return None
        dense = np.zeros((len(self), vocab_size), np.float32)
        for row, dist in zip(dense, self._dists, strict=True):
            for token, probability in dist.support:
                if token >= vocab_size:
                    raise _too_many_tokens(token, vocab_size)
                row[token] = probability
        return mx.array(dense)

    def check(self, vocab_size: int) -> None:
        """Check the tokens and distributions, as far as they are known here.

        Raises:
            SpecError: If a token is not the target's, or cannot have been drawn.
        """
        for token in self._tokens or ():
            if not 0 <= token < vocab_size:
                raise _too_many_tokens(token, vocab_size)
        if self._dists is not None:
            for token, dist in zip(self.tokens, self._dists, strict=True):
                if dist.prob(token) <= 0:
                    raise SpecError(
                        f"the drafter proposes token {token} with probability 0",
                        "q must be the distribution the token was drawn from",
                    )


def _too_many_tokens(token: int, vocab_size: int) -> SpecError:
    return SpecError(
        f"the drafter proposes token {token}, the target has tokens 0 to "
        f"{vocab_size - 1}",
        "use a drafter of the target's vocabulary",
    )


class Drafter(Protocol):
    """Anything that proposes tokens."""

    def propose(
        self, history: Sequence[int], target_hidden: mx.array | None, max_len: int
    ) -> DraftBlock:
        """Propose at most ``max_len`` tokens that continue ``history``.

        Args:
            history: All committed tokens, the anchor included. Valid for this call.
            target_hidden: (H,) final hidden state of the target at the last position
                in its cache, the one before the anchor.
            max_len: 1 or more.
        Returns:
            The block; an empty one proposes nothing.
        """
        ...


@runtime_checkable
class SamplingDrafter(Drafter, Protocol):
    """A drafter that draws its tokens, and wants to draw as the target does."""

    def follow(
        self, sampling: SamplingParams, seed: int, is_coupled: bool, vocab_size: int
    ) -> None:
        """Use the target's sampling settings from now on.

        Args:
            sampling: Filters and temperature of the target.
            seed: Seed of the run.
            is_coupled: Whether to draw with the target's own noise.
            vocab_size: Number of the target's tokens; no other may be proposed.
        """
        ...


@runtime_checkable
class FeatureDrafter(Drafter, Protocol):
    """A drafter that looks into the target.

    Attributes:
        taps: Layers whose output it wants to see, 0-based.
        lookback: Tokens before a change of the history that have to be run again,
            since what it keeps of a position depends on as many tokens behind it.
    """

    taps: tuple[int, ...]
    lookback: int

    def observe(self, history: Sequence[int], features: Features) -> None:
        """See the target's rows of positions that are committed.

        Args:
            history: All committed tokens. What was seen of positions from
                ``features.position`` on, or behind other tokens, is void.
            features: Rows of positions that ``history`` reaches.
        """
        ...
