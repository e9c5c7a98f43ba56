"""Feature: a whole training step as one CUDA graph, where the host's launches are the price, as for this small model.

`capturable` says what in the step would keep a graph from being made of it, and needs no GPU. Without one `capture` runs
the step as it is, and says so in a warning.

    python examples/features/cuda_graph.py
"""

import time

import torch
from fashion import read
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from booster import Booster


def main() -> None:
    b = Booster(mixed_precision="fp16")

    model = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()
    loader = b.plugin.prepare_dataloader(read("train"), batch_size=64, shuffle=True)
    schedule = CosineAnnealingLR(optimizer, 2 * len(loader))
    model, optimizer, criterion, loader, schedule = b.boost(model, optimizer, criterion, loader, schedule)

    # The feature: the step is a function, and the loop calls what `capture` makes of it.
    def train_step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = criterion(model(images), labels)
        b.backward(loss, optimizer)
        optimizer.clip_grad_by_norm(1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        return loss

    example = next(iter(loader))
    print("what would wait:", b.capturable(train_step, *example))
    step = b.capture(train_step, *example)

    for epoch in range(2):
        start = time.perf_counter()
        for images, labels in loader:
            loss = step(images, labels)
        print(f"epoch {epoch}: loss {loss.item():.3f}, {time.perf_counter() - start:.1f} s")

    test_loader = b.prepare_dataloader(read("t10k"), batch_size=256)
    with torch.no_grad():
        right = torch.cat([model(images).argmax(-1) == labels for images, labels in test_loader])
    print(f"test accuracy {right.float().mean().item():.1%}")


if __name__ == "__main__":
    main()
