"""The environment's say in the command: read here and nowhere else."""

import argparse
import os
import sys
import warnings
from collections.abc import Mapping

_FLAGS = (
    "--model",
    "--drafter",
    "--draft-model",
    "--num-draft-tokens",
    "--dtype",
    "--kv-bits",
    "--system-prompt",
    "--max-tokens",
    "--temp",
    "--top-p",
    "--top-k",
    "--min-p",
    "--repetition-penalty",
    "--presence-penalty",
    "--frequency-penalty",
    "--seed",
    "--rule",
    "--prefill-step-size",
)
VARIABLES = {
    f"MLX_SPEC_{flag.removeprefix('--').replace('-', '_').upper()}": flag
    for flag in _FLAGS
}


def flags_from(
    typed: argparse.Namespace, environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the flag that each MLX_SPEC_* variable stands for.

    They are to be parsed before the typed ones, so that a typed flag wins; a variable
    that contradicts what was typed is left out.
    """
    return {
        variable: f"{flag}={environment[variable]}"
        for variable, flag in VARIABLES.items()
        if environment.get(variable) and not _is_overruled(flag, typed)
    }


def _is_overruled(flag: str, typed: argparse.Namespace) -> bool:
    given = vars(typed)
    match flag:
        case "--model":
            return given.get("model_name") is not None
        case "--drafter":
            return given.get("draft_model") is not None
        case "--draft-model":
            return given.get("drafter") in ("none", "lookup", "mtp")
        case "--system-prompt":
            return bool(given.get("ignore_chat_template"))
    return False


def quiet_libraries(with_progress: bool) -> None:
    """Keep notices of the loading libraries out of the output, unless asked for.

    Args:
        with_progress: Whether a download may show how far it is, on stderr.
    """
    defaults = {
        "TRANSFORMERS_VERBOSITY": "error",
        "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
        "HF_HUB_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "0" if with_progress else "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    for variable, value in defaults.items():
        os.environ.setdefault(variable, value)
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
