"""Runs with a flaw planted in them, which a low precision does not survive, flown by an autopilot.

    python -m benchmarks.planted --seeds 3 4 5 --out benchmarks/figures/planted.json
    python -m benchmarks.planted --table benchmarks/figures/planted.json

The first adds to the file the runs that it has not yet; the second prints the tables of benchmarks/results/quality.md, of
benchmarks/figures/planted_finish.json that of the runs which chose where the finish begins.

Each flaw is a number that is huge and multiplied with zero, as channels of large models carry them: in a wide dtype it
does nothing, and the numbers that share its scale in a low one are rounded to zero. Beside the autopilot run bfloat16,
the low precision throughout, a schedule that ends in bfloat16, and one of autopilots that ends so. Data are made by
rules, not downloaded.

Where the finish begins was chosen by this rule, written down before the runs: the candidates (0.85, 0.95), (0.8, 0.9),
(0.7, 0.85) and (0.75, 0.75) run the GPT without a flaw and with the norm that drifts, in seeds 12 to 14 (17 at first),
and so does bfloat16. Of those whose mean loss above bfloat16, same seed with same seed, is within one standard error of
the least, the one with the smallest share of wide products is taken, the same for all models and flaws.

Then all cases run in seeds 3 to 8, in bfloat16 and with the finish, by the same code. The finish holds in a case if no fewer
runs are within the smallest and the largest loss of bfloat16's six seeds than bfloat16's own would be, which is 5 of 7 for a
run that is drawn like those six, so 4 of 6; what is below the smallest is not within, but no loss. Beside it stands the mean
difference of same seeds with its interval of 95 % by Student's t, five degrees of freedom.
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import math
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from booster import Booster
from booster.interface.model import extras_of
from booster.mixed_precision import Autopilot, NVFP4MixedPrecision, PrecisionSchedule
from booster.mixed_precision.low_precision.linear import LowPrecisionLinear
from booster.mixed_precision.low_precision.recipes import HighPrecision
from booster.numerics.record.recorded_run import Run, read_run

DIM, LENGTH, BATCH, VOCABULARY = 64, 16, 16, 32
STEPS = 120
EVERY = 10
RATE = 3e-3
OUTLIERS = slice(0, DIM, 16)  # one channel of each block of 16


class Block(nn.Module):
    """A transformer block of relu, which a positive factor passes through."""

    def __init__(self, *, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.unflatten(-1, (4, -1)).transpose(1, 2) for each in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(self.norm2(x))))


_TABLE = torch.randint(VOCABULARY, (8, 8), generator=torch.Generator().manual_seed(0))


class GPT(nn.Module):
    """Two blocks; what follows is read from a table by this token and the one before, which attention has to find."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, DIM), nn.Embedding(LENGTH, DIM)
        self.blocks = nn.ModuleList(Block(causal=True) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.tokens(x) + self.places.weight
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h)).flatten(0, 1)

    @staticmethod
    def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randint(_TABLE.shape[0], (BATCH, LENGTH), generator=generator)
        return x, _TABLE[x, x.roll(1, 1)].flatten()


_PATTERNS = torch.randn(8, 32, generator=torch.Generator().manual_seed(0)) * 1.5


