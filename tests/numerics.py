"""Whether this machine's stock operators give a row the same bits at any width.

They do with MLX's own CPU wheel on Linux. Where a BLAS picks its kernel by the number
of rows (Accelerate, OpenBLAS), the tests compare values instead of bits.
"""

from functools import cache

import mlx.core as mx


@cache
def is_row_invariant() -> bool:
    """Compare rows of a product alone and together."""
    x, w = mx.random.normal((17, 64), key=mx.random.key(0)), mx.ones((48, 64)) / 3
    w = w * mx.random.normal((48, 64), key=mx.random.key(1))
    together = x @ w.T
    alone = mx.concatenate([x[i : i + 1] @ w.T for i in range(17)])
    return bool(mx.array_equal(together, alone))


def assert_same_values(found: mx.array, expected: mx.array) -> None:
    """Compare bits where the operators are row-invariant, values elsewhere."""
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    if is_row_invariant():
        assert mx.array_equal(found, expected)
    else:
        assert mx.allclose(found, expected, rtol=1e-3, atol=1e-4)
