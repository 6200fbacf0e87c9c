"""The one error tree of mlx-spec: what was found, and what to change."""


class SpecError(ValueError):
    """A problem the caller can act on.

    ``message`` names the value that was found, ``hint`` the setting or file to
    change. Front ends print both; neither ever contains a traceback.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class LoadError(SpecError):
    """A checkpoint, tokenizer or drafter cannot be used as it is."""


class CapacityError(SpecError):
    """Something does not fit: device memory, or the model's context."""
