"""The demo model that is installed with the packages, and works without a network."""

from pathlib import Path

from mlx_spec.errors import LoadError

EMBEDDED_MODEL = Path(__file__).parent / "tiny-moe"
EMBEDDED_NAME = "tiny-moe (embedded)"
EMBEDDED_DESCRIPTION = (
    "A 4-million-parameter demo model that knows capitals, elements, units, small "
    "sums and text editing."
)


def embedded_model() -> Path:
    """Return the folder of the demo model.

    Raises:
        LoadError: If this installation does not have it.
    """
    if not (EMBEDDED_MODEL / "config.json").is_file():
        raise LoadError(
            f"the embedded model is missing: there is no {EMBEDDED_MODEL}/config.json",
            "install mlx-spec again, or name a folder or repository: --model",
        )
    return EMBEDDED_MODEL
