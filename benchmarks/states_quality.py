"""Quality of split24 masters and 8-bit states beside float32 ones, for every optimizer and model of benchmarks/quality.py.

    python -m benchmarks.states_quality --record FILE [--models cnn,gpt,vit,mlp] [--optimizers adamw,sgd,...] [--seeds 5]
    python -m benchmarks.states_quality --record FILE --table  # runs nothing, prints those of benchmarks/results/quality.md

A run is one line of JSON of the record; a second call makes only what is missing, so it may be stopped at any time. Models are
outermost, then seeds, so that what was stopped has whole tables of some models, and every optimizer equally often.
Tables give the mean of the test's accuracy and twice its standard error; what is allowed is that of benchmarks/quality.py.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.quality import MARGIN, OPTIMIZERS, Record, standard_error, train_on_images, train_on_text
from benchmarks.timing import describe_machine

WIDE, PACKED = "fp32", "bf16_naive, split24, 8bit states"
LENGTHS = {"cnn": 1, "gpt": 80, "vit": 1, "mlp": 5}  # steps of the gpt, epochs of the others
NAMES = {
    "adamw": "AdamW",
    "sgd": "SGD, momentum 0.9",
    "adagrad": "Adagrad",
    "rmsprop": "RMSprop",
    "nadam": "NAdam",
}


def run(model: str, length: int, optimizer: str, mode: str, seed: int) -> dict[str, Any]:
    """Train and test once; returns a line of the record."""
    start = time.process_time()
    if model == "gpt":
        found = train_on_text(mode, seed, length, optimizer)
    else:
        found = train_on_images(model, mode, seed, length, optimizer)
    seconds = round(time.process_time() - start, 2)
    made = {"model": model, "optimizer": optimizer, "length": length, "mode": mode, "seed": seed}
    return {**made, **found, "seconds": seconds, "machine": describe_machine()}


def table(record: Record, model: str, length: int) -> str:
    """Return the rows of `model` in Markdown: of each optimizer the seeds that were run in both precisions."""
    of_model = {"model": model, "length": length}
    lines = [
        f"| optimizer | seeds | {WIDE}, % | {PACKED}, % | difference | allowed | |",
        "|---|---|---|---|---|---|---|",
    ]
    for optimizer, name in NAMES.items():
        by_mode = [
            {row["seed"]: row["accuracy"] for row in record.find(**of_model, optimizer=optimizer, mode=mode)}
            for mode in (WIDE, PACKED)
        ]
        seeds = sorted(by_mode[0].keys() & by_mode[1].keys())
        if len(seeds) < 2:
            continue
        wide, packed = ([found[seed] for seed in seeds] for found in by_mode)
        difference, allowed = compare(wide, packed)
        cells = [name, str(len(seeds)), interval(wide), interval(packed), f"{difference:+.2f}", f"{allowed:.2f}"]
        lines.append(f"| {' | '.join(cells)} | {'within' if abs(difference) <= allowed else 'no'} |")
    return "\n".join(lines)


def compare(wide: Sequence[float], packed: Sequence[float]) -> tuple[float, float]:
    """Return by how much the mean of `packed` lies above that of `wide`, and how far apart the two may be."""
    apart = statistics.mean(packed) - statistics.mean(wide)
    return apart, max(MARGIN, 2 * math.hypot(standard_error(list(wide)), standard_error(list(packed))))


def interval(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.2f} ± {2 * standard_error(list(values)):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, required=True, help="file of JSON lines, made or gone on with")
    parser.add_argument("--models", default=",".join(LENGTHS), help=f"of {', '.join(LENGTHS)}; cnn=1 runs one epoch")
    parser.add_argument("--optimizers", default=",".join(OPTIMIZERS), help=f"of {', '.join(OPTIMIZERS)}")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--table", action="store_true", help="run nothing, print what the record holds")
    options = parser.parse_args()
    optimizers = options.optimizers.split(",")
    given = [part.partition("=") for part in options.models.split(",")]
    unknown = [name for name, _, _ in given if name not in LENGTHS] + [o for o in optimizers if o not in OPTIMIZERS]
    if unknown:
        parser.error(f"unknown {unknown}; models are {list(LENGTHS)}, optimizers {list(OPTIMIZERS)}")
    models = {name: int(length or LENGTHS[name]) for name, _, length in given}
    record = Record(options.record)
    for model, length in [] if options.table else models.items():
        for seed, optimizer, mode in itertools.product(range(options.seeds), optimizers, (WIDE, PACKED)):
            if not record.find(model=model, optimizer=optimizer, mode=mode, seed=seed, length=length):
                record.add(run(model, length, optimizer, mode, seed))
    for model, length in models.items():
        print(f"{model}, {length} {'steps' if model == 'gpt' else 'epochs'}\n\n{table(record, model, length)}\n")


if __name__ == "__main__":
    main()
