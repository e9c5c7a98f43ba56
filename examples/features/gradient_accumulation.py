"""Feature: sum the gradients of four small batches before each step, as if they were one large batch.

The last group of an epoch may be shorter; `accumulate` gets its real length, so that its gradients are a mean too.
Among processes gradients are exchanged once per group, not once per batch.

    python examples/features/gradient_accumulation.py
    booster run --nproc_per_node 2 examples/features/gradient_accumulation.py
"""

from collections.abc import Iterable, Iterator
from itertools import islice

import torch
from fashion import read
from torch import nn

import booster
from booster import Booster, DistCoordinator
from booster.plugin import TorchDDPPlugin


def groups(loader: Iterable, size: int) -> Iterator[list]:
    batches = iter(loader)
    while group := list(islice(batches, size)):
        yield group


def main() -> None:
    booster.launch_from_torch()
    b = Booster(mixed_precision="bf16", plugin=TorchDDPPlugin())

    model = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()
    loader = b.plugin.prepare_dataloader(read("train"), batch_size=16, shuffle=True)
    model, optimizer, criterion, loader, _ = b.boost(model, optimizer, criterion, loader)

    for epoch in range(2):
        for group in groups(loader, size=4):
            # The feature: gradients of a group of micro-batches are added up, and synchronised once.
            with b.accumulate(model, optimizer, num_micro_batches=len(group)):
                for images, labels in group:
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
