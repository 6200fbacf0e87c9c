"""The flags that ``chat`` and ``generate`` share, named as mlx-lm names them."""

import argparse

from mlx_spec.errors import SpecError
from mlx_spec_app.errors import UsageError
from mlx_spec_app.request import LoadRequest, Request
from mlx_spec_app.values import positive, sampling_value, utf8_text
from mlx_spec_models.embedded import embedded_model


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
        choices=("auto", "none", "lookup", "mtp", "model"),
        default="auto",
        help="what proposes tokens; mtp: the model's own multi-token prediction layer; "
        "auto: the draft model if named, else prompt lookup",
    )
    model.add_argument(
        "--draft-model",
        metavar="MODEL",
        help="a drafter trained for the model (EAGLE-3, DFlash), or a smaller model of "
        "the same vocabulary",
    )
    model.add_argument(
        "--num-draft-tokens",
        type=positive,
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
        action="append",
        type=utf8_text,
        default=[],
        metavar="TOKEN",
        help="a further token that ends an answer; may be given several times",
    )


def add_generation_arguments(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    """Add the flags that say how to answer."""
    answer = parser.add_argument_group("answer")
    answer.add_argument("--system-prompt", "-s", type=utf8_text, metavar="TEXT")
    answer.add_argument(
        "--max-tokens",
        "-m",
        type=positive,
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
    ):
        name = flags[-1].removeprefix("--").replace("-", "_")
        answer.add_argument(
            *flags,
            type=sampling_value(name, kind),
            default=default,
            metavar="N",
            help=f"{text} (default: %(default)s)",
        )
    answer.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="seed of all draws (default: %(default)s)",
    )
    answer.add_argument(
        "--prefill-step-size",
        type=positive,
        default=2048,
        metavar="N",
        help="prompt tokens a forward pass (default: %(default)s)",
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
    try:
        check_drafter(args.drafter, args.draft_model, args.num_draft_tokens)
    except SpecError as error:
        raise UsageError(error.message, error.hint) from error
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


def request_from(args: argparse.Namespace) -> Request:
    """Put all flags together; see ``load_request_from``."""
    from mlx_spec.sampling import SamplingParams

    return Request(
        load=load_request_from(args),
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
