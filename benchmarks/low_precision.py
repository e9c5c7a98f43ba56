"""A block of large products, forward and backward, in every low precision; ratio to bf16, interleaved in one process.

python -m benchmarks.low_precision                                    # a GPU: 1024 to 8192; what it lacks is rehearsed
python -m benchmarks.low_precision --device cpu --sizes 256 --rounds 3 --compile
"""

import argparse
import statistics

import torch
from torch import nn

from benchmarks.timing import describe_machine, interleave, ratio
from booster import Booster
from booster.mixed_precision import (
    FP8MixedPrecision,
    Int8MixedPrecision,
    MXFP8MixedPrecision,
    NVFP4MixedPrecision,
    TF32MixedPrecision,
)

ALL = {"keep": (), "convert": "all"}  # also what is too small
PRECISIONS = {
    "bf16": lambda emulate: "bf16",
    "fp32": lambda emulate: "fp32",
    "tf32": lambda emulate: TF32MixedPrecision(emulate=emulate),
    "fp8": lambda emulate: FP8MixedPrecision(emulate=emulate, **ALL),
    "fp8 delayed": lambda emulate: FP8MixedPrecision(delayed_scaling=True, emulate=emulate, **ALL),
    "fp8 rowwise": lambda emulate: FP8MixedPrecision("rowwise", emulate=emulate, **ALL),
    "fp8 rowwise_with_gw_hp": lambda emulate: FP8MixedPrecision("rowwise_with_gw_hp", emulate=emulate, **ALL),
    "fp8 blocks": lambda emulate: FP8MixedPrecision("blocks", emulate=emulate, keep=()),
    "mxfp8": lambda emulate: MXFP8MixedPrecision(emulate=emulate, keep=()),
    "nvfp4": lambda emulate: NVFP4MixedPrecision(emulate=emulate, keep=()),
    "int8": lambda emulate: Int8MixedPrecision(emulate=emulate, keep=()),
}


def is_rehearsal(name, device):
    try:
        Booster(device, PRECISIONS[name](False))
    except ValueError:
        return True
    return False


def make_step(name, device, size, tokens, compiled):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(size, 4 * size), nn.GELU(), nn.Linear(4 * size, size))
    booster = Booster(device, PRECISIONS[name]("auto" if name not in ("bf16", "fp32") else False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer, *_ = booster.boost(torch.compile(model) if compiled else model, optimizer)
    x = torch.randn(tokens, size, device=device, requires_grad=True)

    def step():
        booster.backward(model(x).square().mean(), optimizer)
        optimizer.zero_grad()

    return step


def torchao_step(device, size, tokens, compiled):
    """torchao's own fp8 on the same block, for comparison; None where it is not installed or does not run here."""
    try:
        from torchao.float8 import convert_to_float8_training
    except ImportError:
        return None
    torch.manual_seed(0)
    model = convert_to_float8_training(
        nn.Sequential(nn.Linear(size, 4 * size), nn.GELU(), nn.Linear(4 * size, size)).to(device, torch.bfloat16)
    )
    model = torch.compile(model) if compiled else model
    x = torch.randn(tokens, size, device=device, dtype=torch.bfloat16, requires_grad=True)

    def step():
        model(x).float().square().mean().backward()
        model.zero_grad()

    return step


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--sizes", type=int, nargs="+", help="features; by default 1024 to 8192 on cuda, 256 on cpu")
    parser.add_argument("--tokens", type=int, default=0, help="rows; by default as many as features")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--compile", action="store_true", help="torch.compile the block; tf32 is left eager where rehearsed"
    )
    parser.add_argument("--only", nargs="+", choices=[name for name in PRECISIONS if name != "bf16"])
    options = parser.parse_args()
    print(f"{describe_machine()}; {options.device}{', compiled' if options.compile else ''}")
    rehearsed = {name for name in PRECISIONS if is_rehearsal(name, options.device)}
    if rehearsed:
        print(f"rehearsals on {options.device}, which say nothing of a GPU's speed: {', '.join(sorted(rehearsed))}\n")
    names = ["bf16", *(options.only or [name for name in PRECISIONS if name != "bf16"])]
    for size in options.sizes or ([1024, 2048, 4096, 8192] if options.device == "cuda" else [256]):
        tokens = options.tokens or size
        steps = {
            name: make_step(
                name, options.device, size, tokens, options.compile and not (name == "tf32" and name in rehearsed)
            )
            for name in names
        }
        theirs = torchao_step(options.device, size, tokens, options.compile) if options.device == "cuda" else None
        if theirs is not None:
            steps["torchao fp8"] = theirs
        seconds = interleave(steps, options.rounds)
        print(f"| {tokens} x {size} x {4 * size} | ms, median | bf16 / this |\n|---|---|---|")
        for name, each in seconds.items():
            note = " (rehearsed)" if name in rehearsed else ""
            print(f"| {name}{note} | {statistics.median(each) * 1e3:.2f} | {ratio(seconds, 'bf16', name):.2f} |")
        print()


if __name__ == "__main__":
    main()
