"""What is said of the embedded model to those who named no other."""

from mlx_spec_models.embedded import EMBEDDED_DESCRIPTION
from mlx_spec_models.registry import suggestions, usable_memory


def introduction(command: str) -> str:
    """Say what the model is, and how ``command`` gets a real one that fits here."""
    best = next(iter(suggestions(usable_memory())), None)
    model = "MODEL" if best is None else best.repository
    return f"{EMBEDDED_DESCRIPTION} A real one: mlx-spec {command} {model}"
