"""The forward passes of published drafters in plain numpy, as their papers give them.

Nothing is shared with the library and nothing is cached: each step runs all rows
again in float64. Tensors have their published names.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_spec import Decoder

Array = npt.NDArray[np.float64]
Tensors = Mapping[str, Array]
Config = Mapping[str, Any]
Choose = Callable[[Array], int]
Filter = Callable[[int, Array], Array]


def as_numpy(tensors: Mapping[str, mx.array]) -> dict[str, Array]:
    """The tensors of a checkpoint in float64."""
    return {name: np.array(tensor, np.float64) for name, tensor in tensors.items()}


@dataclass
class Seen:
    """What a drafter gets from the target for a history of n tokens.

    Attributes:
        history: n tokens; the last is the anchor.
        hidden: (n - 1, H) after the final norm.
        taps: (n - 1, H) for each tap.
        embed: The target's embedding of token ids, (T, H).
        head: The target's logits (T, V) of rows (T, H).
    """

    history: Sequence[int]
    hidden: Array
    taps: list[Array]
    embed: Callable[[Sequence[int]], Array]
    head: Callable[[Array], Array]

    @classmethod
    def of(cls, target: Decoder, history: Sequence[int], taps: Sequence[int]) -> "Seen":
        """Run the target on all tokens before the anchor."""
        rows = target.forward(history[:-1], 0, target.new_cache(), taps=taps)
        return cls(
            history,
            np.array(rows.hidden, np.float64),
            [np.array(tap, np.float64) for tap in rows.taps],
            lambda tokens: np.array(target.embed(list(tokens)), np.float64),
            lambda x: np.array(
                target.logits_of(mx.array(x.astype(np.float32))), np.float64
            ),
        )


def best(row: Array) -> int:
    """Choose the likeliest token of a row of logits."""
    return int(np.argmax(row))


def in_turn(tokens: Sequence[int]) -> Choose:
    """Choose given tokens, whatever the logits are."""
    rest = iter(tokens)
    return lambda row: next(rest)


# Building blocks


def sigmoid(x: Array) -> Array:
    """Logistic function."""
    return 1 / (1 + np.exp(-x))


def softmax(x: Array) -> Array:
    """Softmax of the last axis."""
    powers = np.exp(x - x.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """RMSNorm of the last axis."""
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def swiglu(tensors: Tensors, prefix: str, x: Array) -> Array:
    """SiLU-gated feed-forward part."""
    gate = x @ tensors[f"{prefix}.gate_proj.weight"].T
    up = x @ tensors[f"{prefix}.up_proj.weight"].T
    return (gate * sigmoid(gate) * up) @ tensors[f"{prefix}.down_proj.weight"].T


def rope(
    x: Array,
    positions: Sequence[int],
    width: int,
    theta: float,
    is_interleaved: bool = False,
) -> Array:
    """Rotate pairs of the first ``width`` features of x (T, heads, D).

    A pair is a feature and the one half the width behind it, or its neighbour.
    """
    half = width // 2
    turned = x.copy()
    for row, position in enumerate(positions):
        for i in range(half):
            angle = position * theta ** (-2 * i / width)
            first, second = (2 * i, 2 * i + 1) if is_interleaved else (i, i + half)
            a, b = x[row, :, first], x[row, :, second]
            turned[row, :, first] = a * np.cos(angle) - b * np.sin(angle)
            turned[row, :, second] = b * np.cos(angle) + a * np.sin(angle)
    return turned


def project(
    tensors: Tensors, config: Config, prefix: str, part: str, x: Array
) -> Array:
    """Queries, keys or values (T, heads, D) of x, with the norm there may be."""
    rows = x @ tensors[f"{prefix}.{part}_proj.weight"].T
    rows = rows.reshape(len(x), -1, config["head_dim"])
    norm = tensors.get(f"{prefix}.{part}_norm.weight")
    return rows if norm is None else rms_norm(rows, norm, config["rms_norm_eps"])


def attend(
    queries: Array,
    keys: Array,
    values: Array,
    allowed: npt.NDArray[np.bool_],
    sinks: Array | None = None,
) -> Array:
    """Grouped-query attention; a sink is a logit per head that has no value."""
    rows, heads, width = queries.shape
    group = heads // keys.shape[1]
    output = np.zeros((rows, heads, width))
    for row in range(rows):
        for head in range(heads):
            scores = keys[:, head // group] @ queries[row, head] / np.sqrt(width)
            scores = np.where(allowed[row], scores, -np.inf)
            if sinks is None:
                weights = softmax(scores)
            else:
                weights = softmax(np.append(scores, sinks[head]))[:-1]
            output[row, head] = weights @ values[:, head // group]
    return output.reshape(rows, heads * width)


def self_attention(
    tensors: Tensors, config: Config, prefix: str, x: Array, rotated: int
) -> Array:
    """Causal attention of rows x at positions 0, 1, …"""
    positions = range(len(x))
    theta = config["rope_theta"]
    q = rope(project(tensors, config, prefix, "q", x), positions, rotated, theta)
    k = rope(project(tensors, config, prefix, "k", x), positions, rotated, theta)
    v = project(tensors, config, prefix, "v", x)
    causal = np.tril(np.ones((len(x), len(x)), np.bool_))
    return attend(q, k, v, causal) @ tensors[f"{prefix}.o_proj.weight"].T


def chain(
    seen: Seen,
    features: Array,
    count: int,
    choose: Choose,
    step: Callable[[Array, Sequence[int]], tuple[Array, Array]],
) -> tuple[list[int], list[Array]]:
    """Draft one token after the other, each from the output before it.

    ``step`` gives the logits of the last of some rows, and the row to go on with, from
    the features (T, H) of positions 0, 1, … and the tokens behind them.
    """
    tokens = list(seen.history[1:])
    drafted: list[int] = []
    rows: list[Array] = []
    for _ in range(count):
        logits, output = step(features, tokens)
        rows.append(logits)
        drafted.append(choose(logits))
        features = np.vstack([features, output])
        tokens.append(drafted[-1])
    return drafted, rows


# Multi-token prediction, glm4_moe


def routed_experts(tensors: Tensors, config: Config, prefix: str, x: Array) -> Array:
    """Sigmoid router whose bias counts for the choice only, and a shared expert."""
    output = swiglu(tensors, f"{prefix}.shared_experts", x)
    scores = sigmoid(x @ tensors[f"{prefix}.gate.weight"].T)
    for row in range(len(x)):
        ranked = scores[row] + tensors[f"{prefix}.gate.e_score_correction_bias"]
        chosen = np.argsort(-ranked)[: config["num_experts_per_tok"]]
        weights = scores[row, chosen]
        weights = weights / weights.sum() * config["routed_scaling_factor"]
        for expert, weight in zip(chosen, weights, strict=True):
            out = swiglu(tensors, f"{prefix}.experts.{expert}", x[row : row + 1])
            output[row] += weight * out[0]
    return output


def mtp(
    config: Config, tensors: Tensors, seen: Seen, count: int, choose: Choose
) -> tuple[list[int], list[Array]]:
    """The head of GLM-4.5, reused for each further token."""
    prefix = f"model.layers.{config['num_hidden_layers']}"
    eps = config["rms_norm_eps"]
    rotated = int(config["head_dim"] * config["partial_rotary_factor"])

    def weight(name: str) -> Array:
        return tensors[f"{prefix}.{name}.weight"]

    def step(features: Array, tokens: Sequence[int]) -> tuple[Array, Array]:
        embedding = rms_norm(seen.embed(tokens), weight("enorm"), eps)
        hidden = rms_norm(features, weight("hnorm"), eps)
        x = np.hstack([embedding, hidden]) @ weight("eh_proj").T
        normed = rms_norm(x, weight("input_layernorm"), eps)
        x = x + self_attention(tensors, config, f"{prefix}.self_attn", normed, rotated)
        normed = rms_norm(x, weight("post_attention_layernorm"), eps)
        x = x + routed_experts(tensors, config, f"{prefix}.mlp", normed)
        final = rms_norm(x[-1], weight("shared_head.norm"), eps)
        return weight("shared_head.head") @ final, x[-1]

    return chain(seen, seen.hidden, count, choose, step)


# Ends of a drafter


def embed(tensors: Tensors, seen: Seen, tokens: Sequence[int]) -> Array:
    """Rows of the drafter's own embedding, or else of the target's."""
    table = tensors.get("embed_tokens.weight")
    return seen.embed(tokens) if table is None else table[list(tokens)]


def widened(tensors: Tensors, scores: Array, vocab: int) -> Array:
    """Logits of a draft vocabulary at the target's ids: each has its distance."""
    if "d2t" not in tensors:
        return scores
    logits = np.full(vocab, -np.inf)
    for draft_id, score in enumerate(scores):
        logits[draft_id + int(tensors["d2t"][draft_id])] = score
    return logits


