"""Feature: write a run down, and send its numbers to a tracker while it goes on.

The record in `runs/trackers` is read by `booster report runs/trackers`. A tracker gets the numbers of every step by name:
a CSV file here, TensorBoard or Weights & Biases (offline) where they are installed and asked for.

    python examples/features/trackers.py
    python examples/features/trackers.py tensorboard     # pip install tensorboard
    python examples/features/trackers.py wandb           # pip install wandb
"""

import csv
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from fashion import read
from torch import nn

import booster
from booster import Booster, DistCoordinator
from booster.plugin import TorchDDPPlugin

FOLDER = Path("runs/trackers")


def to_csv() -> Callable[[dict[str, float], int], None]:
    def write(values: dict[str, float], step: int) -> None:
        with open(FOLDER / "steps.csv", "a", newline="") as file:
            csv.writer(file).writerows((step, name, value) for name, value in values.items())

    return write


def to_tensorboard() -> Callable[[dict[str, float], int], None]:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(FOLDER / "tensorboard")

    def write(values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return write


def to_wandb() -> Callable[[dict[str, float], int], None]:
    import wandb

    return wandb.init(project="trackers", mode="offline", dir=FOLDER).log


TRACKERS = {"csv": to_csv, "tensorboard": to_tensorboard, "wandb": to_wandb}


def main() -> None:
    booster.launch_from_torch()
    b = Booster(mixed_precision="fp16", plugin=TorchDDPPlugin())

    model = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()
    loader = b.plugin.prepare_dataloader(read("train"), batch_size=64, shuffle=True)
    model, optimizer, criterion, loader, _ = b.boost(model, optimizer, criterion, loader)

    # The feature: every rank records, and the first one sends its numbers on.
    FOLDER.mkdir(parents=True, exist_ok=True)
    tracker = TRACKERS[sys.argv[1] if len(sys.argv) > 1 else "csv"]() if DistCoordinator().is_master() else None
    b.record(FOLDER, tracker=tracker)

    for epoch in range(2):
        for images, labels in loader:
            loss = criterion(model(images), labels)
            b.backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        DistCoordinator().print_on_master(f"epoch {epoch}: loss {loss.item():.3f}")

    test_loader = b.prepare_dataloader(read("t10k"), batch_size=256)
    with torch.no_grad():
        right = torch.cat([model(images).argmax(-1) == labels for images, labels in test_loader])
    accuracy = b.gather(right, test_loader).float().mean().item()
    DistCoordinator().print_on_master(f"test accuracy {accuracy:.1%}")
    DistCoordinator().destroy()


if __name__ == "__main__":
    main()
