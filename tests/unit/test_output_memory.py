"""What a boosted model returns is held by the user alone: half outputs go where raw torch lets go of them."""

import gc

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile

from booster import Booster
from booster.mixed_precision import BF16MixedPrecision

TOKENS, WIDTH, VOCABULARY = 256, 16, 1024
UNIT = TOKENS * VOCABULARY * 2  # bytes of the logits in half


class Decoder(nn.Module):
    """Remembers the memory of what it returned, which need not outlive it."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        logits = self.head(self.embedding(tokens))
        self.__dict__["returned"] = logits.dtype, StorageWeakRef(logits.untyped_storage())
        return logits


def tokens():
    return torch.arange(TOKENS) * 3 % VOCABULARY, torch.arange(TOKENS) * 5 % VOCABULARY


def boosted(precision, **options):
    booster, decoder = Booster("cpu", precision, **options), Decoder()
    model, optimizer, criterion, _, _ = booster.boost(
        decoder, torch.optim.SGD(decoder.parameters(), lr=0.1), nn.CrossEntropyLoss()
    )
    return booster, decoder, model, optimizer, criterion


@pytest.mark.parametrize("precision", ["bf16", "fp16", "bf16_naive", "fp16_naive"])
@pytest.mark.parametrize("options", [{}, {"diagnose": "first"}], ids=["", "diagnose"])
def test_half_logits_are_freed_before_the_criterion_is_called(precision, options):
    booster, decoder, model, optimizer, criterion = boosted(precision, **options)
    x, y = tokens()
    gc.disable()
    try:
        for _ in range(2):
            output = model(x)
            dtype, memory = decoder.returned
            assert dtype.itemsize == 2
            assert memory.expired()
            booster.backward(criterion(output, y), optimizer)
            optimizer.step()
            optimizer.zero_grad()
    finally:
        gc.enable()


def highest(step):
    """The most bytes that `step` holds at once, in units of the logits in half, by the allocator's own record."""
    step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as record:
        step()
    held = most = 0
    for event in record.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most / UNIT


def raw(*, named, widened):
    decoder = Decoder()
    x, y = tokens()

    def logits():
        with torch.autocast("cpu", torch.bfloat16):
            out = decoder(x)
        return out.float() if widened else out

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            if named:
                out = logits()
                loss = cross_entropy(out, y)
            else:
                loss = cross_entropy(logits(), y)
        loss.backward()
        decoder.zero_grad()

    return highest(step)


def ours(precision, *, named):
    booster, _, model, optimizer, criterion = boosted(precision)
    x, y = tokens()

    def step():
        if named:
            out = model(x)
            loss = criterion(out, y)
        else:
            loss = criterion(model(x), y)
        booster.backward(loss, optimizer)
        optimizer.zero_grad()

    return highest(step)


def test_a_step_peaks_where_raw_torch_does_and_a_float32_output_that_the_user_keeps_is_the_users():
    passed_on, kept = raw(named=False, widened=False), raw(named=True, widened=False)
    assert ours("bf16", named=False) == pytest.approx(passed_on, abs=0.05)
    assert ours("fp16", named=False) == pytest.approx(passed_on, abs=0.05)
    assert ours(BF16MixedPrecision(output_dtype=None), named=True) == pytest.approx(kept, abs=0.05)
    assert ours("bf16", named=True) == pytest.approx(raw(named=True, widened=True), abs=0.05)
    assert ours("bf16", named=True) == pytest.approx(kept + 1, abs=0.05), (
        "float32 instead of half, in the user's variable"
    )
