"""Commands before a run: `booster estimate` says what training takes of memory, `booster advise` which precision to take."""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, get_args

from booster.cli import option_values as values
from booster.cli.option_values import exit_on
from booster.common.arguments import print_table

if TYPE_CHECKING:
    from booster.numerics import Advice

_PRECISIONS = "fp32,bf16,bf16_naive,bf16_naive+8bit"
_PACKED = "+8bit"
_PATIENCE = 15.0  # seconds until it is said what takes so long, and between that and when it is said again


def estimate(argv: Sequence[str]) -> int:
    """Run `booster estimate` with the options `argv`; returns 0, or 1 where nothing could be estimated."""
    parser = values.command_parser(
        "estimate", "Estimate the memory of a training step on one rank. Nothing is allocated, and no ranks are needed."
    )

    def add(name: str, **settings: Any) -> None:
        parser.add_argument(*values.spellings(name), **settings)

    add("precision", type=_precisions, default=_PRECISIONS, metavar="A,B", help=f"default: {_PRECISIONS}")
    add(
        "plugin",
        type=_plugins,
        default="single",
        metavar="A,B",
        help="single, ddp, zero1, zero2, fsdp; default: single",
    )
    add("world_size", type=_sizes, default="1", metavar="N,M", help="ranks, for all plugins but single")
    add("batch_size", type=values.whole(1), metavar="N", help="samples of one rank")
    add("memory", type=_gibibytes, metavar="GIB", help="say what fits into so much, the largest batch, what to change")
    add(
        "device",
        default="cpu",
        choices=["cpu", "cuda"],
        help="default: cpu; cuda needs a GPU, or a build of torch for CUDA that goes backward without one",
    )
    add(
        "emulate",
        action="store_true",
        help="estimate low precisions (fp8, mxfp8, nvfp4, int8, tf32) as booster emulates them where the device lacks the "
        "format: what a rehearsal takes here, which is more than kernels take",
    )
    add("release_gradients", choices=["exact", "previous_norm"], help="step within the backward pass")
    add("clips", action="store_true", help="gradients are clipped; says something with --release_gradients")
    add(
        "offload_states",
        action="store_true",
        help="of optimizers, with masters, into the host's memory; says something with --device cuda",
    )
    add("json", action="store_true", help="print one JSON object instead of a table, bytes as numbers")
    add("picture", type=values.file_path, metavar="FILE", help="write stacked bars too (needs matplotlib)")
    parser.add_argument(
        "job",
        metavar="JOB",
        help="timm:NAME, transformers:NAME, or what `booster advise` takes: FILE.py that defines model_fn(), batch, "
        "criterion and optimizer_fn(model), or FILE.py:FUNCTION or MODULE:FUNCTION that returns them as a dict, or (model, "
        "optimizer, batch, criterion)",
    )
    options = parser.parse_args(list(argv))
    if set(options.plugin) != {"single"} and options.world_size == [1]:
        parser.error("--plugin with several ranks needs --world_size above 1")
    if set(options.plugin) == {"single"} and options.world_size != [1]:
        parser.error("--world_size is for ranks, and --plugin is single, one of them; name ddp, zero1, zero2 or fsdp")
    with exit_on("estimate", ValueError, TypeError, ImportError, OSError, status=1):
        print(_answer(options), end="")
    return 0


