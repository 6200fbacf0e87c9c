"""``mlx-spec generate``: one prompt in, one answer on stdout."""

import argparse
import json
import sys
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from mlx_spec_app.arguments import (
    add_generation_arguments,
    add_model_arguments,
    request_from,
)
from mlx_spec_app.demo import introduction
from mlx_spec_app.errors import UsageError
from mlx_spec_app.figures import Figures, TurnEnd
from mlx_spec_app.streams import is_terminal, read_stdin
from mlx_spec_app.values import utf8_text

if TYPE_CHECKING:
    from mlx_spec.generation import GenerationResponse
    from mlx_spec_app.backend import Backend


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    prompt = parser.add_argument_group("prompt")
    prompt.add_argument(
        "--prompt",
        "-p",
        type=utf8_text,
        metavar="TEXT",
        help="the prompt, - for stdin; piped text comes before it",
    )
    prompt.add_argument(
        "--ignore-chat-template",
        action="store_true",
        help="leave the chat template out",
    )
    add_model_arguments(parser)
    add_generation_arguments(parser, max_tokens=100)
    output = parser.add_argument_group("output")
    output.add_argument(
        "--stop",
        action="append",
        type=utf8_text,
        default=[],
        metavar="TEXT",
        help="end the answer before this text; may be given several times",
    )
    output.add_argument(
        "--stats", action="store_true", help="print the figures of the run on stderr"
    )
    output.add_argument(
        "--json", action="store_true", help="print one JSON object instead of the text"
    )
    output.add_argument(
        "--no-stream", action="store_true", help="print the answer when it is complete"
    )


def run(args: argparse.Namespace, backend: "Backend") -> int:
    """Answer the prompt; return the exit code."""
    request = replace(
        request_from(args), stop=tuple(args.stop), raw=args.ignore_chat_template
    )
    if request.raw and request.system_prompt is not None:
        raise UsageError(
            "--system-prompt needs the chat template",
            "leave --ignore-chat-template out, or put the text into the prompt",
        )
    text = _prompt_text(args.prompt)
    model = backend.load(request.load)
    if request.load.is_embedded and is_terminal(sys.stderr):
        print(f"note: {introduction('generate')}", file=sys.stderr)
    prompt: Any = text
    if request.system_prompt is not None:
        prompt = request.messages([{"role": "user", "content": text}])
    answer = _Answer(args.json, is_streamed=not (args.json or args.no_stream))
    try:
        for response in backend.answer(model, prompt, request, None):
            answer.add(response)
    except KeyboardInterrupt:
        answer.end = "interrupted"
        answer.finish(args.stats)
        raise
    answer.finish(args.stats)
    return 0


def _prompt_text(given: str | None) -> str:
    """Join piped text and the prompt flag.

    Raises:
        UsageError: If there is no text, or it is not UTF-8.
    """
    is_piped = given == "-" or not is_terminal(sys.stdin)
    piped = read_stdin().strip("\n") if is_piped else ""
    parts = [piped, "" if given in (None, "-") else str(given)]
    text = "\n\n".join(part for part in parts if part.strip())
    if not text:
        raise UsageError("the prompt is empty", "give some text with -p or a pipe")
    return text


class _Answer:
    """The answer so far, printed as it comes or when it is complete."""

    def __init__(self, is_json: bool, is_streamed: bool) -> None:
        self.end: TurnEnd | None = None
        self._is_json = is_json
        self._is_streamed = is_streamed
        self._texts: list[str] = []
        self._tokens: list[int] = []
        self._last: GenerationResponse | None = None

    def add(self, response: "GenerationResponse") -> None:
        self._texts.append(response.text)
        self._tokens.append(response.token)
        self._last = response
        self.end = response.finish_reason
        if self._is_streamed:
            print(response.text, end="", flush=True)

    def finish(self, with_stats: bool) -> None:
        text = "".join(self._texts)
        figures = None if self._last is None else Figures.of(self._last)
        if self._is_json:
            head = {"text": text, "tokens": self._tokens, "finish_reason": self.end}
            rest = {} if figures is None else asdict(figures)
            print(json.dumps(head | rest, ensure_ascii=False))
        else:
            print("" if self._is_streamed else text)
        if with_stats and figures is not None:
            print(*figures.lines(), sep="\n", file=sys.stderr)
