"""timm: its models, optimizers and schedules; Mixup, an exponential average of the weights, and adaptive clipping.

    pip install timm
    python examples/integrations/timm_recipe.py

Adaptive clipping reads gradients, so they are unscaled first; the average is taken of the weights that train.
"""

import sys

import timm
import torch
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3, adaptive_clip_grad

import booster

STEPS = 40


def main(precision: str = "bf16") -> None:
    booster.seed_everything(0)  # Mixup draws from numpy
    labels = torch.arange(32) % 4
    images = torch.randn(32, 3, 32, 32) * 0.3 + labels.view(-1, 1, 1, 1)  # a class is a brightness
    mixup = Mixup(mixup_alpha=0.2, cutmix_alpha=0.0, num_classes=4, label_smoothing=0.1)
    model = timm.create_model("test_resnet", num_classes=4)
    optimizer = create_optimizer_v2(model, opt="lamb", lr=1e-2, weight_decay=0.01)
    schedule = CosineLRScheduler(optimizer, t_initial=STEPS, warmup_t=2)

    b = booster.Booster(mixed_precision=precision)
    average = ModelEmaV3(model, decay=0.8)  # before boost: a copy of float32 weights
    model, optimizer, criterion, _, _ = b.boost(model, optimizer, SoftTargetCrossEntropy())
    losses = []
    for step in range(STEPS):
        x, y = mixup(images.clone(), labels)  # it writes into what it is given
        loss = criterion(model(x), y)
        b.backward(loss, optimizer)
        optimizer.unscale_grads()
        adaptive_clip_grad(model.parameters(), clip_factor=0.05)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step(step)  # timm's schedules write into the groups, which are those of the boosted optimizer
        average.update(b.unwrap(model), step=step)
        losses.append(loss.item())
    b.print(f"timm: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    average.module.eval()
    with torch.no_grad():
        right = (average.module(images).argmax(1) == labels).float().mean().item()
    b.print(f"accuracy of the average: {right:.2f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
