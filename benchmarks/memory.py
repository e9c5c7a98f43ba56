"""Bytes a parameter that training holds, at rest and at its peak, and bytes of activations, for each precision and for peers.

    python -m benchmarks.memory [--only NAME,...] [--skip-activations] [--cpu]
    python -m benchmarks.memory --ranks 2,4 [--only NAME,...]

5 x Linear(1024, 1024), batch 16, AdamW: 5.25 million parameters, next to which activations are nothing. Held: unique
storages of all tensors alive after a step, gradients included, by what they serve. Peak: the highest the allocator went
during one whole step (forward, backward, update, zero_grad) above what was held at its start, plus that: on CPU from the
allocator's events, as torch.profiler records them, on CUDA from torch.cuda.max_memory_allocated.

Activations: 5 x (Linear(1024, 1024), GELU), batch 4096, where they outweigh the parameters, with autocast's weight cache
and torch.utils.checkpoint on and off; "used twice" runs the layers twice, where without a cache every use has a half copy of
the weight of its own. Peers are left out where they are not installed; torchao compiles its update, which takes a while.

--ranks: bytes that the fullest of so many gloo ranks holds and takes, see `benchmarks/memory_ranks.py`.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.allocations import alive, high_water, storages
from benchmarks.memory_ranks import HEADER, print_ranks
from benchmarks.mlp import BATCH, MLP, adamw, data
from benchmarks.timing import describe_machine
from booster import Booster, register_elementwise
from booster.mixed_precision import BF16MixedPrecision, BF16NaiveMixedPrecision, FP16NaiveMixedPrecision, MixedPrecision

WARMUP = 2
MIB = 2**20


@dataclass
class Training:
    """One way to train. `forward` gives the loss, `backward_and_step` uses it up but leaves gradients, `zero_grad` does not."""

    model: nn.Module
    forward: Callable[[], torch.Tensor]
    backward_and_step: Callable[[torch.Tensor], Any]
    zero_grad: Callable[[], Any]

    def run(self) -> None:
        self.backward_and_step(self.forward())


# ---- ways to train


def by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> Training:
    def backward_and_step(loss: torch.Tensor) -> None:
        loss.backward()
        optimizer.step()

    return Training(model, lambda: model(x).float().pow(2).mean(), backward_and_step, optimizer.zero_grad)


def plain(device: str, **options: Any) -> Training:
    model = MLP().to(device)
    return by_hand(model, torch.optim.AdamW(model.parameters(), lr=1e-4, **options), data(device, BATCH))


class Lion(torch.optim.Optimizer):
    """One signed state; as a user's own optimizer, which `register_elementwise` names. Chen et al. 2023."""

    def __init__(self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            first, second = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param)
                average = state["exp_avg"]
                param.add_(torch.lerp(param.grad, average, first).sign_(), alpha=-group["lr"])
                average.lerp_(param.grad, 1 - second)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-4, momentum=0.9)


def lion(params: Any) -> torch.optim.Optimizer:
    register_elementwise(Lion)
    return Lion(params)


def ours(
    device: str,
    precision: str | MixedPrecision,
    *,
    make: Callable[[Any], torch.optim.Optimizer] = adamw,
    batch: int = BATCH,
    states: Any = None,
    release: Any = False,
    **shape: Any,
) -> Training:
    # Where a CPU has no units for halves, "auto" would have the layer at hand in float32 beside what is counted here.
    booster = Booster(device, precision, states=states, release_gradients=release, half_products="native")
    net = MLP(**shape)
    model, optimizer, *_ = booster.boost(net, make(net.parameters()))
    x = data(device, batch)

    def backward_and_step(loss: torch.Tensor) -> None:
        booster.backward(loss, optimizer)
        optimizer.step()

    return Training(model, lambda: model(x).pow(2).mean(), backward_and_step, optimizer.zero_grad)


def masters_by_hand(device: str) -> Training:
    """fp16 weights, float32 masters, and the float32 copy of all gradients at once that hand-written loops make."""
    model = MLP().to(device).half()
    masters = [nn.Parameter(param.detach().float()) for param in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-4)
    x = data(device, BATCH).half()

    def backward_and_step(loss: torch.Tensor) -> None:
        loss.backward()
        for master, param in zip(masters, model.parameters(), strict=True):
            master.grad = param.grad.float()  # type: ignore[union-attr]
        optimizer.step()
        with torch.no_grad():
            for master, param in zip(masters, model.parameters(), strict=True):
                param.copy_(master)
                master.grad = None

    return Training(model, lambda: model(x).float().pow(2).mean(), backward_and_step, model.zero_grad)


