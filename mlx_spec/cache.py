"""Key-value caches that can be set back to any recent length at no cost.

A cache knows positions, not tokens. Lengths are absolute: the number of tokens
of the whole sequence whose keys and values it represents. Rows are stored along
axis -2; rows past the length are stale and never read.
"""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx

from mlx_spec.errors import LoadError, SpecError
from mlx_spec.layers import Quantization
from mlx_spec.memory import MemoryPlan, capacity_for
from mlx_spec.tensor_file import read_tensors, write_tensors

MAX_ROLLBACK = 16
"""Rows that every kind of cache can roll back, however long the sequence is."""


class PackedRows(NamedTuple):
    """Quantized rows: weight (…, n, D·bits/32), scales and biases (…, n, D/group)."""

    weight: mx.array
    scales: mx.array
    biases: mx.array
    quantization: Quantization


Rows = mx.array | PackedRows


class KVCache:
    """Keys and values of one full-attention layer.

    Buffers grow geometrically, so appending n tokens one by one copies O(n) rows
    in all.
    """

    kind = "full"

    def __init__(self) -> None:
        self._buffers: list[mx.array] = []
        self._first = 0  # absolute position of buffer row 0
        self._seq_len = 0
        self._written = 0  # rows up to this position hold what was appended last

    @property
    def seq_len(self) -> int:
        """Number of tokens represented, counted from the start of the sequence."""
        return self._seq_len

    @property
    def nbytes(self) -> int:
        """Bytes of device memory held."""
        return sum(buffer.nbytes for buffer in self._buffers)

    @property
    def earliest(self) -> int:
        """The shortest length this cache can be set back to, other than 0."""
        return 0

    def append(self, keys: mx.array, values: mx.array) -> tuple[Rows, Rows]:
        """Add the rows of T new tokens, return the rows their attention reads.

        Args:
            keys: (1, kv_heads, T, head_dim), already rotated.
            values: (1, kv_heads, T, head_dim).
        Returns:
            Keys and values from the oldest readable row to the newest.
        """
        first, second = self._extend([keys, values])
        return first, second

    def truncate(self, seq_len: int) -> None:
        """Set the length back to ``seq_len`` tokens, in constant time.

        Raises:
            SpecError: If the cache is shorter, or no longer holds what is needed.
        """
        if not 0 <= seq_len <= self._seq_len:
            raise SpecError(
                f"cannot set a cache of {self._seq_len} tokens back to {seq_len}"
            )
        if seq_len == 0:
            self._first = 0
        elif seq_len < self.earliest:
            raise SpecError(
                f"a sliding-window cache of {self._seq_len} tokens can be set back "
                f"to {self.earliest} at the least, not to {seq_len}",
                "start again from an empty cache",
            )
        self._seq_len = seq_len

    def reveal(self, seq_len: int) -> None:
        """Undo a ``truncate``: count rows again that were written and not replaced."""
        if not self._seq_len <= seq_len <= self._written:
            raise SpecError(
                f"rows {self._seq_len} to {seq_len} are not in the cache any more"
            )
        self._seq_len = seq_len

    def fork(self) -> "KVCache":
        """Return an independent cache that shares the buffers until one writes."""
        other = copy.copy(self)
        # A new array object over the same memory: MLX copies when either is written.
        other._buffers = [mx.stop_gradient(buffer) for buffer in self._buffers]
        return other

    def _extend(self, parts: Sequence[mx.array]) -> list[mx.array]:
        stop = self._seq_len + parts[0].shape[-2]
        views = self._store(parts, stop)
        self._seq_len = self._written = stop
        return views

    def _store(self, parts: Sequence[mx.array], stop: int) -> list[mx.array]:
        if not self._buffers or stop > self._buffers[0].shape[-2]:
            self._reallocate(parts, capacity_for(stop), keep_from=0)
        self._write(parts)
        return [buffer[..., :stop, :] for buffer in self._buffers]

    def _write(self, parts: Sequence[mx.array]) -> None:
        at = self._seq_len - self._first
        for buffer, part in zip(self._buffers, parts, strict=True):
            buffer[..., at : at + part.shape[-2], :] = part

    def _reallocate(
        self, parts: Sequence[mx.array], capacity: int, keep_from: int
    ) -> None:
        """Move the rows from ``keep_from`` on into new buffers of ``capacity`` rows."""
        old, self._buffers = self._buffers, []
        for index, part in enumerate(parts):
            shape = (*part.shape[:-2], capacity, part.shape[-1])
            buffer = mx.zeros(shape, part.dtype)
            if self._seq_len > keep_from:
                low, high = keep_from - self._first, self._seq_len - self._first
                buffer[..., : high - low, :] = old[index][..., low:high, :]
            self._buffers.append(buffer)
        self._first = keep_from

    def state(self) -> list[mx.array]:
        """Return the rows in use, one array per buffer."""
        used = self._seq_len - self._first
        return [buffer[..., :used, :] for buffer in self._buffers]

    def restore(self, rows: Sequence[mx.array], first: int, seq_len: int) -> None:
        """Take over rows that ``state`` returned, the first at position ``first``."""
        self._buffers = list(rows)
        self._first, self._seq_len, self._written = first, seq_len, seq_len

    @property
    def first(self) -> int:
        """Absolute position of the oldest row still stored."""
        return self._first


