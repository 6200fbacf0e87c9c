"""Which drafted tokens survive: pure functions, no model, no cache.

p is the target's distribution, q the drafter's, x ~ q the draft:
    p(x) >= q(x)  accept x
    otherwise     accept x with probability p(x)/q(x)
    rejected      draw from max(0, p − q), normalised
The token that results is distributed as p, whatever q is (Leviathan et al. 2023,
arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318).
"""

from typing import NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_spec.draft import DraftDist
from mlx_spec.sampling import Sampler


class Verdict(NamedTuple):
    """What became of a draft block; scalars on the device.

    Attributes:
        num_accepted: () int32, drafted tokens that survive, 0 … K.
        next_token: () int32, recovered after a rejection, bonus otherwise.
    """

    num_accepted: mx.array
    next_token: mx.array


def accept_or_resample(
    target: npt.ArrayLike | mx.array, draft: DraftDist, token: int, rng: Sampler
) -> int | None:
    """Apply the rule to one drafted token.

    Args:
        target: p, (V,).
        draft: q; a token it rules out is accepted, since it was not drawn from it.
        token: The drafted id x.
        rng: Gives one number for the test and, after a rejection, one for the draw.
    Returns:
        None if the token is accepted, else the recovered token.
    """
    p = np.array(target, np.float32)
    q = np.float32(draft.prob(token))
    if q <= 0 or np.float32(rng.uniform()) * q < p[token]:
        return None
    residual = p.copy()
    for other, probability in draft.support:
        residual[other] = max(residual[other] - np.float32(probability), 0)
    return rng.sample_from(residual if residual.sum() > 0 else p)


def verify_block(
    p: mx.array,
    draft_tokens: mx.array,
    q: mx.array | None,
    accept_draws: mx.array,
    next_draws: mx.array,
) -> Verdict:
    """Apply the rule to a whole block at once.

    Args:
        p: (K + 1, V) float32, row i is the target's distribution of draft token i.
        draft_tokens: (K,) int32.
        q: (K, V) float32, or None if every draft is a point mass.
        accept_draws: (K,) float32 in [0, 1), for the test of each token.
        next_draws: (K + 1,) float32 in [0, 1), for the recovered or bonus token.
    """
    num_drafted = draft_tokens.size
    if num_drafted == 0:
        return Verdict(mx.array(0, mx.int32), _index_at(p[0], next_draws[0]))
    picked = draft_tokens[:, None]
    p_token = mx.take_along_axis(p[:num_drafted], picked, axis=-1)[:, 0]
    if q is None:
        is_accepted = accept_draws < p_token
    else:
        q_token = mx.take_along_axis(q, picked, axis=-1)[:, 0]
        is_accepted = (q_token <= 0) | (accept_draws * q_token < p_token)
    num_accepted = _leading(is_accepted)
    last = mx.minimum(num_accepted, num_drafted - 1)
    row = p[num_accepted]
    if q is None:
        taken = (mx.arange(row.size) == draft_tokens[last]).astype(mx.float32)
    else:
        taken = q[last]
    taken = mx.where(num_accepted < num_drafted, taken, 0.0)
    residual = mx.maximum(row - taken, 0.0)
    weights = mx.where(residual.sum() > 0, residual, row)
    return Verdict(num_accepted, _index_at(weights, next_draws[num_accepted]))


def match_block(samples: mx.array, draft_tokens: mx.array) -> Verdict:
    """Accept drafts as long as they are the token the target itself chose.

    With the target's choices made by Gumbel noise keyed by position this is the
    coupled rule (Daliri et al. 2024, arXiv 2408.07978); with its argmax, greedy.

    Args:
        samples: (K + 1,) int32, the target's own choice for each row.
        draft_tokens: (K,) int32.
    """
    if draft_tokens.size == 0:
        return Verdict(mx.array(0, mx.int32), samples[0])
    num_accepted = _leading(samples[: draft_tokens.size] == draft_tokens)
    return Verdict(num_accepted, samples[num_accepted])


def _leading(is_accepted: mx.array) -> mx.array:
    """Count the leading True values, () int32."""
    return mx.cumprod(is_accepted.astype(mx.int32)).sum().astype(mx.int32)


def _index_at(weights: mx.array, uniform: mx.array) -> mx.array:
    """Invert the cumulative weights (V,) at ``uniform`` in [0, 1); () int32."""
    cumulative = mx.cumsum(weights)
    reached = (cumulative > uniform * cumulative[-1]) & (weights > 0)
    return mx.argmax(reached.astype(mx.int32)).astype(mx.int32)
