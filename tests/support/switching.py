"""A run that goes over to another precision, and one that was saved, built anew in that precision, and loaded."""

import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from booster import Booster
from booster.mixed_precision import (
    FP32,
    BF16MixedPrecision,
    BF16NaiveMixedPrecision,
    FP8MixedPrecision,
    FP16NaiveMixedPrecision,
    FP16TorchMixedPrecision,
    Int8MixedPrecision,
    MXFP8MixedPrecision,
    NVFP4MixedPrecision,
    TF32MixedPrecision,
)

PRECISIONS = {
    "fp32": FP32,
    "tf32": lambda: TF32MixedPrecision(emulate=True),
    "bf16": BF16MixedPrecision,
    "fp16": FP16TorchMixedPrecision,
    "fp8": lambda: FP8MixedPrecision(emulate=True),
    "mxfp8": lambda: MXFP8MixedPrecision(emulate=True),
    "nvfp4": lambda: NVFP4MixedPrecision(emulate=True),
    "int8": lambda: Int8MixedPrecision(emulate=True),
    "bf16_naive": BF16NaiveMixedPrecision,
    "half buffers": lambda: BF16NaiveMixedPrecision(half_buffers=("shift", "blocks.*.frequencies")),
    "fp16_naive": FP16NaiveMixedPrecision,
}


class Net(nn.Module):
    """Linear layers, a norm that keeps float32, a buffer that checkpoints hold and one that they do not."""

    def __init__(self, norm=nn.BatchNorm1d):
        super().__init__()
        self.into, self.norm = nn.Linear(32, 64), norm(64)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.out = nn.Linear(64, 4)
        self.register_buffer("shift", torch.linspace(0, 1, 64) / 7)

    def forward(self, x):
        x = torch.tanh(self.norm(self.into(x))) + self.shift.to(x.dtype)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64)
        self.register_buffer("frequencies", torch.linspace(0, 1, 64) / 3, persistent=False)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x * self.frequencies.to(x.dtype))))


class Job:
    """A small run. parts: what `boost` returned, but for the loader."""

    def __init__(self, precision, plugin=None, *, make=torch.optim.AdamW, norm=nn.BatchNorm1d, **options):
        torch.manual_seed(0)
        precision = PRECISIONS[precision]() if isinstance(precision, str) else precision
        model = Net(norm)
        optimizer = make(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        self.booster = Booster("cpu", precision, plugin, **options)
        boosted = self.booster.boost(model, optimizer, nn.CrossEntropyLoss(), None, schedule)
        self.model, self.optimizer, self.criterion, _, self.schedule = boosted

    @property
    def parts(self):
        return self.model, self.optimizer, None, None, self.schedule

    def steps(self, first, last, rank=0):
        """Train on the batches of these numbers; return the losses, which hang on random numbers too."""
        losses = []
        for number in range(first, last):
            generator = torch.Generator().manual_seed(100 * number + rank)
            x, y = torch.randn(16, 32, generator=generator), torch.randint(0, 4, (16,), generator=generator)
            loss = self.criterion(self.model(F.dropout(x, 0.1)), y)
            self.booster.backward(loss, self.optimizer)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            losses.append(loss.item())
        return losses

    def state(self):
        """Everything that goes on: weights, buffers, states, masters, scales, counters, the schedule, random numbers."""
        return copy.deepcopy(
            (
                self.model.state_dict(),
                dict(self.model.named_buffers()),
                self.optimizer.state_dict(),
                self.schedule.state_dict(),
                torch.get_rng_state(),
                [group["fused"] for group in self.optimizer.param_groups if "fused" in group],
            )
        )


def rebuilt(job, folder, precision, *arguments, **options):
    """Save `job`, and return one that was built in `precision` and loaded."""
    job.booster.save(folder, *job.parts)
    other = Job(precision, *arguments, **options)
    other.booster.load(folder, *other.parts)
    return other


def differences(one, two, where="state"):
    """Where two states differ, dtypes and bits."""
    if isinstance(one, torch.Tensor):
        one, two = (each.to_local() if hasattr(each, "to_local") else each for each in (one, two))
        same = one.dtype == two.dtype and torch.equal(one, two)
        return [] if same else [f"{where}: {one.dtype} {tuple(one.shape)}, and {two.dtype} {tuple(two.shape)}"]
    if isinstance(one, dict):
        found = [] if one.keys() == two.keys() else [f"{where}: {sorted(map(str, one.keys() ^ two.keys()))}"]
        return found + [
            each for key in one.keys() & two.keys() for each in differences(one[key], two[key], f"{where}/{key}")
        ]
    if isinstance(one, (list, tuple)):
        found = [] if len(one) == len(two) else [f"{where}: {len(one)} and {len(two)} entries"]
        return found + [
            each for i, pair in enumerate(zip(one, two, strict=False)) for each in differences(*pair, f"{where}/{i}")
        ]
    return [] if one == two else [f"{where}: {one} and {two}"]


def compared(job, folder, precision, *arguments, rank=0, **options):
    """Switch `job` to `precision`, and return what differs from save, build and load: at once, and three steps later."""
    other = rebuilt(job, folder, precision, *arguments, **options)
    loaded, random = other.state(), torch.get_rng_state()
    objects = [*job.parts, job.criterion]
    assert job.booster.switch(PRECISIONS[precision]()) is None
    assert all(one is two for one, two in zip(objects, [*job.parts, job.criterion], strict=True))
    found = differences(job.state(), loaded)
    losses, later = job.steps(3, 6, rank), job.state()
    torch.set_rng_state(random)
    return found + differences((losses, later), (other.steps(3, 6, rank), other.state()), "later")


class AllReduces(TorchDispatchMode):
    """Counts the all-reduces of what runs inside."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += func.overloadpacket.__name__ == "allreduce_"
        return func(*args, **(kwargs or {}))
