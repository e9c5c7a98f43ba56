"""The matrix's job by hand: plain torch in one process, nothing of booster in it."""

from contextlib import nullcontext

import low_reference
import torch
from matrix import (
    BATCH,
    DOUBLES,
    LENGTH,
    MAX_NORM,
    OPTIMIZERS,
    OVERFLOWS,
    SCALE,
    STEPS,
    VOCABULARY,
    Trace,
    loss_of,
    make_model,
)

HALF = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp16_naive": torch.float16, "bf16_naive": torch.bfloat16}
HALF |= {name: torch.bfloat16 for name in low_reference.RECIPES if name != "tf32"}


def train_by_hand(precision, optimizer="AdamW", steps=STEPS, overflows=OVERFLOWS, num_splits=1):
    """The trace of a hand-written loop: autocast and a halving loss scale, or float32 masters of half weights.

    In 4 to 8 bits all linear layers but the first and the last are by hand too (`low_reference`), under autocast to bfloat16;
    in tf32 all of them are, and attention is in float32.

    num_splits: gradients are averaged over so many parts of a batch, rounded to the parameters' dtype as ranks do.
    """
    model = make_model(precision)
    naive = precision.endswith("_naive")
    masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    linears = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    wide = [] if precision == "tf32" else [linears[0], linears[-1]]
    for name in linears if precision in low_reference.RECIPES else ():
        if name in wide:
            continue
        model.set_submodule(name, low_reference.LowLinear(model.get_submodule(name), precision))
    if naive:
        model.to(HALF[precision])
    made = OPTIMIZERS[optimizer](masters if naive else model.parameters())
    params = [p for group in made.param_groups for p in group["params"]]
    scale = SCALE if precision.startswith("fp16") else 1.0
    data = torch.Generator().manual_seed(3)
    trace = Trace()
    for step in range(steps):
        loss = 0.0
        batches = []
        for _ in range(2 if step in DOUBLES else 1):
            tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=data)
            inputs, targets = tokens[:, :-1], (tokens[:, :-1] * 3 + 1) % VOCABULARY
            batches += zip(inputs.chunk(num_splits), targets.chunk(num_splits), strict=True)
        for x, y in batches:
            autocast = precision in HALF and not naive
            with torch.autocast("cpu", HALF[precision]) if autocast else nullcontext():
                output = model(x)
            part = loss_of(output.float(), y)
            (part * scale / num_splits).backward()
            loss += float(part.detach()) / num_splits
        for master, param in zip(masters, model.parameters(), strict=True):
            if naive:
                master.grad = param.grad.float()
        for param in params:
            param.grad /= scale
        trace.losses.append(loss)
        trace.norms.append(float(torch.nn.utils.clip_grad_norm_(params, MAX_NORM)))
        trace.applied.append(step not in overflows)
        if step not in overflows:
            made.step()
        elif precision.startswith("fp16"):
            scale /= 2
        trace.scales.append(scale)
        with torch.no_grad():
            for master, param in zip(masters, model.parameters(), strict=True):
                if naive:
                    param.copy_(master)
        model.zero_grad()
        made.zero_grad()
    trace.weights = {name: param.detach().float() for name, param in model.named_parameters()}
    return trace