class SlidingKVCache(KVCache):
    """Keys and values of a layer that attends to the last ``window`` tokens only.

    Rows stay in order in a buffer of bounded size; when it is full, the rows that
    can still be read or rolled back to move to its front. Because ``MAX_ROLLBACK``
    rows more than the window are kept, a whole draft block can be taken back at any
    time, before and after the window has filled.
    """

    kind = "sliding"

    def __init__(self, window: int) -> None:
        super().__init__()
        self._window = window
        self._kept = window - 1 + MAX_ROLLBACK

    @property
    def earliest(self) -> int:
        return 0 if self._first == 0 else self._first + self._window - 1

    def _store(self, parts: Sequence[mx.array], stop: int) -> list[mx.array]:
        rows = parts[0].shape[-2]
        oldest_read = max(self._seq_len - self._window + 1, 0)
        if rows > self._kept:
            return self._store_long(parts, stop, oldest_read)
        if not self._buffers or stop - self._first > self._buffers[0].shape[-2]:
            keep_from = max(self._first, self._seq_len - self._kept)
            needed = stop - keep_from
            capacity = min(capacity_for(needed), 2 * self._kept)
            self._reallocate(parts, max(capacity, needed), keep_from)
        self._write(parts)
        low, high = oldest_read - self._first, stop - self._first
        return [buffer[..., low:high, :] for buffer in self._buffers]

    def _store_long(
        self, parts: Sequence[mx.array], stop: int, oldest_read: int
    ) -> list[mx.array]:
        """Append more rows than are kept: attention reads them from a passing array."""
        views = list(parts)
        if self._seq_len > oldest_read:
            low, high = oldest_read - self._first, self._seq_len - self._first
            views = [
                mx.concatenate([buffer[..., low:high, :], part], axis=-2)
                for buffer, part in zip(self._buffers, parts, strict=True)
            ]
        self._seq_len = self._first = stop - self._kept
        kept = [part[..., -self._kept :, :] for part in parts]
        self._reallocate(kept, 2 * self._kept, keep_from=self._seq_len)
        self._write(kept)
        return views


class QuantizedKVCache(KVCache):
    """Keys and values of a full-attention layer, packed to 8 or 4 bits on arrival."""

    kind = "quantized"

    def __init__(self, bits: int, group_size: int = 64) -> None:
        super().__init__()
        self._quantization = Quantization(group_size, bits)

    def append(self, keys: mx.array, values: mx.array) -> tuple[Rows, Rows]:
        q = self._quantization
        packed = [
            *mx.quantize(keys, group_size=q.group_size, bits=q.bits),
            *mx.quantize(values, group_size=q.group_size, bits=q.bits),
        ]
        k, k_scales, k_biases, v, v_scales, v_biases = self._extend(packed)
        return PackedRows(k, k_scales, k_biases, q), PackedRows(
            v, v_scales, v_biases, q
        )


