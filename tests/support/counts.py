"""Counting calls: of a step, and for what is to grow as the number of tensors."""

import contextvars
import gc
import sys
from pathlib import Path

import torch
from torch import nn

import booster
from booster import Booster
from booster.common.torch_internals.tensor_internals import TorchDispatchMode

FEW, MANY = 40, 160
MOST = 1.15 * MANY / FEW  # times as many calls


ROOT = str(Path(booster.__file__).parent)


def calls(function):
    """(calls, files, depth) of functions of this library while `function` runs, as if nothing else ran in this thread before:
    where a product ran in a checkpoint, backward passes enter what recomputes it alike."""
    files, depth, deepest, count = set(), 0, 0, 0

    def look(frame, event, arg):
        nonlocal depth, deepest, count
        name = frame.f_code.co_filename
        if not name.startswith(ROOT):
            return
        if event == "call":
            files.add(name)
            count += 1
            depth += 1
            deepest = max(deepest, depth)
        elif event == "return":
            depth -= 1

    before = sys.getprofile()
    gc.disable()  # what it calls is not the function's
    sys.setprofile(look)
    try:
        contextvars.Context().run(function)
    finally:
        sys.setprofile(before)
        gc.enable()
    return count, len(files), deepest


def whole(precision, make=torch.optim.AdamW, depth=1, norms=False, rows=8, **options):
    """Calls and files of a fifth step: forward, criterion, backward, clip, step, zero_grad.

    depth: of the model, in pairs of layers. norms: whether each has a norm, after an embedding. options: of `Booster`.
    """
    if "torch._dynamo" in sys.modules:  # a process that compiled something looks for more
        torch._dynamo.reset()
    torch.manual_seed(0)
    pair = (
        (lambda: (nn.Linear(16, 16), nn.LayerNorm(16), nn.ReLU())) if norms else lambda: (nn.Linear(16, 16), nn.ReLU())
    )
    first = [nn.Embedding(32, 16)] if norms else []
    layers = nn.Sequential(*first, *(layer for _ in range(depth) for layer in pair()), nn.Linear(16, 4))
    options = {"half_products": "native", **options}
    b = Booster("cpu", precision() if callable(precision) else precision, **options)
    model, optimizer, criterion, *_ = b.boost(layers, make(layers.parameters(), 1e-3), nn.CrossEntropyLoss())
    x = torch.randint(0, 32, (rows,)) if norms else torch.randn(rows, 16)
    y = torch.randint(0, 4, (rows,))

    def step():
        b.backward(criterion(model(x), y), optimizer)
        optimizer.clip_grad_by_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(4):
        step()
    return calls(step)[:2]


def count(function, inside=""):
    """Calls of Python and C functions while `function` runs; a generator counts as often as it goes on.

    inside: the folder or file with the functions that count, and what of C they call.
    """
    calls = 0

    def look(frame, event, arg):
        nonlocal calls
        calls += event in ("call", "c_call") and frame.f_code.co_filename.startswith(inside)

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        function()
    finally:
        sys.setprofile(before)
    return calls


class Messages(TorchDispatchMode):
    """Counts what is handed to process groups while it is active."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.overloadpacket.__name__
        return func(*args, **(kwargs or {}))
