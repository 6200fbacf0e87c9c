"""Rotary position embeddings (Su et al. 2021, arXiv 2104.09864) and their scalings."""

import math
from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from mlx_spec.errors import LoadError


class Rope:
    """Rotates the first ``dims`` features of each head by its absolute position."""

    def __init__(
        self,
        dims: int,
        theta: float,
        traditional: bool = False,
        scaling: Mapping[str, Any] | None = None,
        max_position: int | None = None,
    ) -> None:
        self._dims = dims
        self._traditional = traditional
        self._base: float | None = theta
        self._freqs: mx.array | None = None
        self._scale = 1.0  # of positions
        self._magnitude = 1.0  # of the rotated features
        self._configure(scaling or {}, theta, max_position)

    def _configure(
        self, scaling: Mapping[str, Any], theta: float, max_position: int | None
    ) -> None:
        kind = scaling.get("type") or scaling.get("rope_type", "default")
        match kind:
            case "default" | "mrope" | "dynamic":
                # Dynamic NTK equals plain RoPE up to max_position_embeddings.
                return
            case "linear":
                self._scale = 1 / scaling["factor"]
                return
            case "llama3":
                self._freqs = _llama3(self._dims, theta, scaling)
            case "yarn":
                self._freqs, self._magnitude = _yarn(self._dims, theta, scaling)
            case "longrope":
                self._freqs, self._magnitude = _longrope(
                    self._dims, theta, scaling, max_position
                )
            case _:
                raise LoadError(
                    f"RoPE scaling {kind!r} is not supported",
                    "supported: linear, dynamic, llama3, yarn, longrope",
                )
        self._base = None

    def __call__(self, x: mx.array, offset: int) -> mx.array:
        """Rotate x (1, heads, T, head_dim), whose first row is position ``offset``."""
        if self._magnitude != 1.0:
            x = x.at[..., : self._dims].multiply(self._magnitude)
        return mx.fast.rope(
            x,
            self._dims,
            traditional=self._traditional,
            base=self._base,
            scale=self._scale,
            offset=offset,
            freqs=self._freqs,
        )


def _plain(dims: int, theta: float) -> mx.array:
    """Periods theta^(2i/dims) of the rotated pairs, (dims/2,) float32."""
    powers = mx.arange(0, dims, 2, dtype=mx.float32) / dims
    return mx.power(mx.array(theta, mx.float32), powers)


def _llama3(dims: int, theta: float, scaling: Mapping[str, Any]) -> mx.array:
    factor = scaling["factor"]
    low = scaling.get("low_freq_factor", 1.0)
    high = scaling.get("high_freq_factor", 4.0)
    context = scaling.get("original_max_position_embeddings", 8192)
    periods = _plain(dims, theta)
    wavelengths = 2 * math.pi * periods
    smooth = (context / wavelengths - low) / (high - low)
    medium = periods / ((1 - smooth) / factor + smooth)
    is_medium = (wavelengths > context / high) & (wavelengths < context / low)
    stretched = mx.where(wavelengths > context / low, periods * factor, periods)
    return mx.where(is_medium, medium, stretched)


def _yarn(
    dims: int, theta: float, scaling: Mapping[str, Any]
) -> tuple[mx.array, float]:
    """YaRN (Peng et al. 2023, arXiv 2309.00071): periods and feature magnitude."""
    factor = scaling["factor"]
    context = scaling.get("original_max_position_embeddings", 4096)

    def turning_dim(rotations: float) -> float:
        span = math.log(context / (rotations * 2 * math.pi))
        return dims * span / (2 * math.log(theta))

    low = max(math.floor(turning_dim(scaling.get("beta_fast", 32))), 0)
    high = min(math.ceil(turning_dim(scaling.get("beta_slow", 1))), dims - 1)
    width = high - low or 0.001
    ramp = mx.clip((mx.arange(dims // 2, dtype=mx.float32) - low) / width, 0, 1)
    keep = 1.0 - ramp
    plain = _plain(dims, theta)
    stretched = factor * plain
    periods = (stretched * plain) / (stretched * keep + plain * (1 - keep))

    def magnitude(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    ratio = magnitude(scaling.get("mscale", 1)) / magnitude(
        scaling.get("mscale_all_dim", 0)
    )
    return periods, ratio


def _longrope(
    dims: int, theta: float, scaling: Mapping[str, Any], max_position: int | None
) -> tuple[mx.array, float]:
    context = scaling["original_max_position_embeddings"]
    long_factor = mx.array(scaling["long_factor"], mx.float32)
    factor = (max_position or context) / context
    default = 1.0
    if factor > 1:
        default = math.sqrt(1 + math.log(factor) / math.log(context))
    return long_factor * _plain(dims, theta), scaling.get("long_mscale") or default