def _answer(options: argparse.Namespace) -> str:
    import dataclasses

    from booster.memory import named_job, picture, show
    from booster.memory.estimate import estimate as estimate_one
    from booster.memory.estimate import largest_batch, resized, samples, what_to_change

    job = named_job(options.job, options.batch_size)
    precisions = {name: _made(name, emulate=options.emulate) for name in options.precision}
    placements = [
        (plugin, size) for plugin in options.plugin for size in ((1,) if plugin == "single" else options.world_size)
    ]
    ways: dict[str, Any] = {
        "device": options.device,
        "release_gradients": options.release_gradients or False,
        "clips": options.clips,
        "offload_states": options.offload_states,
    }
    parts = (job.model, job.optimizer, job.batch, job.criterion)
    rows = [(name, plugin, size) for name in precisions for plugin, size in placements]
    found: list[Any] = []
    batches: dict[str, int] | None = None if options.memory is None else {}
    advice = None
    with _progress_on_stderr() as current:
        for place, (name, plugin, size) in enumerate(rows, 1):
            where = f"{place} of {len(rows)}, {name}" + ("" if plugin == "single" else f", {plugin} x {size}")
            current[0] = where
            chosen: dict[str, Any] = {"precision": precisions[name], "plugin": plugin, "world_size": size, **ways}
            try:
                each = dataclasses.replace(estimate_one(*parts, **chosen), precision=name)
            except ValueError as error:
                if "(emulate=True)" not in str(error):
                    raise
                # The error names the argument of Python; here it is an option.
                raise ValueError(f"{error}. Add --emulate to estimate that") from None
            found.append(each)
            if batches is not None:
                current[0] = f"{where}: the largest batch that fits"

                def peak(size: int, chosen: Any = chosen) -> int:
                    batch = resized(job.batch, size)
                    return estimate_one(job.model, job.optimizer, batch, job.criterion, **chosen).peak

                size = samples(job.batch)
                batches[each.name] = largest_batch(
                    peak, options.memory, known={} if size is None else {size: each.peak}
                )
    if options.memory is not None:
        advice = what_to_change(found, options.memory)
    if options.picture is not None:
        picture(found, options.picture, limit=options.memory)
    if options.json:
        answer: dict[str, Any] = {"estimates": [each.as_dict() for each in found]}
        if options.memory is not None:
            answer |= {"memory": options.memory, "largest_batch": batches, "advice": advice}
        return json.dumps(answer, indent=2) + "\n"
    show(found, limit=options.memory, batches=batches, batch_size=samples(job.batch))
    return f"{advice}\n" if advice else ""


@contextmanager
def _progress_on_stderr() -> Iterator[list[str]]:
    """Say on stderr, where it takes long, how far it is and why; yields a list with what is being estimated now."""
    current, done, began = [""], threading.Event(), time.monotonic()

    def report() -> None:
        why = (
            ": every operation of forward and backward is followed, and recurrent layers over long sequences, or loops in a "
            "forward pass, have many; shorter sequences or fewer of --precision and --plugin take less"
        )
        while not done.wait(_PATIENCE):
            if current[0]:
                seconds = time.monotonic() - began
                print(f"booster estimate: {current[0]}, after {seconds:.0f} s{why}", file=sys.stderr, flush=True)
                why = ""

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield current
    finally:
        done.set()
        thread.join()


def _made(name: str, *, emulate: bool = False) -> Any:
    """Return the precision; NAME+8bit is NAME with states of 8 bits, and masters of 24 where there are any."""
    from booster.mixed_precision import (
        BF16NaiveMixedPrecision,
        FP16NaiveMixedPrecision,
        LowPrecision,
        TF32MixedPrecision,
        make,
    )

    if not name.endswith(_PACKED):
        values.check_precision(name, f", or add {_PACKED}")
        precision: Any = make(name) if emulate else None
        return type(precision)(emulate=True) if isinstance(precision, (LowPrecision, TF32MixedPrecision)) else name
    kinds: dict[str, Any] = {"bf16_naive": BF16NaiveMixedPrecision, "fp16_naive": FP16NaiveMixedPrecision}
    plain = name.removesuffix(_PACKED)
    if plain in kinds:
        return kinds[plain](master_weights="split24", states="8bit")
    return make(_made(plain, emulate=emulate)).with_kept(states="8bit")


def _precisions(text: str) -> list[str]:
    names = values.listed(text)
    for name in names:
        try:
            _made(name)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return names


def _plugins(text: str) -> list[str]:
    from booster.memory.estimate import Plugin

    names = values.listed(text)
    for name in names:
        if name not in get_args(Plugin):
            legal = ", ".join(get_args(Plugin))
            raise argparse.ArgumentTypeError(f"{name!r} is not estimated{values.instead_of(name)}; choose from {legal}")
    return names


def _sizes(text: str) -> list[int]:
    return [values.whole(1)(part) for part in values.listed(text)]


def _gibibytes(text: str) -> int:
    return int(values.number(0, 2**20, "an amount of memory in GiB")(text) * 2**30)


_WIDTH = 110  # columns, where no terminal says how many there are
_DEFAULTS = {"steps": 20, "seconds": 60.0, "max_gradient_error": 0.1, "max_memory_mib": None}


