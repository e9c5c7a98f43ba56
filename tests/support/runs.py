"""A training run with everything that a checkpoint keeps, on any precision and parallelism of the matrix."""

import random

import torch
from matrix import MAX_NORM, PARALLELISMS, PRECISIONS, VOCABULARY, Transformer, loss_of, poison_next_backward
from torch import nn
from torch.utils.data import TensorDataset

from booster import Booster

SAMPLES, LENGTH, BATCH = 56, 8, 8  # seven global batches an epoch


class Run:
    """A boosted job on this rank. dropout: whether there is any, which layouts of other ranks draw differently."""

    def __init__(self, precision, parallelism, *, seed=7, dropout=False, optimizer=torch.optim.AdamW, workers=0):
        torch.manual_seed(seed)
        model = Transformer()
        if dropout:
            model.norm.register_forward_hook(lambda module, args, out: nn.functional.dropout(out, 0.1, module.training))
        self.booster = Booster("cpu", PRECISIONS[precision](), PARALLELISMS[parallelism].plugin(), skip_nonfinite=True)
        made = optimizer(model.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.StepLR(made, 3, gamma=0.9)
        tokens = torch.randint(VOCABULARY, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(3))
        dataset = TensorDataset(tokens[:, :-1], (tokens[:, :-1] * 3 + 1) % VOCABULARY)
        share = BATCH // self.booster.plugin.data_parallel_size
        loader = self.booster.prepare_dataloader(dataset, share, shuffle=True, drop_last=True, num_workers=workers)
        self.parts = self.booster.boost(model, made, loss_of, loader, schedule)
        self.batches = self._batches()

    def _batches(self):
        while True:
            yield from self.parts[3]

    def train(self, steps, overflow_at=()):
        """Take `steps` steps; returns the mean losses over all ranks."""
        model, optimizer, criterion, _, schedule = self.parts
        losses = []
        for step in range(steps):
            if step in overflow_at:
                poison_next_backward(optimizer, random.Random(step))
            result = self.booster.execute_pipeline(self.batches, model, criterion, optimizer)
            losses.append(float(self.booster.reduce(result["loss"])))
            optimizer.clip_grad_by_norm(MAX_NORM)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        return losses

    def save(self, folder, **options):
        return self.booster.save(folder, *self.parts, **options)

    def load(self, folder, **options):
        return self.booster.load(folder, *self.parts, **options)

    def weights(self):
        """This rank's weights, whole."""
        return {
            name: (param.detach().full_tensor() if hasattr(param, "full_tensor") else param.detach()).clone()
            for name, param in self.parts[0].named_parameters()
        }
