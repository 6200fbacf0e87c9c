"""DFlash: a whole block in one pass (arXiv 2602.06036), and its second version.

The block [anchor, mask, …, mask] attends to itself in both directions and to context
rows made of tapped target layers. DFlash 2 adds a two-tap convolution around every
sublayer, and a selector that makes each token depend on the one before it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from mlx_spec.attention import Attention, Mask
from mlx_spec.cache import KVCache
from mlx_spec.config import ModelConfig
from mlx_spec.decoder import rope_of
from mlx_spec.draft import DraftBlock
from mlx_spec.drafters.committed import CommittedRows
from mlx_spec.drafters.eagle3 import check_size, check_taps
from mlx_spec.drafters.sampler import DraftSampler
from mlx_spec.errors import LoadError
from mlx_spec.memory import MemoryPlan
from mlx_spec.moe import DenseFeedForward
from mlx_spec.rope import Rope
from mlx_spec.sampling import SamplingParams
from mlx_spec.target import Features, FeatureTarget
from mlx_spec.tensor_file import Tensors
from mlx_spec.weights import CheckpointWeights, Weights

_MANY = 64  # rows that are not left to wait for the next draft


class DFlashNetwork:
    """The network of a DFlash checkpoint, first or second version.

    Args:
        hf: Its config.json.
        tensors: Its tensors.
        source: Its folder, for messages.
        target: Lends its embedding and its head.
        dtype: Of the arithmetic; None keeps the checkpoint's.
    Raises:
        LoadError: If it is damaged or made for another target.
    """

    def __init__(
        self,
        hf: Mapping[str, Any],
        tensors: Tensors,
        source: str,
        target: FeatureTarget,
        dtype: mx.Dtype | None,
    ) -> None:
        special = {**hf, **(hf.get("dflash_config") or {})}
        # Half-split RoPE over whole heads, whatever the target does.
        layer = {**hf, "model_type": "qwen3", "partial_rotary_factor": None}
        config = ModelConfig.from_hf(layer)
        check_size(hf, "hidden_size", target.hidden_size)
        check_size(hf, "vocab_size", target.vocab_size)
        check_size(hf, "num_target_layers", target.num_layers)
        self.name = "dflash2" if special.get("conv_kernel_size") else "dflash"
        self.block_size: int = _needed(special, "block_size", source)
        self.taps = _taps(special, config.num_hidden_layers, target.num_layers)
        self._mask_token: int = _needed(special, "mask_token_id", source)
        self._target = target
        self._eps = config.rms_norm_eps
        size, inputs = config.hidden_size, len(self.taps) * target.hidden_size
        tensors = {
            name.removeprefix("model.").replace("midlayer.", "layers.0."): value
            for name, value in tensors.items()
        }
        weights = CheckpointWeights(tensors, source, dtype)
        self._fc = weights.linear("fc", size, inputs, False)
        self._context_norm = weights.tensor("hidden_norm.weight", (size,))
        taps, group = (
            special.get("conv_kernel_size") or 0,
            special.get("conv_group_size"),
        )
        rope = rope_of(config)
        self._layers = [
            _Layer(config, index, rope, weights, special, (taps, group or 1))
            for index in range(config.num_hidden_layers)
        ]
        self._norm = weights.tensor("norm.weight", (size,))
        self._selector = None
        if special.get("selector_rank"):
            self._selector = _Selector(special, size, target.vocab_size, weights)
        weights.finish()
        pair = 2 * config.num_key_value_heads * config.head_dim * self._norm.itemsize
        weight_bytes = sum(array.nbytes for array in weights.arrays)
        layers = len(self._layers)
        self.memory_plan = MemoryPlan(
            None, weight_bytes, (pair,) * layers, (None,) * layers
        )
        mx.eval(weights.arrays)

    def new_caches(self) -> list[KVCache]:
        """Return an empty cache of context rows for each layer."""
        return [KVCache() for _ in self._layers]

    def absorb(self, features: Features, caches: Sequence[KVCache]) -> None:
        """Append the context rows of T positions to each layer's cache."""
        rows = self._fc(mx.concatenate(list(features.taps), axis=-1))
        rows = mx.fast.rms_norm(rows, self._context_norm, self._eps)[None]
        for layer, cache in zip(self._layers, caches, strict=True):
            layer.absorb(rows, cache)

    def block(self, anchor: int, caches: Sequence[KVCache]) -> mx.array:
        """Run one block behind the context rows; return (block_size, H).

        Row i is for the i-th token after the anchor; row 0 is not used.
        """
        masks = [self._mask_token] * (self.block_size - 1)
        x = self._target.embed([anchor, *masks])[None]
        for layer, cache in zip(self._layers, caches, strict=True):
            x = layer(x, cache)
        return mx.fast.rms_norm(x[0], self._norm, self._eps)

    def logits(self, rows: mx.array) -> mx.array:
        """Return the logits (T, V) of rows of a block, each for itself."""
        return self._target.logits_of(rows)

    def select(self, row: mx.array, logits: mx.array, previous: mx.array) -> mx.array:
        """Return one row's logits (V,) behind the token drafted before it.

        Args:
            row: (H,) of the block.
            logits: (V,), the row's own.
            previous: (1,) int32.
        """
        if self._selector is None:
            return logits
        return self._selector(row, logits, previous)