class ModelCache:
    """The caches of all layers of one model, moved together."""

    def __init__(
        self,
        layers: Sequence[KVCache],
        fingerprint: str = "",
        plan: MemoryPlan | None = None,
    ) -> None:
        self.layers = list(layers)
        self.fingerprint = fingerprint
        self._plan = plan
        self._reserved = 0

    @property
    def seq_len(self) -> int:
        """Number of tokens represented.

        Raises:
            SpecError: If the layers disagree, after a forward pass was cut short.
        """
        lengths = {layer.seq_len for layer in self.layers}
        if len(lengths) > 1:
            raise SpecError(
                f"the layers of this cache hold {sorted(lengths)} tokens",
                "start again from an empty cache",
            )
        return lengths.pop() if lengths else 0

    @property
    def shortest(self) -> int:
        """Length of the shortest layer; ``seq_len`` unless a pass was cut short."""
        return min((layer.seq_len for layer in self.layers), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes of device memory held by all layers."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def max_rollback(self) -> int | None:
        """Rows that can be taken back at any time, None if there is no limit."""
        has_window = any(isinstance(layer, SlidingKVCache) for layer in self.layers)
        return MAX_ROLLBACK if has_window else None

    @property
    def earliest(self) -> int:
        """The shortest length, other than 0, that ``truncate`` accepts."""
        return max((layer.earliest for layer in self.layers), default=0)

    def truncate(self, seq_len: int) -> None:
        """Set every layer back to ``seq_len`` tokens, in constant time."""
        for layer in self.layers:
            layer.truncate(seq_len)

    def rewind(self, seq_len: int) -> int:
        """Set back to ``seq_len``, or to 0 where that far back is not stored any more.

        Returns:
            The length reached.
        """
        reached = seq_len if seq_len >= self.earliest else 0
        self.truncate(reached)
        return reached

    def reveal(self, seq_len: int) -> None:
        """Undo a ``truncate`` that no append has followed."""
        for layer in self.layers:
            layer.reveal(seq_len)

    def reserve(self, seq_len: int) -> None:
        """Check that buffers for ``seq_len`` tokens fit, before they grow.

        Raises:
            CapacityError: With the figures, if they do not.
        """
        if self._plan is not None and seq_len > self._reserved:
            self._plan.check(seq_len)
            self._reserved = capacity_for(seq_len)

    def fork(self) -> "ModelCache":
        """Return an independent cache that shares all buffers until one side writes."""
        layers = [layer.fork() for layer in self.layers]
        return ModelCache(layers, self.fingerprint, self._plan)

    def save(self, path: Path) -> None:
        """Write the rows in use to a safetensors file, replacing it in one step."""
        tensors = {
            f"{index}.{part}": rows
            for index, layer in enumerate(self.layers)
            for part, rows in enumerate(layer.state())
        }
        metadata = {
            "fingerprint": self.fingerprint,
            "seq_len": str(self.seq_len),
            "kinds": " ".join(layer.kind for layer in self.layers),
            "first": " ".join(str(layer.first) for layer in self.layers),
        }
        write_tensors(path, tensors, metadata)

    def load(self, path: Path) -> None:
        """Replace the content with that of a file ``save`` wrote for this model.

        Raises:
            LoadError: If the file is damaged, or of another model or cache kind.
        """
        tensors, metadata = read_tensors(path)
        kinds = " ".join(layer.kind for layer in self.layers)
        for name, expected in (("fingerprint", self.fingerprint), ("kinds", kinds)):
            if metadata.get(name) != expected:
                raise LoadError(
                    f"{path} was saved with {name} {metadata.get(name)!r}, "
                    f"this model has {expected!r}",
                    "load it with the model and cache settings it was saved with",
                )
        seq_len = int(metadata["seq_len"])
        rows: list[list[mx.array]] = [[] for _ in self.layers]
        for name in sorted(tensors, key=lambda key: [int(n) for n in key.split(".")]):
            rows[int(name.split(".")[0])].append(tensors[name])
        firsts = metadata["first"].split()
        for layer, parts, first in zip(self.layers, rows, firsts, strict=True):
            layer.restore(parts, int(first), seq_len)


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of leading tokens that two sequences share."""
    shorter = min(len(a), len(b))
    if list(a[:shorter]) == list(b[:shorter]):
        return shorter
    pairs = enumerate(zip(a, b, strict=False))
    return next(index for index, (left, right) in pairs if left != right)
