"""The decoder: embedding, layers, final norm, head. Token ids in, logits out."""

import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import overload

import mlx.core as mx

from mlx_spec.attention import Attention, Mask, attention_mask
from mlx_spec.cache import KVCache, ModelCache, QuantizedKVCache, SlidingKVCache
from mlx_spec.config import ModelConfig
from mlx_spec.errors import CapacityError, SpecError
from mlx_spec.memory import MemoryPlan
from mlx_spec.moe import DenseFeedForward, MixtureOfExperts
from mlx_spec.rope import Rope
from mlx_spec.target import Features, Forward, Observer, Tokens
from mlx_spec.weights import RandomWeights, Weights


class DecoderLayer:
    """Attention and feed-forward part, each behind a norm and beside a residual."""

    def __init__(
        self, config: ModelConfig, index: int, rope: Rope, weights: Weights
    ) -> None:
        prefix = f"model.layers.{index}"
        hidden = (config.hidden_size,)
        self.window = config.window_of(index)
        self._eps = config.rms_norm_eps
        self._residual = config.residual_multiplier
        self._attention = Attention(config, rope, weights, f"{prefix}.self_attn")
        self._mix: DenseFeedForward | MixtureOfExperts
        if config.is_moe_layer(index):
            self._mix = MixtureOfExperts(config, weights, f"{prefix}.mlp")
        else:
            width, bias = config.intermediate_size, config.mlp_bias
            self._mix = DenseFeedForward(config, width, bias, weights, f"{prefix}.mlp")
        self._norm = weights.tensor(f"{prefix}.input_layernorm.weight", hidden)
        name = f"{prefix}.post_attention_layernorm.weight"
        self._mix_norm = weights.tensor(name, hidden)

    def __call__(self, x: mx.array, cache: KVCache, mask: Mask) -> mx.array:
        """Apply to x (1, T, H)."""
        normed = mx.fast.rms_norm(x, self._norm, self._eps)
        x = self._add(x, self._attention(normed, cache, mask))
        return self._add(x, self._mix(mx.fast.rms_norm(x, self._mix_norm, self._eps)))

    def _add(self, x: mx.array, branch: mx.array) -> mx.array:
        if self._residual != 1.0:
            branch = branch * self._residual
        return x + branch


