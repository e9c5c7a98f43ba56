"""What one training run did, step by step."""

import time
from dataclasses import dataclass, field

import torch

from booster import Booster

KEPT = ("loss", "loss_scale", "skipped", "num_images", "seconds")


@dataclass
class History:
    """Losses and outcomes of the steps of one run.

    During training only references are kept, so that recording never waits for the device; `close` reads them all, at the
    end and before a checkpoint.
    """

    precision: str
    loss: list[float] = field(default_factory=list)  # mean over the ranks, of each step
    loss_scale: list[float] = field(default_factory=list)  # carried by each step's gradients; 1.0 without a scaler
    skipped: list[bool] = field(default_factory=list)
    num_images: int = 0
    seconds: float = 0.0  # of training, without evaluation
    accuracy: float | None = None  # share of right answers on the test images; None where there are none
    peak_bytes: int | None = (
        None  # of a step on this rank, as `Booster.estimate_memory` has it; None where it is not known
    )

    def __post_init__(self) -> None:
        self._losses: list[torch.Tensor] = []
        self._results: list = []
        self._start = time.perf_counter()

    def record(self, loss: torch.Tensor, result: object, num_images: int) -> None:
        """Take one step: this rank's loss, the StepResult, and how many images all ranks saw."""
        self._losses.append(loss.detach())
        self._results.append(result)
        self.num_images += num_images
        self.seconds = time.perf_counter() - self._start

    def close(self, b: Booster) -> None:
        """Read what was recorded since the last time; one collective, if anything was. Call it on every rank."""
        if not self._losses:
            return
        self.loss += b.reduce(torch.stack(self._losses), "mean").tolist()
        self.seconds = time.perf_counter() - self._start
        self.loss_scale += [result.loss_scale for result in self._results]
        self.skipped += [not result.applied for result in self._results]
        self._losses, self._results = [], []

    def state_dict(self) -> dict:
        """What a checkpoint keeps of it, once it is closed."""
        kept = (self.loss, self.loss_scale, self.skipped, self.num_images, self.seconds)
        return dict(zip(KEPT, kept, strict=True))

    def load_state_dict(self, state: dict) -> None:
        for name in KEPT:
            setattr(self, name, state[name])
        self._start = time.perf_counter() - self.seconds

    @property
    def num_steps(self) -> int:
        return len(self.loss) + len(self._results)

    @property
    def images_per_second(self) -> float:
        return self.num_images / self.seconds if self.seconds else 0.0

    @property
    def has_scale(self) -> bool:
        """Whether losses were scaled."""
        return any(scale != 1 for scale in self.loss_scale)

    @property
    def final_loss(self) -> float:
        """Mean over the last 50 steps."""
        last = self.loss[-50:]
        return sum(last) / len(last)
