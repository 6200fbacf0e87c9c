"""Importing the library is cheap, and heavy packages come when they are needed."""

import subprocess
import sys

import pytest

import mlx_spec

HEAVY = ("mlx_lm", "transformers", "textual", "huggingface_hub", "torch")


def modules_after(code: str) -> set[str]:
    """Top-level packages loaded by a fresh interpreter that runs ``code``."""
    script = f"{code}\nimport sys\nprint(*{{n.split('.')[0] for n in sys.modules}})"
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return set(run.stdout.split())


@pytest.mark.parametrize(
    "code",
    [
        "import mlx_spec",
        "from mlx_spec import *",
        "from mlx_spec import generate, load, stream_generate, Decoder",
    ],
)
def test_importing_the_library_loads_no_heavy_package(code: str) -> None:
    assert not modules_after(code) & set(HEAVY)


def test_importing_the_package_alone_does_not_load_mlx() -> None:
    assert "mlx" not in modules_after("import mlx_spec")


@pytest.mark.parametrize("name", mlx_spec.__all__)
def test_every_public_name_is_there(name: str) -> None:
    value = getattr(mlx_spec, name)
    assert name == "__version__" or callable(value)


@pytest.mark.parametrize("order", ["load, generate", "generate, load"])
def test_functions_are_not_hidden_by_modules(order: str) -> None:
    code = f"from mlx_spec import {order}\nassert callable(load) and callable(generate)"
    modules_after(code)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        mlx_spec.no_such_name  # noqa: B018