class Decoder:
    """A decoder-only transformer, dense or mixture of experts, built from a config.

    Args:
        config: Shape and arithmetic of the model.
        weights: Where the tensors come from; random ones from seed 0 if not given.
        kv_bits: 8 or 4 to keep full-attention caches quantized.
        memory_limit: Bytes that weights and caches may use together, None for no check.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights | None = None,
        *,
        kv_bits: int | None = None,
        memory_limit: int | None = None,
    ) -> None:
        weights = weights or RandomWeights(0)
        self.config = config
        self._kv_bits = kv_bits
        self._memory_limit = memory_limit
        self._packing = _kv_group_size(config, kv_bits)
        rope = rope_of(config)
        vocab, hidden = config.vocab_size, config.hidden_size
        self._embed = weights.embedding("model.embed_tokens", vocab, hidden)
        self._layers = [
            DecoderLayer(config, index, rope, weights)
            for index in range(config.num_hidden_layers)
        ]
        self._norm = weights.tensor("model.norm.weight", (hidden,))
        if config.tie_word_embeddings:
            self._head = self._embed.as_head()
        else:
            self._head = weights.linear("lm_head", vocab, hidden, False)
        self._arrays = weights.arrays

    @classmethod
    def random(cls, config: ModelConfig, seed: int = 0) -> "Decoder":
        """Return a decoder with reproducible random float32 weights."""
        return cls(config, RandomWeights(seed))

    @property
    def vocab_size(self) -> int:
        """Number of logits of a row."""
        return self.config.vocab_size

    @property
    def max_context(self) -> int | None:
        """Longest sequence in tokens, None if there is no limit."""
        return self.config.max_position_embeddings

    @property
    def hidden_size(self) -> int:
        """Width H of the residual stream."""
        return self.config.hidden_size

    @property
    def num_layers(self) -> int:
        """Number of layers that can be tapped."""
        return self.config.num_hidden_layers

    @property
    def dtype(self) -> mx.Dtype:
        """Type of the activations and of the cache."""
        return self._norm.dtype

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(array.nbytes for array in self._arrays)

    def load_weights(self) -> None:
        """Bring all weights into memory now, one tensor at a time."""
        for array in self._arrays:
            mx.eval(array)

    @cached_property
    def fingerprint(self) -> str:
        """Short hash of the config and of a sample of every tensor."""
        samples = [a.flatten()[:16].astype(mx.float32) for a in self._arrays]
        mx.eval(samples)
        settings = (self.config, str(self.dtype), self._kv_bits, self._packing)
        digest = hashlib.sha256(repr(settings).encode())
        for sample in samples:
            digest.update(repr(sample.tolist()).encode())
        return digest.hexdigest()[:16]

    def new_cache(self) -> ModelCache:
        """Return an empty cache for one sequence."""
        layers = [self._layer_cache(layer.window) for layer in self._layers]
        return ModelCache(layers, self.fingerprint, self.memory_plan)

    def _layer_cache(self, window: int | None) -> KVCache:
        if window is not None:
            return SlidingKVCache(window)
        if self._kv_bits is not None and self._packing is not None:
            return QuantizedKVCache(self._kv_bits, self._packing)
        return KVCache()

    @cached_property
    def memory_plan(self) -> MemoryPlan:
        """What this model needs at each context length."""
        config = self.config
        pair = 2 * config.num_key_value_heads * config.head_dim
        plain = pair * self._norm.itemsize
        packed = plain
        if self._kv_bits is not None and self._packing is not None:
            scales = 2 * pair // self._packing * self._norm.itemsize
            packed = pair * self._kv_bits // 8 + scales
        windows = tuple(layer.window for layer in self._layers)
        return MemoryPlan(
            self._memory_limit,
            self.weight_bytes,
            tuple(packed if window is None else plain for window in windows),
            windows,
        )

    def forward_token(self, token: int, pos: int, cache: ModelCache) -> mx.array:
        """Run one token at position ``pos``; return its logits (V,)."""
        return self.forward([token], pos, cache).logits[0]

    def forward_batch(
        self, tokens: Tokens, start_pos: int, cache: ModelCache
    ) -> mx.array:
        """Run T tokens from position ``start_pos`` on; return logits (T, V)."""
        return self.forward(tokens, start_pos, cache).logits

    @overload
    def forward_batch_with_hidden(
        self, tokens: Tokens, start_pos: int, cache: ModelCache
    ) -> tuple[mx.array, mx.array]: ...

    @overload
    def forward_batch_with_hidden(
        self,
        tokens: Tokens,
        start_pos: int,
        cache: ModelCache,
        *,
        taps: Sequence[int],
    ) -> Forward: ...

    def forward_batch_with_hidden(
        self,
        tokens: Tokens,
        start_pos: int,
        cache: ModelCache,
        *,
        taps: Sequence[int] | None = None,
    ) -> tuple[mx.array, mx.array] | Forward:
        """Run T tokens; return logits (T, V) and final hidden states (T, H).

        With ``taps``, layer numbers from 0, the outputs (T, H) of those layers
        are returned as a third item.
        """
        result = self.forward(tokens, start_pos, cache, taps=taps or ())
        return result if taps is not None else (result.logits, result.hidden)

    def prefill(
        self,
        tokens: Tokens,
        start_pos: int,
        cache: ModelCache,
        step: int = 2048,
        *,
        taps: Sequence[int] = (),
        observer: Observer | None = None,
    ) -> tuple[mx.array, mx.array]:
        """Run a prompt in chunks; compute the logits of its last position only.

        Args:
            tokens: T ids, at least one.
            start_pos: Position of the first; equals the cache's length.
            cache: Gets the rows of all T tokens.
            step: Tokens a chunk; bounds the memory of activations.
            taps: Layers whose output the observer wants, 0-based.
            observer: Is shown the rows of each chunk.
        Returns:
            Logits (V,) and hidden state (H,) of the last position.
        """
        ids = self._as_ids(tokens)
        last = (ids.size - 1) // step * step
        for begin in range(0, last, step):
            hidden, tapped = self._run(
                ids[begin : begin + step], start_pos + begin, cache, taps
            )
            if observer is not None:
                observer(Features(start_pos + begin, hidden, tapped))
            mx.eval([layer.state() for layer in cache.layers])
            mx.clear_cache()
        chunk = ids[last:]
        result = self.forward(chunk, start_pos + last, cache, taps=taps, last_only=True)
        if observer is not None:
            observer(Features(start_pos + last, result.hidden, result.taps))
        return result.logits[0], result.hidden[-1]

    def forward(
        self,
        tokens: Tokens,
        start_pos: int,
        cache: ModelCache,
        *,
        taps: Sequence[int] = (),
        last_only: bool = False,
    ) -> Forward:
        """Run T tokens from position ``start_pos`` on and append them to the cache.

        Args:
            tokens: T ids: a sequence, which is checked, or an integer array (T,), which
                is not, since that would have to wait for the device.
            start_pos: Position of the first; equals the cache's length.
            cache: This model's cache.
            taps: Layers whose output is wanted, 0-based.
            last_only: Compute the logits of the last position only.
        Raises:
            SpecError: If start_pos is not the cache's length, or no token is given.
            CapacityError: If the context or the memory does not suffice.
        """
        ids = self._as_ids(tokens)
        unknown = [tap for tap in taps if not 0 <= tap < len(self._layers)]
        if unknown:
            raise SpecError(
                f"there are no layers {unknown} to tap",
                f"layers are numbered 0 to {len(self._layers) - 1}",
            )
        hidden, tapped = self._run(ids, start_pos, cache, taps)
        logits = self.logits_of(hidden[-1:] if last_only else hidden)
        return Forward(logits, hidden, tapped)

    def embed(self, tokens: Tokens) -> mx.array:
        """Return the input (T, H) of the first layer for T tokens."""
        x = self._embed(self._as_ids(tokens))
        if self.config.embedding_multiplier != 1.0:
            x = x * self.config.embedding_multiplier
        return x

    def logits_of(self, hidden: mx.array) -> mx.array:
        """Return the logits (T, V) of final hidden states (T, H)."""
        logits = self._head(hidden)
        if self.config.logits_scaling != 1.0:
            logits = logits / self.config.logits_scaling
        return logits

    def _as_ids(self, tokens: Tokens) -> mx.array:
        if isinstance(tokens, mx.array):
            return tokens
        for token in (min(tokens, default=0), max(tokens, default=0)):
            if not 0 <= token < self.vocab_size:
                raise SpecError(
                    f"there is no token {token}",
                    f"the model has tokens 0 to {self.vocab_size - 1}",
                )
        return mx.array(list(tokens), mx.int32)

    def _run(
        self, ids: mx.array, start_pos: int, cache: ModelCache, taps: Sequence[int]
    ) -> tuple[mx.array, tuple[mx.array, ...]]:
        """Return final hidden states (T, H) and the taps."""
        self._check(ids, start_pos, cache)
        x = self.embed(ids)[None]
        masks = {
            window: attention_mask(ids.size, start_pos, window)
            for window in {layer.window for layer in self._layers}
        }
        outputs: dict[int, mx.array] = {}
        for index, layer in enumerate(self._layers):
            x = layer(x, cache.layers[index], masks[layer.window])
            if index in taps:
                outputs[index] = x[0]
        hidden = mx.fast.rms_norm(x[0], self._norm, self.config.rms_norm_eps)
        return hidden, tuple(outputs[index] for index in taps)

    def _check(self, ids: mx.array, start_pos: int, cache: ModelCache) -> None:
        if ids.size == 0:
            raise SpecError("no tokens to run", "give at least one token")
        if start_pos != cache.seq_len:
            raise SpecError(
                f"start_pos is {start_pos}, but the cache holds {cache.seq_len} tokens",
                "pass the cache's seq_len, or a new cache",
            )
        limit, end = self.max_context, start_pos + ids.size
        if limit is not None and end > limit:
            raise CapacityError(
                f"{end:,} tokens are longer than the model's context of {limit:,}",
                "shorten the prompt or start a new conversation",
            )
        cache.reserve(end)


def rope_of(config: ModelConfig) -> Rope:
    """Return the position embedding that a config asks for."""
    return Rope(
        int(config.head_dim * config.partial_rotary_factor),
        config.rope_theta,
        config.rope_traditional,
        config.rope_scaling,
        config.max_position_embeddings,
    )


def _kv_group_size(config: ModelConfig, kv_bits: int | None) -> int | None:
    """Group size of a quantized cache: the largest that divides head_dim."""
    if kv_bits is None:
        return None
    if kv_bits not in (4, 8):
        raise SpecError(f"kv_bits is {kv_bits}", "use 4 or 8, or leave it out")
    for group_size in (64, 32):
        if config.head_dim % group_size == 0:
            return group_size
    raise SpecError(
        f"a cache with head_dim {config.head_dim} cannot be quantized",
        "leave kv_bits out: head_dim must be a multiple of 32",
    )
