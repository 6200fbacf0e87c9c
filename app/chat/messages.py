"""What the engine thread tells the app. Nothing else crosses between them."""

from dataclasses import dataclass

from textual.message import Message

from mlx_spec_app.figures import Figures, TurnEnd


@dataclass
class ModelLoaded(Message):
    """The model is ready.

    Attributes:
        drafter: Name of what proposes tokens.
    """

    drafter: str


@dataclass
class LoadFailed(Message):
    """The model cannot be used; the app ends."""

    error: Exception


@dataclass
class TextArrived(Message):
    """More of the answer, and the figures so far."""

    text: str
    figures: Figures


@dataclass
class TurnFinished(Message):
    """The answer is complete, or was stopped; no text arrives after this."""

    reason: TurnEnd
    figures: Figures | None


@dataclass
class TurnFailed(Message):
    """The answer could not be made."""

    error: Exception
