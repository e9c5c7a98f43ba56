"""Time of a step with packed optimizer states, against the same step with split masters and float32 states, and against others.

    python -m benchmarks.states [--rounds 15] [--tensors 8] [--compile] [--torchao]

AdamW on bfloat16, float16 or float32 weights of so many million elements, on one core, gradients at hand; only `step()` is
timed, without clip; float16 rows look for overflow first. Prints nanoseconds of CPU time an element and ratios within one
interleaved, shuffled run: to split masters stepped in the same way ("again" is a second copy of them, which shows what chance
does), and to torch's fused step of float32 weights. --compile takes fused_optimizer="compile" throughout. --torchao adds
torchao's AdamW8bit on bfloat16 weights, which keeps no masters, where it is installed (`pip install torchao`); it compiles
itself for half a minute.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.timing import describe_machine, interleave, pin_to_one_core, ratio
from booster import Booster
from booster.mixed_precision import FP32, BF16NaiveMixedPrecision, FP16NaiveMixedPrecision, MixedPrecision

Step = Callable[[], object]


def parameters(count: int, dtype: torch.dtype) -> list[nn.Parameter]:
    params = [nn.Parameter((torch.randn(1000, 1024) * 0.02).to(dtype)) for _ in range(count)]
    for param in params:
        param.grad = (torch.randn(1000, 1024) * 1e-3).to(dtype)
    return params


def ours(count: int, dtype: torch.dtype, precision: MixedPrecision, how: bool | str, states: Any = None) -> Step:
    params = parameters(count, dtype)
    grads = [param.grad for param in params]
    booster = Booster("cpu", precision, fused_optimizer=how, states=states)  # type: ignore[arg-type]
    _, optimizer, *_ = booster.boost(nn.ParameterList(params), torch.optim.AdamW(params, lr=1e-4))
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    nothing = torch.zeros((), requires_grad=True)

    def step() -> None:
        booster.backward(nothing, optimizer)  # of no parameter: their gradients are at hand, and stay
        optimizer.step()

    return step


def of_torch(count: int, dtype: torch.dtype, **options: Any) -> Step:
    return torch.optim.AdamW(parameters(count, dtype), lr=1e-4, **options).step


def of_torchao(count: int) -> Step:
    from torchao.optim import AdamW8bit  # type: ignore[import-not-found]

    return AdamW8bit(parameters(count, torch.bfloat16), lr=1e-4).step


def variants(count: int, how: bool | str, torchao: bool) -> dict[str, Callable[[], Step]]:
    def bf16(**options: Any) -> Callable[[], Step]:
        return lambda: ours(count, torch.bfloat16, BF16NaiveMixedPrecision(**options), how)

    def fp16(**options: Any) -> Callable[[], Step]:
        precision = FP16NaiveMixedPrecision(initial_scale=1.0, dynamic_grad_scale=False, **options)
        return lambda: ours(count, torch.float16, precision, how)

    found = {
        "bf16, split": bf16(master_weights="split"),
        "bf16, split again": bf16(master_weights="split"),
        "bf16, split24": bf16(master_weights="split24"),
        "bf16, split24, 8bit": bf16(master_weights="split24", states="8bit"),
        "bf16, split24, bf16": bf16(master_weights="split24", states="bf16"),
        "fp16, split": fp16(master_weights="split"),
        "fp16, split24, 8bit": fp16(master_weights="split24", states="8bit"),
        "fp32, 8bit": lambda: ours(count, torch.float32, FP32(), how, "8bit"),
        "torch fp32, fused": lambda: of_torch(count, torch.float32, fused=True),
        "torch fp32, foreach": lambda: of_torch(count, torch.float32, foreach=True),
    }
    if torchao:
        found["torchao AdamW8bit, bf16"] = lambda: of_torchao(count)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tensors", type=int, default=8, help="of 1000 x 1024 elements")
    parser.add_argument("--compile", action="store_true", help="our steps with fused_optimizer='compile'")
    parser.add_argument("--torchao", action="store_true")
    parser.add_argument("--only", default="", help="rows whose names contain one of these, and the splits")
    options = parser.parse_args()
    if options.torchao and importlib.util.find_spec("torchao") is None:
        raise SystemExit("--torchao needs torchao: pip install torchao")
    pin_to_one_core()
    torch.manual_seed(0)
    makers = variants(options.tensors, "compile" if options.compile else True, options.torchao)
    parts = [part for part in options.only.split(",") if part]
    chosen = [name for name in makers if not parts or name.endswith("split") or any(part in name for part in parts)]
    seconds = interleave({name: makers[name]() for name in chosen}, options.rounds)
    print(describe_machine())
    print(f"| {'compiled' if options.compile else 'eager'} | ns an element | / split | / torch's fused fp32 |")
    print("|---|---|---|---|")
    elements = options.tensors * 1000 * 1024
    for name in chosen:
        base = f"{name[:4]}, split" if name[:4] in ("bf16", "fp16") else "bf16, split"
        fused = f"{ratio(seconds, name, 'torch fp32, fused'):.2f}" if "torch fp32, fused" in chosen else ""
        median = statistics.median(seconds[name]) / elements * 1e9
        print(f"| {name} | {median:.2f} | {ratio(seconds, name, base):.2f} | {fused} |")


if __name__ == "__main__":
    main()
