"""Random programs that change their precision: each is compared with one in which every switch is a checkpoint loaded anew."""

import random
import tempfile

import torch
from program import Disagreement, Operation, Program
from switching import PRECISIONS, Job, differences
from torch import nn
from torch.nn import functional as F

MAKES = {
    "AdamW": torch.optim.AdamW,
    "SGD": lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9),
    "Adagrad": torch.optim.Adagrad,
    "Adafactor": torch.optim.Adafactor,
}
NORMS = {"batch": nn.BatchNorm1d, "layer": nn.LayerNorm}
DEFAULTS = {"optimizer": "SGD", "norm": "layer", "states": None, "fused_optimizer": True, "clip_grad_norm": 0.0}


def draw(seed: int, length: int = 10) -> Program:
    """Return a random program."""
    chance = random.Random(seed)
    setting = {
        "precision": chance.choice(list(PRECISIONS)),
        "optimizer": chance.choice(list(MAKES)),
        "norm": chance.choice(list(NORMS)),
        "states": chance.choice([None, None, "8bit"]),
        "fused_optimizer": chance.random() < 0.7,
        "clip_grad_norm": chance.choice([0.0, 0.5]),
    }
    if setting["optimizer"] == "Adafactor":
        setting["states"] = None
    kinds = ["step", "step", "skip", "accumulate", "switch", "switch", "checkpoint"]
    operations: list[Operation] = [("step", 0)]
    for place in range(1, length):
        kind = chance.choice(kinds)
        if kind == "switch":
            operations.append((kind, chance.choice(list(PRECISIONS))))
        elif kind == "accumulate":
            operations.append((kind, place, chance.choice([2, 3])))
        elif kind == "checkpoint":
            operations.append((kind,))
        else:
            operations.append((kind, place))
    return Program("switches", setting, [*operations, ("step", length)])


def run(program: Program) -> None:
    """Run `program`, switching, and once more by checkpoints; raises Disagreement where they differ in any bit."""
    setting = {**DEFAULTS, **program.setting}
    results = []
    for live in (True, False):
        torch.manual_seed(0)
        results.append(_Run(setting, live=live).all(program.operations))
    for place, (one, two) in enumerate(zip(*results, strict=True)):
        if found := differences(one, two):
            raise Disagreement(f"after operation {place}, {program.operations[place]}: {found[:3]}")


class _Run:
    """live: switches are made in the run; otherwise it is saved, built anew in the other precision, and loaded."""

    def __init__(self, setting, *, live):
        self._live, self._setting, self._precision = live, setting, setting["precision"]
        self._job = self._built()

    def _built(self):
        setting = self._setting
        return Job(
            self._precision,
            make=MAKES[setting["optimizer"]],
            norm=NORMS[setting["norm"]],
            states=setting["states"],
            fused_optimizer=setting["fused_optimizer"],
            clip_grad_norm=setting["clip_grad_norm"],
            skip_nonfinite=True,
            max_consecutive_skips=None,
        )

    def all(self, operations):
        """Return what is to be compared, after each operation."""
        return [(getattr(self, name)(*arguments), self._job.state()) for name, *arguments in operations]

    def _backward(self, seed, factor=1.0):
        job = self._job
        generator = torch.Generator().manual_seed(seed)
        x, y = torch.randn(16, 32, generator=generator), torch.randint(0, 4, (16,), generator=generator)
        loss = job.criterion(job.model(F.dropout(x, 0.1)), y) * factor
        job.booster.backward(loss, job.optimizer)
        return loss.item()

    def _step(self):
        job = self._job
        job.optimizer.step()
        job.optimizer.zero_grad()
        job.schedule.step()

    def step(self, seed):
        loss = self._backward(seed)
        self._step()
        return loss

    def skip(self, seed):
        self._backward(seed, float("inf"))
        self._step()

    def accumulate(self, seed, count):
        with self._job.booster.accumulate(self._job.model, self._job.optimizer, count):
            losses = [self._backward(100 * seed + each) for each in range(count)]
        self._step()
        return losses

    def checkpoint(self):
        self._move()

    def switch(self, precision):
        self._precision = precision
        if self._live:
            self._job.booster.switch(PRECISIONS[precision]())
        else:
            self._move()

    def _move(self):
        with tempfile.TemporaryDirectory() as folder:
            self._job.booster.save(folder, *self._job.parts)
            random_state = torch.get_rng_state()
            self._job = self._built()
            torch.set_rng_state(random_state)
            self._job.booster.load(folder, *self._job.parts)