def accelerate(device: str) -> Training:
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16", cpu=device == "cpu")
    net = MLP()
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-4))
    x = data(device, BATCH)

    def backward_and_step(loss: torch.Tensor) -> None:
        accelerator.backward(loss)
        optimizer.step()

    return Training(model, lambda: model(x).float().pow(2).mean(), backward_and_step, optimizer.zero_grad)


def fabric(device: str, precision: str) -> Training:
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator=device, devices=1, precision=precision)  # type: ignore[arg-type]
    net = MLP()
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-4))
    x = data(device, BATCH)

    def backward_and_step(loss: torch.Tensor) -> None:
        fabric.backward(loss)
        optimizer.step()

    return Training(model, lambda: model(x).float().pow(2).mean(), backward_and_step, optimizer.zero_grad)


def optimi(device: str) -> Training:
    from optimi import AdamW

    model = MLP().to(device, torch.bfloat16)
    return by_hand(model, AdamW(model.parameters(), lr=1e-4, kahan_sum=True), data(device, BATCH).bfloat16())


def torchao(device: str) -> Training:
    from torchao.optim import AdamW8bit

    model = MLP().to(device, torch.bfloat16)
    optimizer = AdamW8bit(model.parameters(), lr=1e-4, bf16_stochastic_round=True)
    return by_hand(model, optimizer, data(device, BATCH).bfloat16())


def ways() -> dict[str, tuple[str | None, Callable[[str], Training]]]:
    """Name -> the package it needs, and what makes it on a device."""
    return {
        "torch fp32, default AdamW": (None, plain),
        "torch fp32, foreach AdamW": (None, lambda device: plain(device, foreach=True)),
        "torch fp32, fused AdamW": (None, lambda device: plain(device, fused=True)),
        "torch fp16, masters by hand": (None, masters_by_hand),
        "booster fp32": (None, lambda device: ours(device, "fp32")),
        "booster bf16": (None, lambda device: ours(device, "bf16")),
        "booster fp16": (None, lambda device: ours(device, "fp16")),
        "booster fp16_naive, fp32": (None, lambda device: ours(device, FP16NaiveMixedPrecision(master_weights="fp32"))),
        "booster bf16_naive, fp32": (None, lambda device: ours(device, BF16NaiveMixedPrecision(master_weights="fp32"))),
        "booster fp16_naive, split": (
            None,
            lambda device: ours(device, FP16NaiveMixedPrecision(master_weights="split")),
        ),
        "booster bf16_naive, split": (
            None,
            lambda device: ours(device, BF16NaiveMixedPrecision(master_weights="split")),
        ),
        "booster bf16_naive, kahan": (None, lambda device: ours(device, without_masters("kahan"))),
        "booster bf16_naive, stochastic": (None, lambda device: ours(device, without_masters("stochastic"))),
        **packed(),
        "accelerate bf16": ("accelerate", accelerate),
        "fabric bf16-mixed": ("lightning_fabric", lambda device: fabric(device, "bf16-mixed")),
        "fabric 16-true": ("lightning_fabric", lambda device: fabric(device, "16-true")),
        "optimi AdamW, bf16 + kahan": ("optimi", optimi),
        "torchao AdamW8bit, bf16": ("torchao", torchao),
    }


def packed() -> dict[str, tuple[str | None, Callable[[str], Training]]]:
    """States of 8 bits, beside float32 weights and with masters of 24, for optimizers of two states and of one."""
    kinds = {"bf16_naive": BF16NaiveMixedPrecision, "fp16_naive": FP16NaiveMixedPrecision}
    wide: dict[str, tuple[str | None, Callable[[str], Training]]] = {
        f"booster {name}, 8bit, AdamW": (None, lambda device, name=name: ours(device, name, states="8bit"))  # type: ignore[misc]
        for name in ("fp32", "bf16", "fp16")
    }
    return wide | {
        f"booster {name}, split24, 8bit, {optimizer}{label}": (
            None,
            lambda device, kind=kind, make=make, release=release: ours(  # type: ignore[misc]
                device, kind(master_weights="split24", states="8bit"), make=make, release=release
            ),
        )
        for release, label in ((False, ""), ("exact", ", release"))
        for name, kind in kinds.items()
        for optimizer, make in {"AdamW": adamw, "SGD momentum": sgd, "Lion": lion}.items()
    }