class _Layer:
    def __init__(
        self,
        config: ModelConfig,
        index: int,
        rope: Rope,
        weights: Weights,
        special: Mapping[str, Any],
        conv: tuple[int, int],
    ) -> None:
        prefix, size = f"layers.{index}", config.hidden_size
        self._eps = config.rms_norm_eps
        self._window = config.window_of(index)
        # Published rule: an explicit flag wins, else sliding layers are causal.
        causal = special.get("is_causal", special.get("causal"))
        self._is_causal = self._window is not None if causal is None else bool(causal)
        self._attention = Attention(config, rope, weights, f"{prefix}.self_attn")
        width, bias = config.intermediate_size, config.mlp_bias
        self._mlp = DenseFeedForward(config, width, bias, weights, f"{prefix}.mlp")
        self._norm = weights.tensor(f"{prefix}.input_layernorm.weight", (size,))
        name = f"{prefix}.post_attention_layernorm.weight"
        self._mlp_norm = weights.tensor(name, (size,))
        self._attention_conv = self._mlp_conv = None
        if conv[0]:
            name = f"{prefix}.attention_conv"
            self._attention_conv = _BlockConv(name, size, *conv, weights)
            self._mlp_conv = _BlockConv(f"{prefix}.mlp_conv", size, *conv, weights)

    def absorb(self, rows: mx.array, cache: KVCache) -> None:
        cache.append(*self._attention.keys_and_values(rows, cache.seq_len))

    def __call__(self, x: mx.array, cache: KVCache) -> mx.array:
        z = mx.fast.rms_norm(x, self._norm, self._eps)
        if self._attention_conv is None or self._mlp_conv is None:
            x = x + self._attend(z, cache)
            return x + self._mlp(mx.fast.rms_norm(x, self._mlp_norm, self._eps))
        enter, leave = self._attention_conv.filters(z)
        x = x + leave(self._attend(enter(z), cache))
        z = mx.fast.rms_norm(x, self._mlp_norm, self._eps)
        enter, leave = self._mlp_conv.filters(z)
        return x + leave(self._mlp(enter(z)))

    def _attend(self, z: mx.array, cache: KVCache) -> mx.array:
        """Attend to the context rows and the block, whose rows are not kept."""
        start = cache.seq_len
        queries = self._attention.queries(z, start)
        keys, values = cache.append(*self._attention.keys_and_values(z, start))
        cache.truncate(start)
        return self._attention.mix(queries, keys, values, self._mask(z.shape[1], start))

    def _mask(self, size: int, start: int) -> Mask:
        if self._window is None and not self._is_causal:
            return None
        queries = mx.arange(start, start + size)[:, None]
        keys = mx.arange(start + size)[None]
        mask = mx.ones((size, start + size), mx.bool_)
        if self._is_causal:
            mask = mask & (keys <= queries)
        if self._window is not None:
            mask = mask & (queries < keys + self._window)
        return mask


class _Filter:
    """One side of a convolution along the block, with the kernels of its rows."""

    def __init__(self, kernels: mx.array) -> None:
        self._kernels = kernels  # (1, K, taps, H)

    def __call__(self, x: mx.array) -> mx.array:
        result = self._kernels[:, :, 0] * x
        for tap in range(1, self._kernels.shape[2]):
            before = mx.pad(x[:, :-tap], [(0, 0), (tap, 0), (0, 0)])
            result = result + self._kernels[:, :, tap] * before
        return result