class ViT(nn.Module):
    """Two blocks over patches; one of eight patterns is added to a patch of noise, or subtracted: no linear map tells which."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.places = nn.Linear(32, DIM), nn.Parameter(torch.randn(LENGTH, DIM) * 0.1)
        self.blocks = nn.ModuleList(Block(causal=False) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, len(_PATTERNS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.patches(x) + self.places
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h).mean(1))

    @staticmethod
    def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(2 * BATCH, LENGTH, 32, generator=generator)
        place = torch.randint(LENGTH, (len(x),), generator=generator)
        kind = torch.randint(len(_PATTERNS), (len(x),), generator=generator)
        sign = torch.randint(2, (len(x), 1), generator=generator) * 2 - 1
        x[torch.arange(len(x)), place] += sign * _PATTERNS[kind]
        return x, kind


FINISH = "finish"
FORWARD, WHOLE = 0.85, 0.95  # where a run that finishes wide begins to: its forward products, and all of them
MODELS: dict[str, type[Any]] = {"gpt": GPT, "vit": ViT}


# ---------------------------------------------------------------------- flaws

Flaw = Callable[[Any, int], None]
HUGE = 300.0


@torch.no_grad()
def plant_outliers(block: Any, size: float) -> None:
    """Have some channels behind the second norm carry a constant that the next layer multiplies with zero."""
    block.norm2.bias[OUTLIERS] = size
    block.up.weight[:, OUTLIERS] = 0.0


def outlier(model: Any, step: int) -> None:
    for block in model.blocks:
        plant_outliers(block, HUGE)


@torch.no_grad()
def outlier_before_attention(model: Any, step: int) -> None:
    """The same behind the first norm, whose channels attention reads: a ViT gets on without its MLPs, not without that."""
    for block in model.blocks:
        block.norm1.bias[OUTLIERS] = HUGE
        block.qkv.weight[:, OUTLIERS] = 0.0


def drift(model: Any, step: int) -> None:
    for block in model.blocks:
        plant_outliers(block, HUGE ** min(1.0, 3 * step / STEPS) - 1.0)


@torch.no_grad()
def bad_weights(model: Any, step: int) -> None:
    """Have some columns of a weight be huge, and what they are multiplied with zero."""
    for block in model.blocks:
        block.up.weight[OUTLIERS], block.up.bias[OUTLIERS] = 0.0, 0.0
        block.down.weight[:, OUTLIERS] = HUGE


def none(model: Any, step: int) -> None:
    pass


FLAWS: dict[str, tuple[Flaw, set[str]]] = {
    "outlier channel": (outlier, {"blocks.0.up", "blocks.1.up"}),
    "outlier before attention": (outlier_before_attention, {"blocks.0.qkv", "blocks.1.qkv"}),
    "norm that drifts": (drift, {"blocks.0.up", "blocks.1.up"}),
    "bad weights": (bad_weights, {"blocks.0.down", "blocks.1.down"}),
    "decay of lr": (none, set()),
    "none": (none, set()),
}


# ---------------------------------------------------------------------- runs


def low(**options: Any) -> NVFP4MixedPrecision:
    return NVFP4MixedPrecision(emulate=True, **options)


def flown(**options: Any) -> Autopilot:
    return Autopilot(low(**options), "bf16", every=EVERY)


def precisions(forward: float = FORWARD, whole: float = WHOLE) -> dict[str, Callable[[], Any]]:
    """Ways to run: what each gives to Booster. The finish has all forward products wide from the share `forward` of the
    steps on, and all products from `whole` on."""
    ending = {forward: flown(forward="bf16"), whole: "bf16"}  # of one phase where both shares are the same
    return {
        "bf16": lambda: "bf16",
        "low": low,
        "autopilot": flown,
        "schedule": lambda: PrecisionSchedule({0: low(), 0.85: "bf16"}, total_steps=STEPS),
        FINISH: lambda: PrecisionSchedule({0: flown(), **ending}, total_steps=STEPS),
    }


def wide_share(model: nn.Module, names: list[str]) -> float:
    """How many of the products of the layers of these `names` are wide, which were low in the beginning."""
    layers = [model.get_submodule(name) for name in names]
    recipes = [each.recipe for each in layers if isinstance(each, LowPrecisionLinear)]
    products = [how for each in recipes for how in (each.output, each.input_gradient, each.weight_gradient)]
    low_ones = sum(not isinstance(how, HighPrecision) for how in products)
    return 1 - low_ones / (3 * len(names))


def train(kind: str, flaw: str, precision: Any, seed: int, steps: int = STEPS) -> dict[str, Any]:
    """One run; returns its last loss, a mean over the last tenth, and of an autopilot what it made wide, when, and how much."""
    torch.manual_seed(seed)
    own = MODELS[kind]()
    booster = Booster("cpu", precision)
    optimizer = torch.optim.AdamW(own.parameters(), lr=RATE, weight_decay=0.0)
    schedule = None
    if flaw == "decay of lr":
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps) ** 2)
    model, optimizer, _, _, schedule = booster.boost(own, optimizer, None, None, schedule)
    plant, _ = FLAWS[flaw]
    generator, losses, shares = torch.Generator().manual_seed(seed), [], []
    pilot: Any = extras_of(model).pins
    names = [name for name, module in own.named_modules() if isinstance(module, LowPrecisionLinear)]
    with tempfile.TemporaryDirectory() as folder:
        with booster.record(folder, every=None):
            for step in range(steps):
                plant(own, step)
                x, y = own.batch(generator)
                loss = F.cross_entropy(model(x), y)
                booster.backward(loss, optimizer)
                optimizer.step()
                optimizer.zero_grad()
                if schedule is not None:
                    schedule.step()
                losses.append(loss.item())
                if pilot is not None:
                    shares.append(wide_share(own, names))
        run = read_run(folder)
    last = statistics.fmean(losses[-steps // 10 :])
    found: dict[str, Any] = {"loss": round(last, 4) if math.isfinite(last) else None}
    return found if pilot is None else found | _flown(run, shares)


def _flown(run: Run, shares: list[float]) -> dict[str, Any]:
    """Of an autopilot's run how much was wide, which layers ever were, each change, and looks between looks."""
    return {
        "share": round(statistics.fmean(shares), 4),
        "most": round(max(shares), 4),
        "named": sorted({change.name for change in run.piloted}),
        "changes": [
            [change.step, change.name, change.role, change.wide, round(change.noise, 3), round(change.ahead, 3)]
            for change in run.piloted
        ],
        "again": sum(look.again for look in run.looks),
    }


