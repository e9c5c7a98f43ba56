"""`booster advise`: which precision to take for the model of a script, by training a few steps in each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from booster.cli import option_values as values
from booster.cli.option_values import exit_on
from booster.common.text import print_table

if TYPE_CHECKING:
    from booster.numerics import Advice


_WIDTH = 110  # columns, where no terminal says how many there are
_DEFAULTS = {"steps": 20, "seconds": 60.0, "max_gradient_error": 0.1, "max_memory_mib": None}


def advise(argv: Sequence[str]) -> int:
    """Run `booster advise` with the options `argv`; returns 0, 1 where nothing is within the bounds, 2 for trouble."""
    parser = values.command_parser(
        "advise",
        "Train a few steps in every precision, and say which to take: by time, memory and errors.",
        epilog="A file defines model_fn, batch, criterion and optimizer_fn, the arguments of booster.numerics.advise; a "
        "function returns them as a dict, or (model, optimizer, batch, criterion). `booster estimate` takes the same. status: "
        "0 there is an answer, 1 nothing is within the bounds, 2 trouble",
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
