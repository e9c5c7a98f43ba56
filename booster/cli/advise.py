"""`booster advise`: which precision to take for the model of a script, by training a few steps in each."""

from __future__ import annotations

import argparse
import importlib
import json
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from booster.cli import values
from booster.cli.values import told
from booster.ground.text import print_table

if TYPE_CHECKING:
    from booster.numerics import Advice


_WIDTH = 110  # columns, where no terminal says how many there are
_DEFAULTS = {"steps": 20, "seconds": 60.0, "max_gradient_error": 0.1, "max_memory_mib": None}
_NAMES = ("model_fn", "batch", "criterion", "optimizer_fn")


def advise(argv: Sequence[str]) -> int:
    """Run `booster advise` with the options `argv`; returns 0, 1 where nothing is within the bounds, 2 for trouble."""
    parser = argparse.ArgumentParser(
        prog="booster advise",
        description="Train a few steps in every precision, and say which to take: by time, memory and errors.",
        epilog=f"A script, or what its function returns as a dict, has {', '.join(_NAMES)}: the arguments of "
        "booster.numerics.advise. status: 0 there is an answer, 1 nothing is within the bounds, 2 trouble",
        allow_abbrev=False,
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
    parser.add_argument("script", metavar="SCRIPT", help="a file FILE.py, or a function FILE.py:NAME or MODULE:NAME")
    options = parser.parse_args(list(argv))
    given = [name for name in ("precisions", *_DEFAULTS) if getattr(options, name) is not None]
    if options.layers and given:
        parser.error(
            f"--{given[0]} is of the measurement of precisions, and --layers times layers alone; leave one out"
        )
    for name, value in _DEFAULTS.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    from booster.numerics import Budget
    from booster.numerics.choosing.advise import advise as advised
    from booster.numerics.record.run import as_json

    with told("advise", OSError, ValueError, TypeError, ImportError, status=2):
        most = None if options.max_memory_mib is None else int(options.max_memory_mib * 2**20)
        budget = Budget(seconds=options.seconds, max_gradient_error=options.max_gradient_error, max_memory=most)
        task = _task(options.script)
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


def _task(script: str) -> dict[str, Any]:
    """The four of a script; it runs under another name than "__main__", so that it does not train."""
    file, _, function = script.rpartition(":") if ":" in script else (script, "", "")
    if file.endswith(".py"):
        sys.path.insert(0, str(Path(file).resolve().parent))
        names: Mapping[str, Any] = runpy.run_path(file, run_name=Path(file).stem)
    elif function:
        sys.path.insert(0, str(Path.cwd()))
        names = vars(importlib.import_module(file))
    else:
        raise ValueError(f"{script!r} is no script; give a file FILE.py, or a function as FILE.py:NAME or MODULE:NAME")
    if function:
        if not callable(names.get(function)):
            raise ValueError(f"{file} has no function {function!r}; it is to return a dict of {', '.join(_NAMES)}")
        names = names[function]()
        if not isinstance(names, Mapping):
            raise TypeError(f"{script} returned {type(names).__name__}; it must return a dict of {', '.join(_NAMES)}")
    missing = [name for name in _NAMES if name not in names]
    if missing:
        raise ValueError(
            f"{script} does not define {', '.join(missing)}; it needs {', '.join(_NAMES)}: the arguments of "
            "booster.numerics.advise"
        )
    return {name: names[name] for name in _NAMES}


def _show(found: Advice) -> None:
    """Print a table drawn by rich; raises ImportError, with the line that installs it, where rich is missing."""
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError as error:
        raise ImportError(
            "the table is drawn by rich: pip install 'booster-amp[report]'; or use --json, which needs nothing"
        ) from error
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
    if shown < len(heading):  # no room for words beside the numbers
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
