"""From logits to the distribution that is really drawn from, and seeded draws.

One function gives the distribution, in float32, for plain sampling, for the target's
side of the acceptance test and for a drafter's own draws. Draws are a function of
(seed, position, purpose), so nothing depends on where a draft block begins or ends.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from types import MappingProxyType

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_spec.errors import SpecError

# Beyond these, logits divided or multiplied by them leave the range of float32.
_SMALLEST, _LARGEST = 1e-5, 1e5

_NO_BIAS: Mapping[int, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a token is chosen from logits; names and meaning as in mlx-lm.

    Attributes:
        temperature: 0 takes the most likely token.
        top_k: Keep the k most likely tokens; 0 keeps all.
        top_p: Keep the most likely tokens that make up this mass; 1 keeps all.
        min_p: Drop tokens less likely than min_p times the most likely one.
        repetition_penalty: Divides positive and multiplies negative logits of tokens
            in the penalty context; 1 is off (Keskar et al. 2019, arXiv 1909.05858).
        presence_penalty: Subtracted once from the logits of those tokens.
        frequency_penalty: Subtracted from them once for each occurrence.
        logit_bias: Added to the logits of single tokens.
        penalty_context: Number of latest tokens the penalties look at.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: _NO_BIAS)
    penalty_context: int = 20

    def __post_init__(self) -> None:
        temperature = self.temperature
        is_usable = temperature == 0 or _SMALLEST <= temperature <= _LARGEST
        _check(
            "temperature", temperature, is_usable, f"0, or {_SMALLEST} to {_LARGEST}"
        )
        _check("top_k", self.top_k, self.top_k >= 0, "0 or more")
        _check("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1")
        _check("min_p", self.min_p, 0 <= self.min_p <= 1, "from 0 to 1")
        penalty = self.repetition_penalty
        is_usable = _SMALLEST <= penalty <= _LARGEST
        expected = f"{_SMALLEST} to {_LARGEST} (1 is off)"
        _check("repetition_penalty", penalty, is_usable, expected)
        context = self.penalty_context
        _check("penalty_context", context, context > 0, "1 or more")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            expected = f"-{_LARGEST} to {_LARGEST} (0 is off)"
            _check(name, value, abs(value) <= _LARGEST, expected)
        negative = [token for token in self.logit_bias if token < 0]
        _check("logit_bias", negative, not negative, "keyed by token ids of 0 or more")
        nan = [token for token, bias in self.logit_bias.items() if math.isnan(bias)]
        _check("logit_bias of token", nan, not nan, "numbers")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        """Whether the distribution depends on the tokens before it."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )


def _check(name: str, value: object, is_valid: bool, expected: str) -> None:
    if not is_valid:
        raise SpecError(f"{name} is {value}", f"use {expected}")


GREEDY = SamplingParams()


def sampling_distribution(
    logits: mx.array,
    params: SamplingParams,
    history: Sequence[int] | Sequence[Sequence[int]] = (),
) -> mx.array:
    """Return the probabilities that plain sampling draws from.

    Args:
        logits: (V,) for one row, or (M, V).
        params: Penalties, filters and temperature.
        history: Tokens before the row; for (M, V) one such sequence a row.
    Returns:
        float32 probabilities of the same shape; a one-hot row at temperature 0.
    """
    is_single = logits.ndim == 1
    rows = logits[None] if is_single else logits
    histories = [history] if is_single else (history or [()] * len(rows))
    contexts = None
    if params.has_penalties:
        contexts = mx.array(
            [_padded_tail(h, params.penalty_context) for h in histories],  # type: ignore[arg-type]
            mx.int32,
        )
    probabilities = distribution_rows(rows, params, contexts)
    return probabilities[0] if is_single else probabilities


def distribution_rows(
    logits: mx.array, params: SamplingParams, contexts: mx.array | None
) -> mx.array:
    """Return (M, V) float32 probabilities; see ``processed_logits``."""
    scores = processed_logits(logits, params, contexts)
    if params.is_greedy:
        best = mx.argmax(scores, axis=-1, keepdims=True)
        return (mx.arange(scores.shape[-1]) == best).astype(mx.float32)
    return mx.softmax(scores, axis=-1)


def processed_logits(
    logits: mx.array, params: SamplingParams, contexts: mx.array | None
) -> mx.array:
    """Apply bias, penalties, filters and temperature, in mlx-lm's order.

    The filters see the distribution at temperature 1, as there.

    Args:
        logits: (M, V).
        params: What to apply.
        contexts: (M, C) latest tokens of each row, padded with −1; None without
            penalties.
    Returns:
        (M, V) float32, −inf where a token cannot be drawn.
    """
    scores = logits.astype(mx.float32)
    # A drafter may have fewer tokens than the target that a bias or a context is for.
    bias = {t: v for t, v in params.logit_bias.items() if t < scores.shape[-1]}
    if bias:
        tokens = mx.array(list(bias), mx.int32)
        scores = scores.at[:, tokens].add(mx.array(list(bias.values()), mx.float32))
    if contexts is not None:
        scores = _penalised(scores, params, contexts)
    if params.is_greedy:
        return scores
    if params.top_p < 1:
        scores = _keep_top_p(scores, params.top_p)
    if params.min_p > 0:
        floor = scores.max(axis=-1, keepdims=True) + math.log(params.min_p)
        scores = mx.where(scores < floor, -mx.inf, scores)
    if 0 < params.top_k < scores.shape[-1]:
        scores = _keep_top_k(scores, params.top_k)
    return scores if params.temperature == 1 else scores * (1 / params.temperature)