def runs(
    seeds: list[int], kinds: list[str], flaws: list[str], ways: list[str], wide_from: tuple[float, float]
) -> Iterator[dict[str, Any]]:
    """Each run that these say, as what tells it apart."""
    for kind in kinds:
        for flaw in flaws:
            for way in ways:
                more = {"wide_from": list(wide_from)} if way == FINISH else {}
                yield from ({"model": kind, "flaw": flaw, "way": way, **more, "seed": seed} for seed in seeds)


def table(rows: list[dict[str, Any]]) -> str:
    """The table of benchmarks/results/quality.md: means of last losses, (smallest, largest), and what the autopilot did.

    A star is behind what was run before the last day that anything was.
    """
    rows = [row for row in rows if row["way"] != FINISH]
    last = max(row["date"] for row in rows)
    lines = [
        "| run | bf16 | nvfp4 | autopilot | schedule | in the spread | wide, mean (most) | named |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for kind, flaw in dict.fromkeys((row["model"], row["flaw"]) for row in rows):
        by_way = {
            way: [row for row in rows if (row["model"], row["flaw"], row["way"]) == (kind, flaw, way)]
            for way in precisions()
            if way != FINISH
        }
        spread = [row["loss"] for row in by_way["bf16"]]
        flown = by_way["autopilot"]
        inside = sum(min(spread) <= row["loss"] <= max(spread) for row in flown)
        shares = f"{statistics.fmean(row['share'] for row in flown):.0%} ({max(row['most'] for row in flown):.0%})"
        named = sorted({name.removeprefix("blocks.") for row in flown for name in row["named"]})
        cells = [f"{kind}, {flaw}", *(_spread(own, last) for own in by_way.values())]
        cells += [f"{inside} of {len(flown)}", shares, ", ".join(f"`{name}`" for name in named) or "none"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


_STUDENT = {3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571}
"""By the number of values, within how many standard errors of their mean 95 % lie, by Student's t."""


def above(rows: list[dict[str, Any]], wide: list[dict[str, Any]]) -> list[float]:
    """By how much the last loss of each of `rows` is above that of the run in `wide` of its model, flaw and seed."""
    losses = {(row["model"], row["flaw"], row["seed"]): row["loss"] for row in wide}
    return [row["loss"] - losses[row["model"], row["flaw"], row["seed"]] for row in rows]


def finished(rows: list[dict[str, Any]]) -> str:
    """The table of benchmarks/results/quality.md of runs by autopilots that end wide, beside bfloat16."""
    last = max(row["date"] for row in rows)
    lines = [
        "| run | bf16 | autopilot, ending wide | in the spread (below) | above bf16, same seeds (95 %) | wide, mean | named |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind, flaw in dict.fromkeys((row["model"], row["flaw"]) for row in rows if row["way"] == FINISH):
        wide, own = (
            [row for row in rows if (row["model"], row["flaw"], row["way"]) == (kind, flaw, way)]
            for way in ("bf16", FINISH)
        )
        spread, more = [row["loss"] for row in wide], above(own, wide)
        inside = sum(min(spread) <= row["loss"] <= max(spread) for row in own)
        below = sum(row["loss"] < min(spread) for row in own)
        named = sorted({name.removeprefix("blocks.") for row in own for name in row["named"]})
        cells = [f"{kind}, {flaw}", _spread(wide, last), _spread(own, last)]
        cells.append(f"{inside} of {len(own)}" + f" ({below})" * bool(below))
        cells.append(f"{statistics.fmean(more):+.4f}{_margin(more)}")
        cells.append(f"{statistics.fmean(row['share'] for row in own):.0%}")
        cells.append(", ".join(f"`{name}`" for name in named) or "none")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _margin(values: list[float]) -> str:
    """How far from their mean the true one may be, by an interval of 95 %; of one or two values nothing."""
    if len(values) not in _STUDENT:
        return ""
    return f" ± {_STUDENT[len(values)] * statistics.stdev(values) / math.sqrt(len(values)):.4f}"


def chosen(rows: list[dict[str, Any]]) -> str:
    """The table of benchmarks/results/quality.md of the runs that chose where the finish begins."""
    lines = ["| forward wide from, all from | above bf16, same seeds (standard error) | wide, mean |", "|---|---|---|"]
    wide = [row for row in rows if row["way"] == "bf16"]
    for begins in sorted({tuple(row["wide_from"]) for row in rows if row["way"] == FINISH}, reverse=True):
        own = [row for row in rows if row["way"] == FINISH and tuple(row["wide_from"]) == begins]
        more, share = above(own, wide), statistics.fmean(row["share"] for row in own)
        error = statistics.stdev(more) / math.sqrt(len(more))
        lines.append(f"| {begins[0]}, {begins[1]} | {statistics.fmean(more):.4f} ({error:.4f}) | {share:.0%} |")
    return "\n".join(lines) + "\n"


def _spread(rows: list[dict[str, Any]], last: str) -> str:
    losses, star = [row["loss"] for row in rows], "" if all(row["date"] == last for row in rows) else " \\*"
    return f"{statistics.fmean(losses):.3f} ({min(losses):.3f}, {max(losses):.3f}){star}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=[3, 4, 5])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--flaws", nargs="+", default=list(FLAWS), choices=list(FLAWS))
    parser.add_argument("--ways", nargs="+", default=list(precisions()), choices=list(precisions()))
    parser.add_argument(
        "--wide-from",
        nargs=2,
        type=float,
        default=(FORWARD, WHOLE),
        metavar=("FORWARD", "ALL"),
        help="the shares of the run at which finish makes forward products wide, and all of them",
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path, help="print the table of this file and run nothing")
    given = parser.parse_args()
    if given.table:
        rows = json.loads(given.table.read_text())
        tables = (table, finished) if any(row["way"] == "autopilot" for row in rows) else (chosen,)
        print(*(each(rows) for each in tables), sep="\n", end="")
        return
    logging.getLogger("booster").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}")
    rows = json.loads(given.out.read_text()) if given.out and given.out.exists() else []
    wide_from = tuple(given.wide_from)
    for what in runs(given.seeds, given.models, given.flaws, given.ways, wide_from):
        if any(what.items() <= row.items() for row in rows):
            continue
        began = time.process_time()
        found = train(what["model"], what["flaw"], precisions(*wide_from)[what["way"]](), what["seed"])
        seconds = round(time.process_time() - began, 1)
        rows.append(row := {**what, **found, "seconds": seconds, "date": f"{datetime.date.today()}"})
        loss = "none" if row["loss"] is None else f"{row['loss']:.3f}"
        more = f"  wide {row['share']:.0%} (at most {row['most']:.0%}) {row['named']}" if "share" in row else ""
        print(
            f"{row['model']} {row['flaw']:17} {row['way']:9} {row['seed']}  loss {loss}  {row['seconds']} s{more}",
            flush=True,
        )
        if given.out:
            given.out.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


if __name__ == "__main__":
    main()
