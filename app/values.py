"""Values of flags, checked where they are read.

What is wrong with one is then said of the flag, or of the variable that stands for it.
"""

import argparse
from collections.abc import Callable
from typing import Any, TypeVar

_Number = TypeVar("_Number", int, float)


def utf8_text(text: str) -> str:
    """Read the value of a flag that is given to the tokenizer."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError("the text is not UTF-8") from error
    return text


def positive(text: str) -> int:
    """Read a count of 1 or more."""
    value = _number(int, text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is too small, use 1 or more")
    return value


def sampling_value(name: str, kind: type[_Number]) -> Callable[[str], _Number]:
    """Return what reads a field of ``SamplingParams``, in the range it may have."""

    def read(text: str) -> _Number:
        from mlx_spec.errors import SpecError
        from mlx_spec.sampling import SamplingParams

        value = _number(kind, text)
        setting: dict[str, Any] = {name: value}
        try:
            SamplingParams(**setting)
        except SpecError as error:
            message = f"{error.message}, {error.hint}"
            raise argparse.ArgumentTypeError(message) from error
        return value

    return read


def _number(kind: type[_Number], text: str) -> _Number:
    try:
        return kind(text)
    except ValueError as error:
        message = f"invalid {kind.__name__} value: {text!r}"
        raise argparse.ArgumentTypeError(message) from error
