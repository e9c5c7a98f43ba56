"""Time of the update alone: 20 million parameters, AdamW, clipping at norm 1, against hand-written torch.

    python -m benchmarks.update [--rounds 15]

Prints milliseconds per update and ratios within one interleaved run, on one core. Gradients are float32, those of fp16
multiplied by the loss scale; they are restored, untimed, before every update.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.given import Given
from benchmarks.timing import clock, describe_machine, pin_to_one_core, ratio
from booster import Booster

SCALE = 2.0**16


class Bench:
    """One way to update: its own parameters, gradients refilled from a common source."""

    def __init__(self, update: Callable[[list[nn.Parameter]], Callable[[], None]], grads: list[torch.Tensor]) -> None:
        self.params = [nn.Parameter(torch.zeros_like(grad)) for grad in grads]
        self._grads = grads
        self._update = update(self.params)

    def refill(self) -> None:
        for param, grad in zip(self.params, self._grads, strict=True):
            if param.grad is None:
                param.grad = grad.clone()
            else:
                param.grad.copy_(grad)

    def run(self) -> float:
        self.refill()
        start = clock()
        self._update()
        return clock() - start


def raw(scaled: bool, **options: bool) -> Callable[[list[nn.Parameter]], Callable[[], None]]:
    """The loop that users write: unscale, clip, step, update."""

    def make(params: list[nn.Parameter]) -> Callable[[], None]:
        optimizer = torch.optim.AdamW(params, lr=1e-4, **options)  # type: ignore[arg-type]
        scaler = torch.amp.GradScaler(params[0].device.type, init_scale=SCALE, enabled=scaled)
        scaler.scale(torch.zeros((), device=params[0].device))  # makes the lazily created scale tensor

        def update() -> None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(params, 1.0)
            scaler.step(optimizer)
            scaler.update()

        return update

    return make


class Ours(Bench):
    """booster's way: a backward pass, which is not timed, leaves the gradients behind."""

    def __init__(self, precision: str, grads: list[torch.Tensor], fused_optimizer: bool | str = True) -> None:
        super().__init__(lambda params: self._clip_and_step, grads)
        model = nn.ParameterList(self.params)
        self._booster = Booster(mixed_precision=precision, fused_optimizer=fused_optimizer)  # type: ignore[arg-type]
        _, self._optimizer, *_ = self._booster.boost(model, torch.optim.AdamW(self.params, lr=1e-4))

    def refill(self) -> None:
        self._optimizer.zero_grad()
        self._booster.backward(Given.apply(self._grads, *self.params), self._optimizer)

    def _clip_and_step(self) -> None:
        self._optimizer.clip_grad_by_norm(1.0)
        self._optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--precisions", default="fp16,bf16,fp32")
    parser.add_argument("--compile", action="store_true", help="also fused_optimizer='compile'")
    options = parser.parse_args()
    pin_to_one_core()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    grads = [torch.randn(1000, 1000, device=device) for _ in range(20)]
    print(describe_machine())
    print("| precision | raw default ms | raw fused ms | ours ms | ours/raw default | ours/raw fused | A/A fused |")
    print("|---|---|---|---|---|---|---|")
    for precision in options.precisions.split(","):
        scaled = precision == "fp16"
        source = [grad * SCALE for grad in grads] if scaled else grads
        benches = {
            "default": Bench(raw(scaled), source),
            "fused": Bench(raw(scaled, fused=True), source),
            "ours": Ours(precision, grads),
            "fused again": Bench(raw(scaled, fused=True), source),
        }
        if options.compile:
            benches["compiled"] = Ours(precision, grads, "compile")
        seconds: dict[str, list[float]] = {name: [] for name in benches}
        names = list(benches)
        order = random.Random(0)
        for index in range(3 + options.rounds):
            for name in order.sample(names, len(names)):  # see timing.interleave
                elapsed = benches[name].run()
                if index >= 3:
                    seconds[name].append(elapsed)
        median = {name: statistics.median(times) * 1e3 for name, times in seconds.items()}
        print(
            f"| {precision} | {median['default']:.1f} | {median['fused']:.1f} | {median['ours']:.1f} "
            f"| {ratio(seconds, 'ours', 'default'):.2f} | {ratio(seconds, 'ours', 'fused'):.2f} "
            f"| {ratio(seconds, 'fused again', 'fused'):.2f} |"
        )
        if options.compile:
            print(
                f"|  compiled | | | {median['compiled']:.1f} | {ratio(seconds, 'compiled', 'default'):.2f} "
                f"| {ratio(seconds, 'compiled', 'fused'):.2f} | |"
            )


if __name__ == "__main__":
    main()
