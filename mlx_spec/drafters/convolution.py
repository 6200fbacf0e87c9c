"""The two-tap convolution that DFlash 2 puts around every sublayer of a block."""

import mlx.core as mx

from mlx_spec.errors import LoadError
from mlx_spec.layers import Linear
from mlx_spec.weights import Weights


class Filter:
    """One side of a convolution along the block, with the kernels of its rows."""

    def __init__(self, kernels: mx.array) -> None:
        self._kernels = kernels  # (1, K, taps, H)

    def __call__(self, x: mx.array) -> mx.array:
        """Filter x (1, K, H); the first row has no predecessor."""
        result = self._kernels[:, :, 0] * x
        for tap in range(1, self._kernels.shape[2]):
            before = mx.pad(x[:, :-tap], [(0, 0), (tap, 0), (0, 0)])
            result = result + self._kernels[:, :, tap] * before
        return result


class BlockConv:
    """Grouped dynamic depthwise convolution: learnt kernels plus a row's correction.

    Raises:
        LoadError: If the groups do not divide the hidden size.
    """

    def __init__(
        self, name: str, size: int, taps: int, group: int, weights: Weights
    ) -> None:
        if size % group:
            raise LoadError(
                f"conv_group_size {group} does not divide the hidden size {size}"
            )
        self._group = group
        self._base = weights.tensor(f"{name}.base_kernel", (2, taps, size))
        shape = (2 * taps * size // group, size)
        self._project = Linear(
            weights.tensor(f"{name}.kernel_projection.weight", shape)
        )

    def filters(self, z: mx.array) -> tuple[Filter, Filter]:
        """Return the filters of a sublayer's input and output, for its input z."""
        _, taps, size = self._base.shape
        delta = self._project(z)
        delta = delta.reshape(*z.shape[:2], 2, taps, size // self._group)
        kernels = self._base + mx.repeat(delta, self._group, axis=-1)
        return Filter(kernels[:, :, 0]), Filter(kernels[:, :, 1])
