"""What it costs to see the numerics of a run: `Booster(diagnose=)` while nothing is skipped, a record, and its samples.

    python -m benchmarks.numerics [--models tiny,gpt,vit] [--rounds 60] [--precision bf16]

On one core, in process CPU time; variants alternate in shuffled order, and every figure is a median over rounds of what one
round shows. "A/A" is a second copy of the plain step: differences no larger than its own are none. gpt is the model of
examples/gpt, vit that of benchmarks/vit_step.py with 6 blocks; tiny has 3 linear layers. What diagnosis and recording do in a
step does not grow with the model, and on a busy machine only tiny resolves it, so the last column says what share of a step
tiny's microseconds are. The price of a sample is that of a step that is recorded and sampled, less that of one that is
recorded; at N = 100 a hundredth of it falls on each step. No block of 100 steps is timed: the noise of its length would be
larger than what is asked.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.timing import describe_machine, difference, interleave, pin_to_one_core
from booster import Booster

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
NO_SAMPLE = 10**9  # steps between samples, of which only the first step has one
LENGTH = 128  # bytes, of the GPT's context


def tiny() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    return model, torch.randn(8, 16), torch.randint(0, 4, (8,))


def gpt() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    sys.path.insert(0, str(EXAMPLES / "gpt"))
    from model import GPT

    text = torch.randint(0, 256, (8, LENGTH + 1))
    return GPT(context=LENGTH), text[:, :-1], text[:, 1:]


def vit() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    from benchmarks.vit_step import ViT

    return ViT(depth=6), torch.randn(4, 65, 192), torch.randint(0, 10, (4,))


MODELS = {"tiny": (tiny, 20), "gpt": (gpt, 1), "vit": (vit, 1)}  # with the steps that are timed as one


def criterion(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out.flatten(0, -2), target.flatten())


def training(
    name: str, precision: str, *, recorded: bool = False, every: int | None = None, diagnose: str | None = None
) -> tuple[Callable[[], None], Callable[[], object]]:
    """Steps of a new model, as many as are timed as one; and a diagnosis of one."""
    torch.manual_seed(0)
    make, number = MODELS[name]
    model, x, y = make()
    booster = Booster("cpu", precision, skip_nonfinite=True, diagnose=diagnose)
    model, optimizer, loss_of, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-4), criterion)
    if recorded:
        booster.record(tempfile.mkdtemp(prefix="record-"), every=every)

    def steps() -> None:
        for _ in range(number):
            booster.backward(loss_of(model(x), y), optimizer)
            optimizer.step()
            optimizer.zero_grad()

    return steps, lambda: booster.diagnose(lambda: loss_of(model(x), y), optimizer)


def measure(name: str, precision: str, rounds: int, of_tiny: dict[str, float]) -> dict[str, float]:
    """Print the rows of one model. of_tiny: seconds that a step of tiny takes more; empty before it was measured."""
    number = MODELS[name][1]
    plain, replay = training(name, precision)
    seconds = interleave(
        {
            "plain": plain,
            "again": training(name, precision)[0],
            "diagnose": training(name, precision, diagnose="first")[0],
            "record": training(name, precision, recorded=True, every=NO_SAMPLE)[0],
            "sampled": training(name, precision, recorded=True, every=1)[0],
        },
        rounds,
    )
    step = statistics.median(seconds["plain"]) / number
    replay()
    begin = time.process_time()
    replay()
    diagnosis = time.process_time() - begin
    costs = {
        "A/A": difference(seconds, "again", "plain") / number,
        "diagnosis idle": difference(seconds, "diagnose", "plain") / number,
        "recording": difference(seconds, "record", "plain") / number,
        "sampling, N = 100": difference(seconds, "sampled", "record") / number / 100,
    }
    print(f"| {name} | step | {step * 1e6:.0f} | | |")
    for what, cost in costs.items():
        fixed = f"{of_tiny[what] / step:.2%}" if what in ("diagnosis idle", "recording") and what in of_tiny else ""
        print(f"| {name} | {what} | {cost * 1e6:+.0f} | {cost / step:+.2%} | {fixed} |")
    print(f"| {name} | a sample, in steps | | {costs['sampling, N = 100'] * 100 / step:.2f} | |")
    print(f"| {name} | a diagnosis that finds nothing, in steps | | {diagnosis / step:.1f} | |")
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="tiny,gpt,vit")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--precision", default="bf16")
    options = parser.parse_args()
    pin_to_one_core()
    print(describe_machine())
    print(f"\n{options.precision}, {options.rounds} rounds\n")
    print("| model | what | us/step | of a step | by tiny's us |\n|---|---|---|---|---|")
    of_tiny: dict[str, float] = {}
    for name in options.models.split(","):
        costs = measure(name, options.precision, options.rounds, of_tiny)
        of_tiny = costs if name == "tiny" else of_tiny


if __name__ == "__main__":
    main()