class _BlockConv:
    """Grouped dynamic depthwise convolution: learnt kernels plus a row's correction."""

    def __init__(
        self, name: str, size: int, taps: int, group: int, weights: Weights
    ) -> None:
        if size % group:
            raise LoadError(
                f"conv_group_size {group} does not divide the hidden size {size}"
            )
        self._group = group
        self._base = weights.tensor(f"{name}.base_kernel", (2, taps, size))
        rows = 2 * taps * size // group
        self._project = weights.linear(f"{name}.kernel_projection", rows, size, False)

    def filters(self, z: mx.array) -> tuple[_Filter, _Filter]:
        """Return the filters of a sublayer's input and output, for its input z."""
        _, taps, size = self._base.shape
        delta = self._project(z)
        delta = delta.reshape(*z.shape[:2], 2, taps, size // self._group)
        kernels = self._base + mx.repeat(delta, self._group, axis=-1)
        return _Filter(kernels[:, :, 0]), _Filter(kernels[:, :, 1])


class _Selector:
    """Scores the likeliest tokens of a row by the token drafted before them."""

    def __init__(
        self, special: Mapping[str, Any], size: int, vocab: int, weights: Weights
    ) -> None:
        rank = special["selector_rank"]
        self._count: int = min(special.get("selector_top_k") or 16, vocab)
        self._scale = float(special.get("output_multiplier") or 1.0)
        self._cap = special.get("final_logit_softcapping")
        name = "candidate_selector"
        self._before = weights.tensor(f"{name}.predecessor_codebook", (vocab, rank))
        self._after = weights.tensor(f"{name}.successor_codebook", (vocab, rank))
        self._project = weights.linear(f"{name}.hidden_projection", rank, size, False)

    def __call__(self, row: mx.array, logits: mx.array, previous: mx.array) -> mx.array:
        """Return logits (V,): −inf but for the candidates."""
        logits = logits.astype(mx.float32)
        top = mx.argpartition(-logits, kth=self._count - 1)[: self._count]
        unary = logits[top] * self._scale
        if self._cap:
            unary = mx.tanh(unary / self._cap) * self._cap
        gated = self._before[previous][0] * self._project(row[None])[0]
        scores = unary + (self._after[top] @ gated).astype(mx.float32)
        return mx.put_along_axis(mx.full(logits.shape, -mx.inf), top, scores, axis=0)


class DFlashDrafter:
    """Drafts a block in one pass of a DFlash network.

    Args:
        network: The network.
        vocab_size: Number of tokens it can propose.
        max_draft_len: Tokens to propose at most; None for the block's own.
    """

    lookback = 0

    def __init__(
        self, network: DFlashNetwork, vocab_size: int, max_draft_len: int | None = None
    ) -> None:
        self.name, self.taps = network.name, network.taps
        self._network = network
        own = network.block_size - 1
        self._max_draft_len = min(max_draft_len or own, own)
        self._sampler = DraftSampler(vocab_size)
        self._rows = CommittedRows(lookahead=0)
        self._caches = network.new_caches()

    @property
    def memory_plan(self) -> MemoryPlan:
        """What the network and its context rows need."""
        return self._network.memory_plan

    def follow(
        self, sampling: SamplingParams, seed: int, is_coupled: bool, vocab_size: int
    ) -> None:
        """Draw as the target does; see ``SamplingDrafter``."""
        self._sampler.follow(sampling, seed, is_coupled, vocab_size)

    def observe(self, history: Sequence[int], features: Features) -> None:
        """See the target's rows of committed positions."""
        self._rows.follow(history)
        self._rows.add(features)
        self._drop_stale()
        if self._rows.num_waiting >= _MANY:
            self._absorb()
            mx.async_eval([cache.state() for cache in self._caches])

    def propose(
        self, history: Sequence[int], target_hidden: mx.array | None, max_len: int
    ) -> DraftBlock:
        """Draft up to ``max_len`` tokens in one graph."""
        self._rows.follow(history)
        self._drop_stale()
        self._absorb()
        count = min(max_len, self._max_draft_len)
        if count <= 0 or not self._rows.is_in_step:
            return DraftBlock.empty()
        # A block that sees itself both ways is always run as wide as it was trained.
        rows = self._network.block(history[-1], self._caches)[1 : count + 1]
        logits = self._network.logits(rows)
        draft = self._sampler.begin(history)
        previous = mx.array([history[-1]], mx.int32)
        for index in range(count):
            row = self._network.select(rows[index], logits[index], previous)
            previous = draft.draw(row)
        return draft.block()

    def _drop_stale(self) -> None:
        for cache in self._caches:
            cache.truncate(min(len(self._rows), cache.seq_len))

    def _absorb(self) -> None:
        if (taken := self._rows.take()) is not None:
            self._network.absorb(taken[1], self._caches)


def _needed(special: Mapping[str, Any], name: str, source: str) -> int:
    value = special.get(name)
    if not isinstance(value, int):
        raise LoadError(
            f"config.json of {source} has no {name!r}", "the checkpoint is incomplete"
        )
    return value


def _taps(special: Mapping[str, Any], depth: int, num_layers: int) -> tuple[int, ...]:
    taps = list(special.get("target_layer_ids") or ())
    if not taps and depth == 1:
        taps = [num_layers // 2]
    if not taps:
        taps = [round(1 + i * (num_layers - 4) / (depth - 1)) for i in range(depth)]
    check_taps(taps, num_layers)
    return tuple(taps)
