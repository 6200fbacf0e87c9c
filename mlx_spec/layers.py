"""Linear maps, embeddings and stacked expert matrices, plain or quantized.

Each holds arrays only and is a pure function of its input. None of them knows
where its weights came from (weights.py) or what it is used for.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal, Protocol

import mlx.core as mx

QuantMode = Literal["affine", "mxfp4", "mxfp8", "nvfp4"]


@dataclass(frozen=True, slots=True)
class Quantization:
    """How a packed matrix is stored: group_size weights share one scale."""

    group_size: int
    bits: int
    mode: QuantMode = "affine"


class Projection(Protocol):
    """y = x·Wᵀ + b on the last axis."""

    def __call__(self, x: mx.array, /) -> mx.array: ...


class ExpertProjection(Protocol):
    """y = x·W[e]ᵀ + b[e], one expert per row of ``x``."""

    def __call__(
        self, x: mx.array, experts: mx.array, in_order: bool, /
    ) -> mx.array: ...


@dataclass(frozen=True, slots=True)
class Linear:
    """Dense projection; weight (out, in), bias (out,) or None."""

    weight: mx.array
    bias: mx.array | None = None

    def __call__(self, x: mx.array, /) -> mx.array:
        if self.bias is None:
            return x @ self.weight.T
        return mx.addmm(self.bias, x, self.weight.T)


@dataclass(frozen=True, slots=True)
class QuantizedLinear:
    """Projection with a packed weight (out, in·bits/32) uint32."""

    weight: mx.array
    scales: mx.array
    biases: mx.array | None
    quantization: Quantization
    bias: mx.array | None = None

    def __call__(self, x: mx.array, /) -> mx.array:
        q = self.quantization
        y = mx.quantized_matmul(
            x,
            self.weight,
            self.scales,
            self.biases,
            transpose=True,
            group_size=q.group_size,
            bits=q.bits,
            mode=q.mode,
        )
        return y if self.bias is None else y + self.bias


@dataclass(frozen=True, slots=True)
class Embedding:
    """Token embedding (V, H); also the output head of models that tie them."""

    weight: mx.array

    def __call__(self, tokens: mx.array, /) -> mx.array:
        return self.weight[tokens]

    def as_head(self) -> Projection:
        """Return the projection from hidden states to logits."""
        return Linear(self.weight)


@dataclass(frozen=True, slots=True)
class QuantizedEmbedding:
    """Packed token embedding (V, H·bits/32); rows are unpacked when looked up."""

    weight: mx.array
    scales: mx.array
    biases: mx.array | None
    quantization: Quantization

    def __call__(self, tokens: mx.array, /) -> mx.array:
        q = self.quantization
        return mx.dequantize(
            self.weight[tokens],
            self.scales[tokens],
            None if self.biases is None else self.biases[tokens],
            group_size=q.group_size,
            bits=q.bits,
            mode=q.mode,
        )

    def as_head(self) -> Projection:
        """Return the projection from hidden states to logits."""
        return QuantizedLinear(self.weight, self.scales, self.biases, self.quantization)


@dataclass(frozen=True, slots=True)
class ExpertLinear:
    """Stacked expert matrices; weight (E, out, in), bias (E, out) or None."""

    weight: mx.array
    bias: mx.array | None = None

    def __call__(self, x: mx.array, experts: mx.array, in_order: bool, /) -> mx.array:
        # x: (..., 1, in), experts: (...) -> (..., 1, out)
        y = mx.gather_mm(
            x,
            self.weight.swapaxes(-1, -2),
            rhs_indices=experts,
            sorted_indices=in_order,
        )
        return y if self.bias is None else y + self.bias[experts][..., None, :]


@dataclass(frozen=True, slots=True)
class QuantizedExpertLinear:
    """Stacked packed expert matrices; weight (E, out, in·bits/32) uint32."""

    weight: mx.array
    scales: mx.array
    biases: mx.array | None
    quantization: Quantization
    bias: mx.array | None = None

    def __call__(self, x: mx.array, experts: mx.array, in_order: bool, /) -> mx.array:
        q = self.quantization
        y = mx.gather_qmm(
            x,
            self.weight,
            self.scales,
            self.biases,
            rhs_indices=experts,
            transpose=True,
            group_size=q.group_size,
            bits=q.bits,
            mode=q.mode,
            sorted_indices=in_order,
        )
        return y if self.bias is None else y + self.bias[experts][..., None, :]


def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """SiLU-gated product, silu(gate)·up."""
    return _fused(_swiglu)(gate, up)


def swiglu_oai(gate: mx.array, up: mx.array) -> mx.array:
    """gpt-oss form: gate clamped from above, up from both sides, (up + 1)·glu."""
    return _fused(_swiglu_oai)(gate, up)


def _swiglu(gate: mx.array, up: mx.array) -> mx.array:
    return gate * mx.sigmoid(gate) * up


def _swiglu_oai(gate: mx.array, up: mx.array) -> mx.array:
    gate = mx.minimum(gate, 7.0)
    up = mx.clip(up, -7.0, 7.0)
    return (up + 1.0) * (gate * mx.sigmoid(1.702 * gate))


Elementwise = Callable[[mx.array, mx.array], mx.array]


def _fused(function: Elementwise) -> Elementwise:
    """One kernel on a GPU. On a CPU, MLX would call a C++ compiler at run time."""
    return function if mx.default_device().type == mx.cpu else _compiled(function)


@cache
def _compiled(function: Elementwise) -> Elementwise:
    return mx.compile(function, shapeless=True)
