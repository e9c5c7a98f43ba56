"""A training run with everything that a checkpoint keeps, on any precision and layout, and what of it is compared."""

import random

import numpy as np
import torch
from comparing import whole
from matrix import BLOCKS, LOW, MAX_NORM, PARALLELISMS, SCALE, VOCABULARY, Transformer, loss_of, poison_next_backward
from matrix import PRECISIONS as OF_MATRIX
from torch import nn
from torch.utils.data import TensorDataset

from booster import Booster
from booster.common.snapshot import random_state
from booster.mixed_precision import FP16ApexMixedPrecision, FP16NaiveMixedPrecision, FP16TorchMixedPrecision

SAMPLES, LENGTH, BATCH = 40, 8, 8  # five global batches an epoch
GROWTH = 3  # steps after which a loss scale grows, so that its counters show within a run


def _apex(opt_level):
    return lambda: FP16ApexMixedPrecision(opt_level, max_loss_scale=SCALE, scale_window=GROWTH, verbosity=0)


# Those of the matrix, with loss scales that move; but the low ones, which need wider layers. Two forgive the first overflow.
PRECISIONS = {
    **{name: make for name, make in OF_MATRIX.items() if name not in LOW},
    "fp16": lambda: FP16TorchMixedPrecision(init_scale=SCALE, growth_interval=GROWTH, hysteresis=2),
    "fp16_apex O1": _apex("O1"),
    "fp16_apex O2": _apex("O2"),
    "fp16_naive": lambda: FP16NaiveMixedPrecision(initial_scale=SCALE, growth_interval=GROWTH, hysteresis=2),
}


class Run:
    """A boosted job on this rank. layout: a name of the matrix, or a Parallelism. dropout: whether there is any, which
    layouts of other ranks draw differently. num_blocks: at least one for each stage. `batches`: the tokens of every batch
    that was trained on."""

    def __init__(
        self, precision, layout, *, seed=7, dropout=False, optimizer=torch.optim.AdamW, workers=0, num_blocks=BLOCKS
    ):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        model = Transformer(num_blocks=num_blocks)
        if dropout:
            model.norm.register_forward_hook(lambda module, args, out: nn.functional.dropout(out, 0.1, module.training))
        layout = PARALLELISMS[layout] if isinstance(layout, str) else layout
        self.booster = Booster("cpu", PRECISIONS[precision](), layout.plugin(), skip_nonfinite=True)
        made = optimizer(model.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.StepLR(made, 3, gamma=0.9)
        tokens = torch.randint(VOCABULARY, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(3))
        dataset = TensorDataset(tokens[:, :-1], (tokens[:, :-1] * 3 + 1) % VOCABULARY)
        share = BATCH // self.booster.plugin.data_parallel_size
        loader = self.booster.prepare_dataloader(dataset, share, shuffle=True, drop_last=True, num_workers=workers)
        self.parts = self.booster.boost(model, made, loss_of, loader, schedule)
        self.batches = []
        self._batches = self._forever()

    def _forever(self):
        while True:
            for tokens, targets in self.parts[3]:
                self.batches.append(tokens.tolist())
                yield tokens, targets

    def train(self, steps, overflow_at=()):
        """Take `steps` steps; returns for each the mean loss over all ranks, the learning rate, the scale that it ended
        with, whether it was applied, and a draw of every random number generator."""
        model, optimizer, criterion, _, schedule = self.parts
        trace = []
        for step in range(steps):
            if step in overflow_at:
                poison_next_backward(optimizer, random.Random(step))
            result = self.booster.execute_pipeline(self._batches, model, criterion, optimizer)
            loss = float(self.booster.reduce(result["loss"]))
            optimizer.clip_grad_by_norm(MAX_NORM)
            applied = optimizer.step().applied
            rate = schedule.get_last_lr()
            schedule.step()
            optimizer.zero_grad()
            draws = (random.random(), float(torch.rand(())), float(np.random.rand()))
            trace.append((loss, rate, optimizer.loss_scale, applied, draws))
        return trace

    def pass_without_step(self):
        """Forward and backward of one batch; its gradients are dropped."""
        model, optimizer, criterion, *_ = self.parts
        self.booster.execute_pipeline(self._batches, model, criterion, optimizer)
        optimizer.zero_grad()

    def losses(self, steps):
        return [loss for loss, *_ in self.train(steps)]

    def save(self, folder, **options):
        return self.booster.save(folder, *self.parts, **options)

    def load(self, folder, **options):
        loaded = self.booster.load(folder, *self.parts, **options)
        self._batches = self._forever()  # an iterator from before a load stays in the epoch that it began
        return loaded

    def state(self):
        """All that this rank holds of the run, as it holds it: path -> value, tensors of this rank alone."""
        model, optimizer, _, loader, schedule = self.parts
        state = {
            "model": dict(model.state_dict()),
            "optimizer": optimizer.state_dict(),
            "counts": (optimizer.loss_scale, optimizer.num_applied, optimizer.num_skipped),
            "loader": loader.state_dict(),
            "schedule": schedule.state_dict(),
            "random": random_state(),
        }
        return dict(_leaves(state, ""))

    def wide(self):
        """The numbers that this rank trains, whole and in float32: masters where there are any, and each state."""
        model, optimizer, *_ = self.parts
        kept = optimizer.state_dict()
        masters = kept["booster"].get("masters", {}).get("weights", {})
        found = {name: whole(masters.get(name, param)).float() for name, param in model.named_parameters()}
        names = [name for group in optimizer.parameter_names() for name, _ in group]
        numbers = [number for group in kept["param_groups"] for number in group["params"]]
        for number, name in zip(numbers, names, strict=True):
            for key, value in kept["state"].get(number, {}).items():
                found[f"{name} {key}"] = whole(value).float()
        return found


def differing(one, other):
    """The keys of two dicts with tensors or values that are not the same to the bit."""
    keys = one.keys() ^ other.keys()
    return sorted(keys | {key for key in one.keys() & other.keys() if not _same(one[key], other[key])})


def _same(one, other):
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and one == other


def _leaves(value, path):
    if isinstance(value, dict):
        for key, entry in value.items():
            yield from _leaves(entry, f"{path}/{key}")
    elif isinstance(value, (list, tuple)):
        for index, entry in enumerate(value):
            yield from _leaves(entry, f"{path}/{index}")
    elif isinstance(value, torch.Tensor):
        local = value.detach()
        yield path, (local.to_local() if hasattr(local, "to_local") else local).clone()
    else:
        yield path, value