# EAGLE-3


def eagle3(
    config: Config,
    tensors: Tensors,
    seen: Seen,
    count: int,
    choose: Choose,
    layer: str = "midlayer",
) -> tuple[list[int], list[Array]]:
    """One layer on [embedding; feature] that recycles its own output."""
    eps = config["rms_norm_eps"]

    def step(features: Array, tokens: Sequence[int]) -> tuple[Array, Array]:
        embedding = embed(tensors, seen, tokens)
        feature = rms_norm(features, tensors[f"{layer}.hidden_norm.weight"], eps)
        normed = rms_norm(embedding, tensors[f"{layer}.input_layernorm.weight"], eps)
        x = np.hstack([normed, feature])
        attention = self_attention(
            tensors, config, f"{layer}.self_attn", x, config["head_dim"]
        )
        x = (feature if config.get("norm_before_residual") else features) + attention
        name = f"{layer}.post_attention_layernorm.weight"
        x = x + swiglu(tensors, f"{layer}.mlp", rms_norm(x, tensors[name], eps))
        final = rms_norm(x[-1], tensors["norm.weight"], eps)
        scores = tensors["lm_head.weight"] @ final
        logits = widened(tensors, scores, config["vocab_size"])
        return logits, final if config.get("norm_output") else x[-1]

    taps = seen.taps
    if "fc_norm.0.weight" in tensors:
        norms = [tensors[f"fc_norm.{index}.weight"] for index in range(len(taps))]
        taps = [rms_norm(t, norm, eps) for t, norm in zip(taps, norms, strict=True)]
    fused = np.hstack(taps)
    if "input_norm.weight" in tensors:
        fused = rms_norm(fused, tensors["input_norm.weight"], eps)
    features = fused @ tensors["fc.weight"].T
    return chain(seen, features, count, choose, step)


