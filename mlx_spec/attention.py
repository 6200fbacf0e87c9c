"""Grouped-query attention with RoPE, QK-norm, sinks and sliding windows."""

from typing import Literal

import mlx.core as mx

from mlx_spec.cache import KVCache, PackedRows, Rows
from mlx_spec.config import ModelConfig
from mlx_spec.rope import Rope
from mlx_spec.weights import Weights

Mask = mx.array | Literal["causal"] | None


def attention_mask(num_rows: int, offset: int, window: int | None) -> Mask:
    """Return the mask for new rows at positions offset … offset + num_rows − 1.

    An array (num_rows, keys) covers just the keys that a sliding cache returns.
    """
    if num_rows == 1:
        return None
    if window is None or offset + num_rows <= window:
        return "causal"
    queries = mx.arange(offset, offset + num_rows)[:, None]
    keys = mx.arange(max(offset - window + 1, 0), offset + num_rows)[None]
    return (keys <= queries) & (queries < keys + window)


class Attention:
    """One layer's self-attention; its input may be wider than its output."""

    def __init__(
        self,
        config: ModelConfig,
        rope: Rope,
        weights: Weights,
        prefix: str,
        input_size: int | None = None,
    ) -> None:
        self._heads = config.num_attention_heads
        self._kv_heads = config.num_key_value_heads
        self._head_dim = config.head_dim
        self._scale = config.attention_scale or config.head_dim**-0.5
        self._eps = config.rms_norm_eps
        self._norm_heads = config.qk_norm == "head"
        self._rope = rope
        hidden, bias = config.hidden_size, config.qkv_bias
        inputs = input_size or hidden
        width, kv_width = self._heads * self._head_dim, self._kv_heads * self._head_dim
        self._q = weights.linear(f"{prefix}.q_proj", width, inputs, bias)
        self._k = weights.linear(f"{prefix}.k_proj", kv_width, inputs, bias)
        self._v = weights.linear(f"{prefix}.v_proj", kv_width, inputs, bias)
        self._o = weights.linear(f"{prefix}.o_proj", hidden, width, config.o_bias)
        self._q_norm: mx.array | None = None
        self._k_norm: mx.array | None = None
        if config.qk_norm != "none":
            sizes = (self._head_dim,) * 2 if self._norm_heads else (width, kv_width)
            self._q_norm = weights.tensor(f"{prefix}.q_norm.weight", (sizes[0],))
            self._k_norm = weights.tensor(f"{prefix}.k_norm.weight", (sizes[1],))
        self._sinks: mx.array | None = None
        if config.attention_sinks:
            self._sinks = weights.tensor(f"{prefix}.sinks", (self._heads,))

    def __call__(self, x: mx.array, cache: KVCache, mask: Mask) -> mx.array:
        """Attend from x (1, T, H) to the cache and to x itself."""
        offset = cache.seq_len
        queries = self.queries(x, offset)
        keys, values = cache.append(*self.keys_and_values(x, offset))
        return self.mix(queries, keys, values, mask)

    def queries(self, x: mx.array, offset: int) -> mx.array:
        """Queries (1, heads, T, head_dim) of x (1, T, H), from a position on."""
        return self._rope(self._split(self._q(x), self._heads, self._q_norm), offset)

    def keys_and_values(self, x: mx.array, offset: int) -> tuple[mx.array, mx.array]:
        """Keys and values (1, kv_heads, T, head_dim) of x (1, T, H)."""
        keys = self._rope(self._split(self._k(x), self._kv_heads, self._k_norm), offset)
        return keys, self._split(self._v(x), self._kv_heads, None)

    def mix(self, queries: mx.array, keys: Rows, values: Rows, mask: Mask) -> mx.array:
        """Attend and project to (1, T, H)."""
        y = attend(queries, keys, values, self._scale, mask, self._sinks)
        return self._o(y.swapaxes(1, 2).flatten(-2))

    def _split(self, x: mx.array, heads: int, norm: mx.array | None) -> mx.array:
        """(1, T, heads·D) -> (1, heads, T, D), normalised as the family does."""
        if norm is not None and not self._norm_heads:
            x = mx.fast.rms_norm(x, norm, self._eps)
        x = x.reshape(*x.shape[:-1], heads, self._head_dim)
        if norm is not None and self._norm_heads:
            x = mx.fast.rms_norm(x, norm, self._eps)
        return x.swapaxes(1, 2)


def attend(
    queries: mx.array,
    keys: Rows,
    values: Rows,
    scale: float,
    mask: Mask,
    sinks: mx.array | None,
) -> mx.array:
    """Softmax attention (1, heads, T, D) over plain or packed rows."""
    if isinstance(keys, mx.array) and isinstance(values, mx.array):
        return mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=scale, mask=mask, sinks=sinks
        )
    if isinstance(keys, PackedRows) and isinstance(values, PackedRows):
        return _attend_packed(queries, keys, values, scale, mask, sinks)
    raise TypeError("keys and values must be stored alike")


def _attend_packed(
    queries: mx.array,
    keys: PackedRows,
    values: PackedRows,
    scale: float,
    mask: Mask,
    sinks: mx.array | None,
) -> mx.array:
    """Attention that reads quantized rows as they are stored."""
    _, heads, rows, dim = queries.shape
    kv_heads, length = keys.weight.shape[1], keys.weight.shape[2]
    grouped = (queries * scale).reshape(1, kv_heads, heads // kv_heads, rows, dim)
    scores = _packed_matmul(grouped, keys, transpose=True)
    if isinstance(mask, str):
        positions = mx.arange(length - rows, length)[:, None]
        mask = mx.arange(length)[None] <= positions
    if mask is not None:
        scores = mx.where(mask, scores, -mx.inf)
    if sinks is not None:
        column = sinks.reshape(1, kv_heads, heads // kv_heads, 1, 1)
        column = mx.broadcast_to(column, (*scores.shape[:-1], 1))
        scores = mx.concatenate([scores, column.astype(scores.dtype)], axis=-1)
    shares = mx.softmax(scores, axis=-1, precise=True)[..., :length]
    return _packed_matmul(shares, values, transpose=False).reshape(queries.shape)


def _packed_matmul(x: mx.array, rows: PackedRows, transpose: bool) -> mx.array:
    weight, scales, biases = (
        part[:, :, None] for part in (rows.weight, rows.scales, rows.biases)
    )
    return mx.quantized_matmul(
        x,
        weight,
        scales,
        biases,
        transpose=transpose,
        group_size=rows.quantization.group_size,
        bits=rows.quantization.bits,
    )
