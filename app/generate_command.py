"""``mlx-spec generate``: one prompt in, one answer on stdout."""

import argparse
import io
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from mlx_spec_app.arguments import (
    add_generation_arguments,
    add_model_arguments,
    request_from,
)
from mlx_spec_app.errors import UsageError
from mlx_spec_app.figures import Figures

if TYPE_CHECKING:
    from mlx_spec.generation import GenerationResponse
    from mlx_spec_app.backend import Backend


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    prompt = parser.add_argument_group("prompt")
    prompt.add_argument(
        "--prompt",
        "-p",
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
    _use_utf8()
    request = replace(
        request_from(args), stop=tuple(args.stop), raw=args.ignore_chat_template
    )
    text = _prompt_text(args.prompt)
    model = backend.load(request.load)
    prompt: Any = text
    if request.system_prompt is not None and not request.raw:
        prompt = request.messages([{"role": "user", "content": text}])
    responses = backend.answer(model, prompt, request, None)
    if args.json:
        last = _print_json(responses)
    else:
        last = _print_text(responses, is_streamed=not args.no_stream)
    if args.stats and last is not None:
        print(*Figures.of(last).lines(), sep="\n", file=sys.stderr)
    return 0


def _use_utf8() -> None:
    """Write UTF-8 whatever the locale says."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="replace")


def _prompt_text(given: str | None) -> str:
    """Join piped text and the prompt flag.

    Raises:
        UsageError: If there is no text, or it is not UTF-8.
    """
    piped = ""
    if given == "-" or (not sys.stdin.isatty()):
        try:
            piped = sys.stdin.buffer.read().decode("utf-8")
        except UnicodeDecodeError as error:
            raise UsageError(
                f"the text on stdin is not UTF-8: byte {error.start} is "
                f"0x{error.object[error.start]:02x}",
                "convert it first, for example with iconv",
            ) from error
    parts = [piped.strip("\n"), "" if given in (None, "-") else str(given)]
    text = "\n\n".join(part for part in parts if part.strip())
    if not text:
        raise UsageError("the prompt is empty", "give some text with -p or a pipe")
    return text


def _print_text(
    responses: "Iterator[GenerationResponse]", is_streamed: bool
) -> "GenerationResponse | None":
    last, held = None, []
    for last in responses:
        if is_streamed:
            print(last.text, end="", flush=True)
        else:
            held.append(last.text)
    print("".join(held))
    return last


def _print_json(
    responses: "Iterator[GenerationResponse]",
) -> "GenerationResponse | None":
    last, texts, tokens = None, [], []
    for last in responses:
        texts.append(last.text)
        tokens.append(last.token)
    result: dict[str, Any] = {"text": "".join(texts), "tokens": tokens}
    if last is not None:
        result |= {"finish_reason": last.finish_reason} | asdict(Figures.of(last))
    print(json.dumps(result, ensure_ascii=False))
    return last