# DFlash


def convolution(tensors: Tensors, prefix: str, group: int, z: Array) -> Filter:
    """The two sides of a grouped dynamic convolution, with kernels made from z."""
    base = tensors[f"{prefix}.base_kernel"]
    sides, taps, width = base.shape
    delta = z @ tensors[f"{prefix}.kernel_projection.weight"].T
    delta = delta.reshape(len(z), sides, taps, width // group)

    def apply(side: int, x: Array) -> Array:
        output = np.zeros_like(x)
        for row in range(len(x)):
            for tap in range(min(taps, row + 1)):
                for channel in range(width):
                    change = delta[row, side, tap, channel // group]
                    kernel = base[side, tap, channel] + change
                    output[row, channel] += kernel * x[row - tap, channel]
        return output

    return apply


def identity(side: int, x: Array) -> Array:
    """What the first version has in place of a convolution."""
    return x


def visible(config: Config, index: int, size: int, start: int) -> npt.NDArray[np.bool_]:
    """Which of the context's and the block's places each row of the block sees."""
    types = config.get("layer_types") or ["full_attention"] * (index + 1)
    is_sliding = types[index] == "sliding_attention"
    is_causal = config.get("is_causal", config["dflash_config"].get("causal"))
    if is_causal is None:
        is_causal = is_sliding
    allowed = np.ones((size, start + size), np.bool_)
    for row in range(size):
        for key in range(start + size):
            if is_causal and key > start + row:
                allowed[row, key] = False
            if is_sliding and key < start + row - (config["sliding_window"] - 1):
                allowed[row, key] = False
    return allowed


def dflash_block(config: Config, tensors: Tensors, seen: Seen) -> Array:
    """Run the block once; return its rows (block_size, H) after the final norm."""
    eps = config["rms_norm_eps"]
    special = config["dflash_config"]
    context = np.hstack(seen.taps) @ tensors["fc.weight"].T
    context = rms_norm(context, tensors["hidden_norm.weight"], eps)
    size, start = config["block_size"], len(seen.history) - 1
    tokens = [seen.history[-1]] + [special["mask_token_id"]] * (size - 1)
    x = embed(tensors, seen, tokens)
    if "mask_embedding" in tensors:
        x[1:] = tensors["mask_embedding"]
    before, inside = range(start), range(start, start + size)

    def turned(rows: Array, positions: Sequence[int]) -> Array:
        is_interleaved = not config.get("rope_is_neox_style", True)
        width, theta = config["head_dim"], config["rope_theta"]
        return rope(rows, positions, width, theta, is_interleaved)

    for index in range(config["num_hidden_layers"]):
        layer = f"layers.{index}"
        attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        attention_conv: Filter = identity
        mlp_conv: Filter = identity

        z = rms_norm(x, tensors[f"{layer}.input_layernorm.weight"], eps)
        if "conv_kernel_size" in special:
            group = special["conv_group_size"]
            attention_conv = convolution(tensors, f"{layer}.attention_conv", group, z)
        z = attention_conv(0, z)
        q = turned(project(tensors, config, attention, "q", z), inside)
        k = np.concatenate(
            [
                turned(project(tensors, config, attention, "k", rows), at)
                for rows, at in ((context, before), (z, inside))
            ]
        )
        v = np.concatenate(
            [project(tensors, config, attention, "v", rows) for rows in (context, z)]
        )
        sinks = tensors.get(f"{attention}.attention_sink_bias")
        y = attend(q, k, v, visible(config, index, size, start), sinks)
        x = x + attention_conv(1, y @ tensors[f"{attention}.o_proj.weight"].T)

        z = rms_norm(x, tensors[f"{layer}.post_attention_layernorm.weight"], eps)
        if "conv_kernel_size" in special:
            mlp_conv = convolution(tensors, f"{layer}.mlp_conv", group, z)
        x = x + mlp_conv(1, swiglu(tensors, mlp, mlp_conv(0, z)))
    return rms_norm(x, tensors["norm.weight"], eps)


def dflash(
    config: Config, tensors: Tensors, seen: Seen, count: int, choose: Choose
) -> tuple[list[int], list[Array]]:
    """The first version: each mask slot predicts the token at its own place."""
    rows = list(seen.head(dflash_block(config, tensors, seen)[1 : count + 1]))
    return [choose(row) for row in rows], rows


def dflash2(
    config: Config, tensors: Tensors, seen: Seen, count: int, choose: Choose
) -> tuple[list[int], list[Array]]:
    """The second version: a walk through the candidates of the slots."""
    special = config["dflash_config"]
    block = dflash_block(config, tensors, seen)[1 : count + 1]
    prefix = "candidate_selector"
    before = tensors[f"{prefix}.predecessor_codebook"]
    after = tensors[f"{prefix}.successor_codebook"]
    projection = tensors[f"{prefix}.hidden_projection.weight"]
    token = seen.history[-1]
    drafted: list[int] = []
    rows: list[Array] = []
    for hidden, unary in zip(block, seen.head(block), strict=True):
        scores = np.full(len(unary), -np.inf)
        for candidate in np.argsort(-unary)[: special["selector_top_k"]]:
            pair = before[token] * (projection @ hidden)
            scores[candidate] = unary[candidate] + pair @ after[candidate]
        token = choose(scores)
        rows.append(scores)
        drafted.append(token)
    return drafted, rows


# DSpark


def dspark(
    config: Config, tensors: Tensors, seen: Seen, count: int, choose: Choose
) -> tuple[list[int], list[Array]]:
    """Rows of the block, each corrected by the token drawn from the one before it."""
    first = 0 if config.get("sample_from_anchor", True) else 1
    block = dflash_block({**config, "dflash_config": config}, tensors, seen)
    block = block[first : first + count]
    head, name = tensors.get("lm_head.weight"), "markov_head"
    base = seen.head(block) if head is None else block @ head.T
    if cap := config.get("final_logit_softcapping"):
        base = np.tanh(base / cap) * cap
    token = seen.history[-1]
    state = np.zeros(config["markov_rank"])
    drafted: list[int] = []
    rows: list[Array] = []
    for hidden, own in zip(block, base, strict=True):
        before = tensors[f"{name}.markov_w1.weight"][token]
        mixed = before
        if config["markov_head_type"] == "gated":
            gate = tensors[f"{name}.gate_proj.weight"] @ np.append(hidden, before)
            mixed = sigmoid(gate + tensors[f"{name}.gate_proj.bias"]) * before
        if config["markov_head_type"] == "rnn":
            joint = tensors[f"{name}.joint_proj.weight"] @ np.concatenate(
                [state, before, hidden]
            )
            joint = joint + tensors[f"{name}.joint_proj.bias"]
            keep, new, out = np.split(joint, 3)
            state = sigmoid(keep) * state + (1 - sigmoid(keep)) * np.tanh(new)
            mixed = np.tanh(out)
        scores = own + tensors[f"{name}.markov_w2.weight"] @ mixed
        scores = widened(tensors, scores, config["vocab_size"])
        token = choose(scores)
        rows.append(scores)
        drafted.append(token)
    return drafted, rows


REFERENCES = {
    "mtp": mtp,
    "eagle3": eagle3,
    "dflash": dflash,
    "dflash2": dflash2,
    "dspark": dspark,
}