def _penalised(
    scores: mx.array, params: SamplingParams, contexts: mx.array
) -> mx.array:
    rows, vocab = scores.shape
    # Padding (−1) is counted in an extra column that is then dropped.
    slots = mx.where((contexts < 0) | (contexts >= vocab), vocab, contexts)
    row_index = mx.arange(rows)[:, None]
    counts = mx.zeros((rows, vocab + 1)).at[row_index, slots].add(1.0)[:, :vocab]
    seen = counts > 0
    if params.repetition_penalty != 1:
        penalty = params.repetition_penalty
        changed = mx.where(scores < 0, scores * penalty, scores / penalty)
        scores = mx.where(seen, changed, scores)
    if params.presence_penalty:
        scores = mx.where(seen, scores - params.presence_penalty, scores)
    if params.frequency_penalty:
        scores = scores - params.frequency_penalty * counts
    return scores


def _keep_top_p(scores: mx.array, top_p: float) -> mx.array:
    probabilities = mx.softmax(scores, axis=-1)
    ascending = mx.sort(probabilities, axis=-1)
    above = mx.cumsum(ascending, axis=-1, reverse=True, inclusive=False)
    total = above[..., :1] + ascending[..., :1]
    num_dropped = (above >= top_p * total).sum(axis=-1, keepdims=True)
    threshold = mx.take_along_axis(ascending, num_dropped, axis=-1)
    return mx.where(probabilities < threshold, -mx.inf, scores)


def _keep_top_k(scores: mx.array, top_k: int) -> mx.array:
    dropped = mx.argpartition(-scores, kth=top_k - 1, axis=-1)[..., top_k:]
    return mx.put_along_axis(scores, dropped, mx.array(-mx.inf), axis=-1)


def _padded_tail(history: Sequence[int], length: int) -> list[int]:
    tail = list(history[-length:])
    return [-1] * (length - len(tail)) + tail


def block_contexts(
    history: Sequence[int], draft_tokens: mx.array, params: SamplingParams
) -> mx.array | None:
    """Return the penalty contexts of the K + 1 rows of a draft block.

    Row i follows ``history`` and the first i drafted tokens, so the tokens need not
    be known on the host.

    Args:
        history: Committed tokens, the anchor included.
        draft_tokens: (K,) int32.
        params: Penalties; None is returned if there are none.
    """
    if not params.has_penalties:
        return None
    length = params.penalty_context
    tail = mx.array(_padded_tail(history, length), mx.int32)
    tokens = mx.concatenate([tail, draft_tokens.astype(mx.int32)])
    rows = draft_tokens.size + 1
    return tokens[mx.arange(rows)[:, None] + mx.arange(length)[None]]


class Purpose(IntEnum):
    """What a draw is for; draws of different purposes are independent."""

    TARGET = 1
    ACCEPT = 2
    NEXT = 3
    DRAFT = 4
    STREAM = 5


_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _mixed(value: int) -> int:
    """SplitMix64 finaliser (Steele et al. 2014): a bijection that spreads all bits."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class Sampler:
    """Counter-based random draws of one seed.

    ``uniform`` and ``sample_from`` walk a stream of their own; the ``…_at`` methods
    are keyed by position and purpose and have no state.
    """

    def __init__(self, seed: int) -> None:
        self._seed = _mixed((seed + _GOLDEN) & _MASK)
        self._counter = 0

    def uniform(self) -> float:
        """Return the next number of the stream, in [0, 1)."""
        self._counter += 1
        return self.uniform_at(self._counter, Purpose.STREAM)

    def sample_from(self, probs: npt.ArrayLike | mx.array) -> int:
        """Draw an index from weights (V,) that need not sum to one."""
        return index_at(np.array(probs, np.float32), self.uniform())

    def uniform_at(self, position: int, purpose: Purpose) -> float:
        """Return the number for one position and purpose: 23 bits, in [0, 1)."""
        return (self._hash(position, purpose) >> 41) * 2.0**-23

    def gumbel_at(
        self, positions: Sequence[int], purpose: Purpose, size: int
    ) -> mx.array:
        """Return float32 standard Gumbel noise (len(positions), size), keyed alike."""
        rows = [
            mx.random.gumbel((size,), key=mx.random.key(self._hash(p, purpose)))
            for p in positions
        ]
        return mx.stack(rows)

    def _hash(self, position: int, purpose: Purpose) -> int:
        keyed = _mixed((self._seed + purpose * _GOLDEN) & _MASK)
        return _mixed((keyed ^ position) & _MASK)


def index_at(weights: npt.NDArray[np.float32], uniform: float) -> int:
    """Invert the cumulative weights at ``uniform`` in [0, 1)."""
    cumulative = np.cumsum(weights, dtype=np.float32)
    reached = (cumulative > np.float32(uniform) * cumulative[-1]) & (weights > 0)
    return int(np.argmax(reached))
