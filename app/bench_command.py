"""``mlx-spec bench``: measure on this machine, print a table or JSON."""

import argparse
import json
import platform
from collections.abc import Callable
from typing import TYPE_CHECKING

from mlx_spec_app.arguments import add_model_arguments, load_request_from
from mlx_spec_app.values import positive, sampling_value

if TYPE_CHECKING:
    from mlx_spec.bench import Row
    from mlx_spec.loading import LoadedModel
    from mlx_spec.sampling import SamplingParams
    from mlx_spec_app.backend import Backend

SUITES = ("speed", "mlx-lm", "overhead", "prefill", "cache", "lookup")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags; -p, -g and -n mean what they mean in mlx_lm.benchmark."""
    add_model_arguments(parser)
    bench = parser.add_argument_group("measurement")
    bench.add_argument(
        "--suite",
        nargs="+",
        choices=SUITES,
        default=["speed"],
        help="what to measure (default: speed, the drafter against plain decoding)",
    )
    for flags, default in (
        (("--prompt-tokens", "-p"), 4096),
        (("--generation-tokens", "-g"), 200),
        (("--num-trials", "-n"), 5),
    ):
        bench.add_argument(*flags, type=positive, default=default, metavar="N")
    temperature = sampling_value("temperature", float)
    bench.add_argument("--temp", type=temperature, default=0.0, metavar="N")
    top_p = sampling_value("top_p", float)
    bench.add_argument("--top-p", type=top_p, default=1.0, metavar="N")
    bench.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace, backend: "Backend") -> int:
    """Measure and print; return the exit code."""
    from mlx_spec.sampling import SamplingParams

    request = load_request_from(args)
    sampling = SamplingParams(temperature=args.temp, top_p=args.top_p)
    results = _measure(args, backend.load(request), sampling)
    machine = _machine()
    if args.json:
        head = {"model": request.name, "machine": machine}
        print(json.dumps(head | results, indent=2))
        return 0
    print(f"model: {request.name}")
    print(*(f"{key}: {value}" for key, value in machine.items()), sep="\n")
    for suite, rows in results.items():
        print(f"\n{suite}")
        print(*_table(rows), sep="\n")
    return 0


def _measure(
    args: argparse.Namespace, model: "LoadedModel", sampling: "SamplingParams"
) -> "dict[str, list[Row]]":
    from mlx_spec import bench
    from mlx_spec.sampling import SamplingParams

    settings = bench.BenchSettings(
        args.generation_tokens, args.prompt_tokens, args.num_trials
    )
    warm = SamplingParams(0.8, top_p=0.95) if sampling.is_greedy else sampling
    suites: dict[str, Callable[[], list[Row]]] = {
        "speed": lambda: bench.bench_speed(model, settings, sampling),
        "mlx-lm": lambda: bench.bench_mlx_lm(model, settings),
        "overhead": lambda: bench.bench_overhead(model, settings, warm),
        "prefill": lambda: bench.bench_prefill(model, settings),
        "cache": bench.bench_cache,
        "lookup": bench.bench_lookup,
    }
    return {suite: suites[suite]() for suite in args.suite}


def _machine() -> dict[str, str]:
    from importlib.metadata import version

    import mlx.core as mx

    info = mx.device_info()
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "device": f"{info.get('device_name', 'unknown')} ({mx.default_device()})",
        "mlx": version("mlx"),
    }


def _table(rows: "list[Row]") -> list[str]:
    """Lay rows out under their names, numbers with three digits."""
    cells = [list(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    return [
        "  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True))
        for line in cells
    ]


def _cell(value: str | int | float | bool | None) -> str:
    match value:
        case None:
            return "–"
        case bool():
            return str(value).lower()
        case float():
            return f"{value:.3f}"
        case _:
            return str(value)
