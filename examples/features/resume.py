"""Feature: save, start again and go on as if nothing had happened, to the bit.

One call saves weights, optimizer, loss scale, schedule, random states and the position in the data; one resumes them.

    python examples/features/resume.py
    booster run --nproc_per_node 2 examples/features/resume.py
"""

from pathlib import Path

import torch
from fashion import read
from torch import nn

import booster
from booster import Booster, DistCoordinator
from booster.mixed_precision import FP16TorchMixedPrecision
from booster.nn.lr_scheduler import CosineAnnealingLR
from booster.plugin import TorchDDPPlugin

CHECKPOINTS = Path("runs/resume")


def start(b: Booster) -> tuple:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()
    loader = b.plugin.prepare_dataloader(read("train"), batch_size=64, shuffle=True)
    lr_scheduler = CosineAnnealingLR(optimizer, total_steps=2 * len(loader))
    return b.boost(model, optimizer, criterion, loader, lr_scheduler)


def train_one_epoch(b: Booster, model, optimizer, criterion, loader, lr_scheduler) -> None:
    for images, labels in loader:
        loss = criterion(model(images), labels)
        b.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        lr_scheduler.step()
    DistCoordinator().print_on_master(
        f"epoch {loader.epoch - 1}: loss {loss.item():.6f}, scale {optimizer.loss_scale:g}"
    )


def main() -> None:
    booster.launch_from_torch()
    precision = FP16TorchMixedPrecision(growth_interval=100)  # so that the scale moves within an epoch
    b = Booster(mixed_precision=precision, plugin=TorchDDPPlugin())

    without_a_break = start(b)
    train_one_epoch(b, *without_a_break)
    train_one_epoch(b, *without_a_break)

    # The feature: the same in two halves.
    first_half = start(b)
    train_one_epoch(b, *first_half)
    b.save(CHECKPOINTS, *first_half, extra={"note": "after one epoch"})

    second_half = start(b)
    loaded = b.load(CHECKPOINTS, *second_half)
    DistCoordinator().print_on_master(f"resumed from {loaded.path}: {loaded.extra['note']}")
    train_one_epoch(b, *second_half)

    pairs = zip(second_half[0].parameters(), without_a_break[0].parameters(), strict=True)
    same = all(torch.equal(resumed, straight) for resumed, straight in pairs)
    DistCoordinator().print_on_master(f"resumed run equals the one without a break, to the bit: {same}")
    DistCoordinator().destroy()


if __name__ == "__main__":
    main()
