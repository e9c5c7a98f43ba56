"""Random programs on sequences that ranks share: any model, mask, documents, lengths and labels train as on one device."""

import random

import pytest
import torch
from sequences import HEADS, VOCABULARY, Decoder, loss_on, plugin_for

from booster import Booster

MODES = ["all_to_all", "ring_attn"]
PROGRAMS, TOGETHER = 300, 50


class Program:
    """What the program of `seed` is made of, the same on all ranks."""

    def __init__(self, seed):
        draw = random.Random(seed)
        self.seed = seed
        self.causal = draw.random() < 0.7
        self.kv_heads = draw.choice([1, 2, HEADS])
        self.checkpoints = draw.random() < 0.3
        self.length = draw.randint(8, 40)
        self.batch = draw.randint(1, 3)
        self.window = draw.choice([None, None, draw.randint(1, 12)])
        self.padding = draw.choice([None, None, draw.randint(1, 6)])
        self.bias = draw.random() < 0.2  # a mask of numbers
        self.documents = draw.choice([None, None, draw.randint(1, 4)])
        self.kind = draw.choice(["hybrid", "zero", "fsdp"])
        self.passes = draw.choice([1, 1, 2])
        self.counted = draw.choice([1.0, 0.5, 0.1])

    def batch_of(self, number):
        """Tokens, positions, mask or None, labels, and documents or None."""
        rng = torch.Generator().manual_seed(100 * self.seed + number)
        shape = (self.batch, self.length)
        tokens = torch.randint(VOCABULARY, shape, generator=rng)
        labels = torch.where(torch.rand(shape, generator=rng) < self.counted, tokens * 3 % VOCABULARY, -100)
        labels[0, -1] = 1  # one at least
        positions = torch.arange(self.length).expand(shape)
        documents = None
        if self.documents is not None:
            documents = (torch.rand(shape, generator=rng) < self.documents / self.length).long().cumsum(1)
        mask = None
        if self.window is not None or self.padding is not None or self.bias:
            back = positions[:, :, None] - positions[:, None, :]
            mask = back >= 0 if self.causal else torch.ones_like(back, dtype=torch.bool)
            if self.window is not None:
                mask = mask & (back.abs() <= self.window)
            if self.padding is not None:
                mask = mask & (positions[:, None, :] < self.length - self.padding) | (back == 0)
            mask = mask[:, None]
            if self.bias:
                mask = torch.where(mask, torch.randn(mask.shape, generator=rng), float("-inf"))
        return tokens, positions, mask, labels, documents


def trained(rank, world_size, seed, mode):
    """Losses and norms of two steps."""
    program = Program(seed)
    options = {} if world_size == 1 else {"sp_size": world_size, "sequence_parallelism_mode": mode}
    torch.manual_seed(seed)
    model = Decoder(program.causal, program.kv_heads, checkpoints=program.checkpoints)
    booster = Booster("cpu", plugin=plugin_for(world_size, program.kind, **options))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, *_ = booster.boost(model, optimizer)
    found = []
    for step in range(2):
        for number in range(program.passes):
            tokens, positions, mask, labels, documents = program.batch_of(10 * step + number)
            given = {}
            if documents is not None and world_size == 1:
                apart = documents[:, None, :, None] == documents[:, None, None, :]
                if mask is None:
                    mask = apart & (torch.ones_like(apart).tril() if program.causal else torch.ones_like(apart))
                elif mask.dtype == torch.bool:
                    mask = mask & apart
                else:
                    mask = mask.masked_fill(~apart, float("-inf"))
            elif documents is not None:
                given = {"documents": documents}
            batch = (tokens, positions, labels) if mask is None else (tokens, positions, mask, labels)
            loss = loss_on(booster, model, batch, **given)
            booster.backward(loss, optimizer)
            found.append(float(loss.detach()))
        found.append(float(optimizer.clip_grad_by_norm(1.0)))
        optimizer.step()
        optimizer.zero_grad()
    return found


def several(rank, world_size, seeds, mode):
    return [trained(rank, world_size, seed, mode) for seed in seeds]


def check(run_on_ranks, world_size, seeds, mode):
    for seed, *found in zip(seeds, *run_on_ranks(several, world_size, seeds, mode), strict=True):
        expected = trained(0, 1, seed, None)
        for own in found:
            torch.testing.assert_close(
                own, expected, rtol=0, atol=2e-5, msg=lambda text, seed=seed: f"seed {seed}: {text}"
            )


@pytest.mark.slow_cases("ring_attn")
@pytest.mark.parametrize("mode", MODES)
def test_a_few_random_programs(run_on_ranks, mode):
    check(run_on_ranks, 2, range(6), mode)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, PROGRAMS, TOGETHER))
@pytest.mark.parametrize("mode", MODES)
def test_random_programs(run_on_ranks, mode, first):
    check(run_on_ranks, 4 if first % (2 * TOGETHER) else 2, range(1000 + first, 1000 + first + TOGETHER), mode)