def advise(argv: Sequence[str]) -> int:
    """Run `booster advise` with the options `argv`; returns 0, 1 where nothing is within the bounds, 2 for trouble."""
    parser = values.command_parser(
        "advise",
        "Train a few steps in every precision, and say which to take: by time, memory and errors.",
        epilog="A file defines model_fn(), batch, criterion and optimizer_fn(model), the arguments of booster.numerics.advise; "
        "a function returns them as a dict, or (model, optimizer, batch, criterion). `booster estimate` takes the same. "
        "status: 0 there is an answer, 1 nothing is within the bounds, 2 trouble",
    )
    parser.add_argument("--precisions", type=values.precisions, metavar="A,B", help="names, by commas; all by default")
    parser.add_argument("--steps", type=values.whole(3), metavar="N", help="timed steps of each precision (20)")
    parser.add_argument("--seconds", type=values.number(0), metavar="S", help="bound of the measurement (60)")
    parser.add_argument("--max_gradient_error", type=values.number(0), metavar="E", help="relative to float32 (0.1)")
    parser.add_argument(
        "--max_memory_mib", type=values.number(0), metavar="M", help="bound of a step's peak; none by default"
    )
    parser.add_argument(
        "--device",
        type=values.device,
        metavar="DEVICE",
        help='"cpu", "cuda" or "cuda:N"; a GPU by default, where there is one',
    )
    parser.add_argument(
        "--seed", type=values.whole(0, 2**63 - 2), default=0, metavar="N", help="of weights and random numbers (0)"
    )
    parser.add_argument(
        "--layers",
        action="store_true",
        help="time each shape of linear layer instead, in bf16 and what this device runs",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("job", metavar="JOB", help="FILE.py, FILE.py:FUNCTION or MODULE:FUNCTION")
    options = parser.parse_args(list(argv))
    given = [name for name in ("precisions", *_DEFAULTS) if getattr(options, name) is not None]
    if options.layers and given:
        parser.error(
            f"--{given[0]} is of the measurement of precisions, and --layers times layers alone; leave one out"
        )
    for name, value in _DEFAULTS.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    from booster.memory.named_jobs import named_parts
    from booster.numerics import Budget
    from booster.numerics.choosing.advise import advise as advised
    from booster.numerics.record.record_file import as_json

    with exit_on("advise", OSError, ValueError, TypeError, ImportError, status=2):
        most = None if options.max_memory_mib is None else int(options.max_memory_mib * 2**20)
        budget = Budget(seconds=options.seconds, max_gradient_error=options.max_gradient_error, max_memory=most)
        task = named_parts(options.job)
        if options.layers:
            from booster.numerics import time_layers

            timed = time_layers(task["model_fn"], task["batch"], device=options.device, seed=options.seed)
            print(json.dumps(timed.as_dict(), indent=2) if options.json else timed)
            return 0
        found = advised(
            **task,
            device=options.device,
            precisions=options.precisions,
            steps=options.steps,
            seed=options.seed,
            budget=budget,
        )
        if options.json:
            print(json.dumps(as_json(found.as_dict()), indent=2))
        else:
            _show(found)
    return 0 if found.best is not None else 1


def _show(found: Advice) -> None:
    """Print a table drawn by rich; raises ImportError, with the line that installs it, where rich is missing."""
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError as error:
        raise ImportError("the table is drawn by rich: pip install rich; or use --json, which needs nothing") from error
    console = Console(width=values.width(_WIDTH))
    heading, *rows = found.table()
    shown = len(heading) if console.width >= _WIDTH else len(heading) - 1
    table = Table(box=None, pad_edge=False, header_style="dim")
    for place, name in enumerate(heading[:shown]):
        table.add_column(name, justify="left" if place in (1, 8) else "right", no_wrap=place < 8)
    for row, cells in zip(found.rows, rows, strict=True):
        style = "bold green" if row.name == found.best else "" if row.rank is not None else "dim"
        table.add_row(*map(Text, cells[:shown]), style=style)
    print_table(console, table)
    console.print()
    if shown < len(heading):  # no room for words after the numbers
        console.print(Text(heading[-1]), style="dim")
        for row, cells in zip(found.rows, rows, strict=True):
            if cells[-1]:
                console.print(Text(f"{row.name}: {cells[-1]}"), highlight=False)
        console.print()
    for line in found.legend():
        console.print(Text(line), style="dim", highlight=False)
    console.print()
    for place, reason in enumerate(found.reasons):
        console.print(Text(reason), style="bold" if place == 0 else "", highlight=False)
