"""Settings shared by all tests: the device, hypothesis profiles, real checkpoints."""

import os
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, settings

from mlx_spec_models.smollm2 import build

# MLX compiles fused CPU kernels with a C++ compiler, which may not be there.
mx.disable_compile()
if os.environ.get("MLX_SPEC_TEST_DEVICE") == "cpu":
    mx.set_default_device(mx.Device(mx.cpu))

_QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile(
    "ci",
    max_examples=200,
    deadline=None,
    derandomize=True,
    suppress_health_check=_QUIET,
)
settings.register_profile("quick", max_examples=20, deadline=None, derandomize=True)
settings.register_profile("thorough", max_examples=2000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Build the real checkpoint in one of its forms, once for all workers."""
    kept = os.environ.get("MLX_SPEC_TEST_MODELS")
    root = Path(kept) if kept else tmp_path_factory.getbasetemp().parent

    def folder(form: str) -> Path:
        return build(root / f"smollm2-{form}", form)  # type: ignore[arg-type]

    return folder
