"""Feed-forward parts: dense, and mixtures of experts with their routers."""

import mlx.core as mx

from mlx_spec.config import ModelConfig
from mlx_spec.layers import swiglu, swiglu_oai
from mlx_spec.weights import Weights

# Prefill sorts its (row, expert) pairs by expert. Blocks of fewer rows never do, so
# that a row's sums run in one order whatever the width of the block it is in.
_SORT_FROM_ROWS = 33


class DenseFeedForward:
    """down(silu(gate(x))·up(x))."""

    def __init__(
        self, config: ModelConfig, width: int, bias: bool, weights: Weights, prefix: str
    ) -> None:
        hidden = config.hidden_size
        self._gate = weights.linear(f"{prefix}.gate_proj", width, hidden, bias)
        self._up = weights.linear(f"{prefix}.up_proj", width, hidden, bias)
        self._down = weights.linear(f"{prefix}.down_proj", hidden, width, bias)

    def __call__(self, x: mx.array) -> mx.array:
        """Map x (1, T, H) to (1, T, H)."""
        return self._down(swiglu(self._gate(x), self._up(x)))


class Router:
    """Chooses each row's experts and their weights."""

    def __init__(self, config: ModelConfig, weights: Weights, prefix: str) -> None:
        self._config = config
        experts, hidden = config.num_experts, config.hidden_size
        self._gate = weights.linear(prefix, experts, hidden, config.router_bias)
        self._correction: mx.array | None = None
        if config.router_correction_bias:
            name = f"{prefix}.e_score_correction_bias"
            self._correction = weights.tensor(name, (experts,)).astype(mx.float32)

    def __call__(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """Return experts (1, T, k) and their weights (1, T, k)."""
        config = self._config
        logits = self._gate(x)
        if config.router_float32:
            logits = logits.astype(mx.float32)
        scores = _scores(logits, config.router_scoring)
        chosen = self._choose(scores)
        weights = mx.take_along_axis(scores, chosen, axis=-1)
        if config.router_scoring == "topk_softmax":
            weights = mx.softmax(weights, axis=-1, precise=True)
        elif config.norm_topk_prob:
            weights = weights / weights.sum(axis=-1, keepdims=True)
        if config.routed_scaling_factor != 1.0:
            weights = weights * config.routed_scaling_factor
        return chosen, weights

    def _choose(self, scores: mx.array) -> mx.array:
        if self._correction is not None:
            scores = scores + self._correction
        if self._config.n_group > 1:
            scores = self._mask_groups(scores)
        k = self._config.num_experts_per_tok
        if self._config.router_from_end:
            return mx.argpartition(scores, kth=-k, axis=-1)[..., -k:]
        return mx.argpartition(-scores, kth=k - 1, axis=-1)[..., :k]

    def _mask_groups(self, scores: mx.array) -> mx.array:
        """Zero the scores of all but the best groups, ranked by their top two."""
        num_groups = self._config.n_group
        grouped = scores.reshape(*scores.shape[:-1], num_groups, -1)
        strength = mx.topk(grouped, 2, axis=-1).sum(axis=-1, keepdims=True)
        dropped = num_groups - self._config.topk_group
        worst = mx.argpartition(strength, kth=dropped - 1, axis=-2)[..., :dropped, :]
        masked = mx.put_along_axis(grouped, worst, mx.array(0.0), axis=-2)
        return masked.reshape(scores.shape)


def _scores(logits: mx.array, scoring: str) -> mx.array:
    match scoring:
        case "softmax":
            return mx.softmax(logits, axis=-1, precise=True)
        case "sigmoid":
            return mx.sigmoid(logits)
        case _:
            return logits


class MixtureOfExperts:
    """Routed experts, and the shared expert where the family has one."""

    def __init__(self, config: ModelConfig, weights: Weights, prefix: str) -> None:
        count, width = config.num_experts, config.moe_intermediate_size
        hidden, bias = config.hidden_size, config.expert_bias
        experts = f"{prefix}.experts"
        self._router = Router(config, weights, f"{prefix}.gate")
        self._gate = weights.experts(f"{experts}.gate_proj", count, width, hidden, bias)
        self._up = weights.experts(f"{experts}.up_proj", count, width, hidden, bias)
        self._down = weights.experts(f"{experts}.down_proj", count, hidden, width, bias)
        self._act = swiglu_oai if config.activation == "swiglu_oai" else swiglu
        self._shared = None
        self._shared_gate = None
        if config.shared_width:
            self._shared = DenseFeedForward(
                config,
                config.shared_width,
                config.mlp_bias,
                weights,
                f"{prefix}.shared_experts",
            )
        if config.shared_expert_gated:
            name = f"{prefix}.shared_expert_gate"
            self._shared_gate = weights.linear(name, 1, hidden, False)

    def __call__(self, x: mx.array) -> mx.array:
        """Map x (1, T, H) to (1, T, H)."""
        chosen, weights = self._router(x)
        y = self._routed(x, chosen)  # (1, T, k, H)
        y = (y * weights[..., None]).sum(axis=-2).astype(x.dtype)
        if self._shared is not None:
            shared = self._shared(x)
            if self._shared_gate is not None:
                shared = mx.sigmoid(self._shared_gate(x)) * shared
            y = y + shared
        return y

    def _routed(self, x: mx.array, chosen: mx.array) -> mx.array:
        if x.shape[1] >= _SORT_FROM_ROWS:
            return self._routed_in_order(x, chosen)
        rows = x[..., None, None, :]  # (1, T, 1, 1, H)
        hidden = self._act(
            self._gate(rows, chosen, False), self._up(rows, chosen, False)
        )
        return self._down(hidden, chosen, False).squeeze(-2)

    def _routed_in_order(self, x: mx.array, chosen: mx.array) -> mx.array:
        """The same, with all rows of one expert next to each other."""
        k = chosen.shape[-1]
        pairs = chosen.flatten()
        order = mx.argsort(pairs)
        rows = x[0][order // k][:, None]  # (T·k, 1, H)
        experts = pairs[order]
        hidden = self._act(
            self._gate(rows, experts, True), self._up(rows, experts, True)
        )
        y = self._down(hidden, experts, True).squeeze(-2)
        return y[mx.argsort(order)].reshape(*chosen.shape, -1)
