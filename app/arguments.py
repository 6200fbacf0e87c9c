"""The flags that ``chat`` and ``generate`` share, named as mlx-lm names them."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

from mlx_spec.errors import SpecError
from mlx_spec_app.errors import UsageError
from mlx_spec_app.request import LoadRequest, Request
from mlx_spec_models.embedded import embedded_model


def utf8_text(text: str) -> str:
    """Read the value of a flag that is given to the tokenizer."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError("the text is not UTF-8") from error
    return text


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say what to load."""
    model = parser.add_argument_group("model")
    model.add_argument(
        "model_name",
        nargs="?",
        metavar="MODEL",
        help="folder or Hugging Face repository id, as --model too "
        "(default: the small demo model that is installed with mlx-spec)",
    )
    model.add_argument("--model", metavar="MODEL", help=argparse.SUPPRESS)
    model.add_argument(
        "--drafter",
        choices=("auto", "none", "lookup", "model"),
        default="auto",
        help="what proposes tokens; auto: the draft model if named, else prompt lookup",
    )
    model.add_argument(
        "--draft-model", metavar="MODEL", help="a smaller model of the same vocabulary"
    )
    model.add_argument(
        "--num-draft-tokens",
        type=int,
        metavar="N",
        help="tokens to draft a round at most (default: the drafter's own)",
    )
    model.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="of the arithmetic; auto: the checkpoint's, float32 on a CPU",
    )
    model.add_argument(
        "--kv-bits",
        type=int,
        choices=(4, 8),
        help="keep the cache quantized (default: as computed)",
    )
    model.add_argument(
        "--extra-eos-token",
        nargs="+",
        type=utf8_text,
        default=[],
        metavar="TOKEN",
        help="further tokens that end an answer",
    )


def add_generation_arguments(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    """Add the flags that say how to answer."""
    answer = parser.add_argument_group("answer")
    answer.add_argument("--system-prompt", "-s", type=utf8_text, metavar="TEXT")
    answer.add_argument(
        "--max-tokens",
        "-m",
        type=int,
        default=max_tokens,
        metavar="N",
        help="tokens to generate at most (default: %(default)s)",
    )
    for flags, kind, default, text in (
        (("--temp", "--temperature"), float, 0.0, "0 takes the most likely token"),
        (("--top-p",), float, 1.0, "keep the likeliest tokens of this mass"),
        (("--top-k",), int, 0, "keep this many tokens; 0 keeps all"),
        (("--min-p",), float, 0.0, "drop tokens below this share of the likeliest"),
        (("--repetition-penalty",), float, 1.0, "1 is off"),
        (("--presence-penalty",), float, 0.0, "0 is off"),
        (("--frequency-penalty",), float, 0.0, "0 is off"),
        (("--seed",), int, 0, "seed of all draws"),
        (("--prefill-step-size",), int, 2048, "prompt tokens a forward pass"),
    ):
        answer.add_argument(
            *flags,
            type=kind,
            default=default,
            metavar="N",
            help=f"{text} (default: %(default)s)",
        )
    answer.add_argument(
        "--rule",
        choices=("rejection", "coupled"),
        default="rejection",
        help="coupled: a seed gives the same text with any drafter, or none",
    )


def load_request_from(args: argparse.Namespace) -> LoadRequest:
    """Check what ``add_model_arguments`` declared and put it together.

    Raises:
        UsageError: If there are two models, or two settings contradict.
        LoadError: If no model is named and the embedded one is missing.
    """
    from mlx_spec.loading import check_drafter

    given = {name for name in (args.model_name, args.model) if name is not None}
    if len(given) > 1:
        raise UsageError(
            f"two models are given: {args.model_name} and {args.model}", "name one"
        )
    if "" in given:
        raise UsageError(
            "the name of the model is empty", "name one, or leave the flag out"
        )
    with usage_errors():
        check_drafter(args.drafter, args.draft_model, args.num_draft_tokens)
    return LoadRequest(
        model=next(iter(given)) if given else str(embedded_model()),
        is_embedded=not given,
        drafter=args.drafter,
        draft_model=args.draft_model,
        num_draft_tokens=args.num_draft_tokens,
        dtype=args.dtype,
        kv_bits=args.kv_bits,
        extra_eos_tokens=tuple(args.extra_eos_token),
    )


def check_positive(args: argparse.Namespace, *names: str) -> None:
    """Check that flags hold 1 or more.

    Raises:
        UsageError: Naming the first that does not.
    """
    for name in names:
        if getattr(args, name) < 1:
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} is {getattr(args, name)}", "use 1 or more")


@contextmanager
def usage_errors() -> Iterator[None]:
    """Turn what the library says of a setting into an error of usage."""
    try:
        yield
    except SpecError as error:
        raise UsageError(error.message, error.hint) from error


def request_from(args: argparse.Namespace) -> Request:
    """Check all flags and put them together.

    Raises:
        UsageError: If a value, or two together, cannot be used.
    """
    check_positive(args, "max_tokens", "prefill_step_size")
    load = load_request_from(args)
    with usage_errors():
        return _request_from(args, load)


def _request_from(args: argparse.Namespace, load: LoadRequest) -> Request:
    from mlx_spec.sampling import SamplingParams

    return Request(
        load=load,
        sampling=SamplingParams(
            temperature=args.temp,
            top_p=args.top_p,
            top_k=args.top_k,
            min_p=args.min_p,
            repetition_penalty=args.repetition_penalty,
            presence_penalty=args.presence_penalty,
            frequency_penalty=args.frequency_penalty,
        ),
        max_tokens=args.max_tokens,
        seed=args.seed,
        rule=args.rule,
        system_prompt=args.system_prompt,
        prefill_step_size=args.prefill_step_size,
    )
