"""The environment's say in the command: read here and nowhere else."""

import os
from collections.abc import Mapping

_FLAGS = {
    "MLX_SPEC_MODEL": "--model",
    "MLX_SPEC_DRAFTER": "--drafter",
    "MLX_SPEC_DRAFT_MODEL": "--draft-model",
    "MLX_SPEC_NUM_DRAFT_TOKENS": "--num-draft-tokens",
    "MLX_SPEC_MAX_TOKENS": "--max-tokens",
    "MLX_SPEC_TEMP": "--temp",
    "MLX_SPEC_TOP_P": "--top-p",
    "MLX_SPEC_TOP_K": "--top-k",
    "MLX_SPEC_MIN_P": "--min-p",
    "MLX_SPEC_SEED": "--seed",
    "MLX_SPEC_SYSTEM_PROMPT": "--system-prompt",
    "MLX_SPEC_DTYPE": "--dtype",
    "MLX_SPEC_KV_BITS": "--kv-bits",
}
VARIABLES = tuple(_FLAGS)


def flags_from(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the flags that MLX_SPEC_* variables stand for.

    They are put before the typed ones, so that a typed flag wins.
    """
    flags: list[str] = []
    for variable, flag in _FLAGS.items():
        if value := environment.get(variable):
            flags.append(f"{flag}={value}")
    return flags


def quiet_libraries(environment: Mapping[str, str] = os.environ) -> None:
    """Keep notices of the loading libraries out of the output, unless asked for."""
    for variable, value in (
        ("TRANSFORMERS_VERBOSITY", "error"),
        ("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1"),
        ("TOKENIZERS_PARALLELISM", "false"),
    ):
        if variable not in environment:
            os.environ[variable] = value
