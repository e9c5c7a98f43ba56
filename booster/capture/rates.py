"""Learning rates where graphs read them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from booster.ground.torch_internals import version
from booster.interface.optimizer import OptimizerWrapper


class Rates:
    """Learning rates of all groups as tensors, which a graph reads; outside of it groups hold their numbers."""

    def __init__(self, optimizers: Sequence[OptimizerWrapper], device: torch.device) -> None:
        self._optimizers = [optimizer.unwrap() for optimizer in optimizers]
        self._device = device
        # Fused kernels of CUDA read float32; those of a CPU any.
        self._dtype = torch.float32 if device.type == "cuda" else torch.float64
        self._tensors: dict[tuple[int, int], torch.Tensor] = {}
        self._values: dict[tuple[int, int], float] = {}

    def follow(self) -> None:
        """Write what groups hold now to where graphs read it. Nobody waits."""
        for key, group in self._groups():
            rate = group["lr"]
            if isinstance(rate, torch.Tensor) or self._values.get(key) == rate:
                continue
            if key not in self._tensors:
                self._tensors[key] = torch.zeros((), dtype=self._dtype, device=self._device)
            self._values[key] = rate
            self._tensors[key].fill_(rate)

    @contextmanager
    def read_as_tensors(self, *, recorded: bool = False) -> Iterator[None]:
        """Inside, the rates of the groups are tensors. Raises RuntimeError if somebody wrote one meanwhile.

        recorded: torch's optimizers let themselves be recorded, which they refuse unless they were told of it. Their fused
        kernels count steps on the device, and so compute the same."""
        self.follow()
        held = []
        for key, group in self._groups():
            if not isinstance(group["lr"], torch.Tensor):
                held.append((group, group["lr"], self._tensors[key], version(self._tensors[key])))
                group["lr"] = self._tensors[key]
        told = [(group, group["capturable"]) for _, group in self._groups() if recorded and "capturable" in group]
        for group, _ in told:
            group["capturable"] = True
        try:
            yield
        finally:
            for group, before in told:
                group["capturable"] = before
            written = [group for group, _, rate, count in held if group["lr"] is not rate or version(rate) != count]
            for group, number, _, _ in held:
                group["lr"] = number
        if written:
            raise RuntimeError(
                "train_step writes a learning rate itself, as by a scheduler that was not given to boost(), or is stepped "
                "before the optimizer: a graph would go on with the number of its recording. Give the scheduler to boost(), "
                "and step it after optimizer.step()"
            )

    def _groups(self) -> Iterator[tuple[tuple[int, int], dict[str, Any]]]:
        for index, optimizer in enumerate(self._optimizers):
            for number, group in enumerate(optimizer.param_groups):
                if "lr" in group:
                    yield (index, number), group
