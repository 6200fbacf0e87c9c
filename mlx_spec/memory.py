"""Unified memory: what a model and its cache need, and what the device allows."""

from dataclasses import dataclass

import mlx.core as mx

from mlx_spec.errors import CapacityError

_FIRST_CAPACITY = 256


def capacity_for(rows: int) -> int:
    """Rows a cache buffer gets when ``rows`` are needed: 256·1.5ⁿ, in steps of 256."""
    capacity = _FIRST_CAPACITY
    while capacity < rows:
        capacity = -(-(capacity * 3 // 2) // _FIRST_CAPACITY) * _FIRST_CAPACITY
    return capacity


def working_set_limit() -> int | None:
    """Bytes the device recommends to keep in use, None where it does not say."""
    limit = mx.device_info().get("max_recommended_working_set_size")
    return None if limit is None else int(limit)


def wire_memory() -> None:
    """Let MLX keep the recommended working set resident, as mlx-lm does."""
    limit = working_set_limit()
    if limit is not None:
        mx.set_wired_limit(limit)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Memory needed at each context length, against a limit.

    Attributes:
        limit_bytes: Bytes that may be in use, None for no check.
        weight_bytes: Bytes of all weights, drafter included.
        row_bytes: Bytes of one token's keys and values in each layer.
        windows: Attention window of each layer in tokens, None for full attention.
    """

    limit_bytes: int | None
    weight_bytes: int
    row_bytes: tuple[int, ...]
    windows: tuple[int | None, ...]

    def including(self, other: "MemoryPlan") -> "MemoryPlan":
        """Return the plan of two models that run together, under this one's limit."""
        return MemoryPlan(
            self.limit_bytes,
            self.weight_bytes + other.weight_bytes,
            self.row_bytes + other.row_bytes,
            self.windows + other.windows,
        )

    def cache_bytes(self, num_tokens: int) -> int:
        """Bytes of the cache buffers that hold ``num_tokens``."""
        rows = capacity_for(num_tokens)
        return sum(
            size * (rows if window is None else min(rows, 2 * (window + 15)))
            for size, window in zip(self.row_bytes, self.windows, strict=True)
        )

    def check(self, num_tokens: int) -> None:
        """Check that weights and a cache of ``num_tokens`` fit.

        Raises:
            CapacityError: With model, cache and limit, and what would fit.
        """
        if self.limit_bytes is None:
            return
        cache = self.cache_bytes(num_tokens)
        if self.weight_bytes + cache <= self.limit_bytes:
            return
        raise CapacityError(
            f"does not fit: model {_gb(self.weight_bytes)} + cache of {num_tokens:,} "
            f"tokens {_gb(cache)} is more than the {_gb(self.limit_bytes)} this device "
            "recommends to use",
            self._advice(),
        )

    def _advice(self) -> str:
        fits = self.max_tokens()
        if fits:
            return f"up to {fits:,} tokens fit: shorten the prompt or --max-tokens"
        return "choose a smaller model or one with fewer bits per weight"

    def max_tokens(self) -> int:
        """The longest context that fits, 0 if the model itself does not."""
        if self.limit_bytes is None:
            raise ValueError("no limit is known")
        fits, rows = 0, capacity_for(1)
        while (
            self.weight_bytes + self.cache_bytes(rows) <= self.limit_bytes
            and rows < 1 << 24
        ):
            fits, rows = rows, capacity_for(rows + 1)
        return fits


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e8 else f"{num_bytes:,} bytes"
