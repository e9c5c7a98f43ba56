"""Time of the update with master weights: 20 million half parameters, AdamW, clipping at norm 1, against torch by hand.

    python -m benchmarks.masters [--rounds 15] [--compile]

The hand-written update is what users write for half weights with float32 masters: gradients to float32, foreach unscale,
norm, clip, foreach AdamW, foreach copy to the half weights. Prints CPU milliseconds and ratios within one interleaved run,
on one core. Gradients are restored, untimed, before every update. --compile adds fused_optimizer="compile", whose graphs
are compiled in the rounds that are not timed, about ten seconds for each form.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.given import Bench, Ours
from benchmarks.timing import describe_machine, pin_to_one_core, ratio
from booster.mixed_precision import BF16NaiveMixedPrecision, FP16NaiveMixedPrecision

Update = Callable[[], None]


def by_hand(params: list[nn.Parameter], scale: float, fused: bool = False) -> Update:
    """Separate masters, stepped by the implementation named."""
    masters = [nn.Parameter(param.detach().float()) for param in params]
    optimizer = torch.optim.AdamW(masters, lr=1e-4, fused=True) if fused else torch.optim.AdamW(masters, lr=1e-4)
    halves = [param.detach() for param in params]

    def update() -> None:
        grads = [param.grad.float() for param in params]  # type: ignore[union-attr]
        for master, grad in zip(masters, grads, strict=True):
            master.grad = grad
        found_inf = torch.zeros(())
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, torch.tensor(1.0 / scale))
        nn.utils.clip_grad_norm_(masters, 1.0, foreach=True)
        if not found_inf.item():
            optimizer.step()
            torch._foreach_copy_(halves, [master.detach() for master in masters])
        optimizer.zero_grad()

    return update


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--precisions", default="fp16,bf16")
    parser.add_argument("--compile", action="store_true", help="also fused_optimizer='compile'")
    options = parser.parse_args()
    pin_to_one_core()
    torch.manual_seed(0)
    print(describe_machine())
    print("| precision | update | ms | / by hand, foreach |")
    print("|---|---|---|---|")
    for name in options.precisions.split(","):
        fp16 = name == "fp16"
        scale = 2.0**10 if fp16 else 1.0
        kind = FP16NaiveMixedPrecision if fp16 else BF16NaiveMixedPrecision
        scaled = {"initial_scale": scale} if fp16 else {}
        dtype = torch.float16 if fp16 else torch.bfloat16
        source = [(torch.randn(1000, 1000) * 1e-3 * scale).to(dtype) for _ in range(20)]
        unscaled = [grad / scale for grad in source]  # the loss scale is a power of two
        benches = {
            "by hand, foreach": Bench(lambda params, scale=scale: by_hand(params, scale), source),  # type: ignore[misc]
            "by hand, fused": Bench(lambda params, scale=scale: by_hand(params, scale, fused=True), source),  # type: ignore[misc]
        }
        forms = {"fp32": {}, "split": {}, "none": {}, "none, stochastic": {"rounding": "stochastic"}}
        forms["none, kahan"] = {"rounding": "kahan"}
        for form, extra in forms.items():
            master = form.split(",")[0]
            compiles = options.compile and form != "none, stochastic"
            for implementation in (True, "compile") if compiles else (True,):
                label = f"master_weights={form}" + (", compiled" if implementation == "compile" else "")
                benches[label] = Ours(unscaled, kind(master_weights=master, **extra, **scaled), implementation)
        seconds: dict[str, list[float]] = {label: [] for label in benches}
        labels = list(benches)
        order = random.Random(0)
        for index in range(3 + options.rounds):
            for label in order.sample(labels, len(labels)):  # see timing.interleave
                elapsed = benches[label].run()
                if index >= 3:
                    seconds[label].append(elapsed)
        for label in labels:
            median = statistics.median(seconds[label]) * 1e3
            print(f"| {name} | {label} | {median:.1f} | {ratio(seconds, label, 'by hand, foreach'):.2f} |")


if __name__ == "__main__":
    main()