def without_masters(rounding: Any) -> MixedPrecision:
    return BF16NaiveMixedPrecision(master_weights="none", rounding=rounding)


# ---- measuring


def measure(make: Callable[[str], Training], device: str) -> dict[str, float]:
    """Bytes a parameter: of parameters, gradients and all else after a step, their sum, and the peak of a step."""
    before = alive()
    training = make(device)
    for _ in range(WARMUP):
        training.run()
        training.zero_grad()
    training.run()
    held = {address: size for address, size in alive().items() if address not in before}
    count = sum(param.numel() for param in training.model.parameters())
    params = storages(param.detach() for param in training.model.parameters())
    grads = storages(param.grad for param in training.model.parameters() if param.grad is not None)
    training.zero_grad()
    base = sum(size for address, size in alive().items() if address not in before)
    peak, _ = high_water(training.run, device)
    parts = {
        "param": sum(params.values()),
        "grad": sum(grads.values()),
        "held": sum(held.values()),
        "peak": base + peak,
    }
    parts["other"] = parts["held"] - parts["param"] - parts["grad"]
    return {name: size / count for name, size in parts.items()}


def activations(device: str) -> None:
    print(f"\n{'activations, MiB':34} {'after forward':>14} {'peak of a step':>15}")
    for name, make in activation_cases().items():
        training = make(device)
        for _ in range(WARMUP):
            training.run()
            training.zero_grad()
        _, kept = high_water(training.forward, device)
        peak, _ = high_water(training.run, device)
        print(f"{name:34} {kept / MIB:14.1f} {peak / MIB:15.1f}", flush=True)
        del training
        gc.collect()


def activation_cases() -> dict[str, Callable[[str], Training]]:
    cases: dict[str, Callable[[str], Training]] = {}
    for uses in (1, 2):
        for checkpointed in (False, True):
            shape = {"gelu": True, "uses": uses, "checkpointed": checkpointed, "batch": 4096}
            label = f"{', used twice' if uses == 2 else ''}{', checkpoint' if checkpointed else ''}"
            cases[f"fp32{label}"] = lambda device, shape=shape: ours(device, "fp32", **shape)
            for cache in (True, False):
                cases[f"bf16, cache {'on' if cache else 'off'}{label}"] = lambda device, shape=shape, cache=cache: ours(
                    device, BF16MixedPrecision(cache_enabled=cache), **shape
                )
            cases[f"bf16_naive{label}"] = lambda device, shape=shape: ours(device, "bf16_naive", **shape)
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="comma-separated parts of names")
    parser.add_argument("--skip-activations", action="store_true")
    parser.add_argument("--cpu", action="store_true", help="measure the CPU although there is a GPU")
    parser.add_argument("--ranks", default="", help="numbers of gloo ranks, such as 2,4: what each of them holds")
    args = parser.parse_args()
    if args.ranks:
        print(f"{describe_machine()}\n\n{HEADER}")
        for ranks in map(int, args.ranks.split(",")):
            print_ranks(ranks, args.only.split(","))
        return
    device = "cuda" if torch.cuda.is_available() and not args.cpu else "cpu"
    torch.manual_seed(0)
    print(f"{describe_machine()}; on {device}")
    print(f"{'bytes a parameter':34} {'param':>6} {'grad':>6} {'other':>6} {'held':>6} {'peak':>6}")
    for name, (package, make) in ways().items():
        if not any(part in name for part in args.only.split(",")):
            continue
        if package and importlib.util.find_spec(package) is None:
            print(f"{name:34} not installed")
            continue
        sizes = measure(make, device)
        columns = " ".join(f"{sizes[key]:6.2f}" for key in ("param", "grad", "other", "held", "peak"))
        print(f"{name:34} {columns}", flush=True)
    if not args.skip_activations:
        activations(device)


if __name__ == "__main__":
    main()
