"""Feature: evaluate on all processes, on every test image exactly once.

The sampler repeats images to divide the set evenly. `gather` with the loader drops these again and puts the rows into the
order of the data set; `reduce` is for numbers.

    python examples/features/evaluation.py
    booster run --nproc_per_node 2 examples/features/evaluation.py
"""

import torch
from fashion import read
from torch import nn
from torch.utils.data import Subset

import booster
from booster import Booster, DistCoordinator
from booster.plugin import TorchDDPPlugin


def main() -> None:
    booster.launch_from_torch()
    b = Booster(mixed_precision="bf16", plugin=TorchDDPPlugin())

    model = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()
    loader = b.plugin.prepare_dataloader(read("train"), batch_size=64, shuffle=True)
    model, optimizer, criterion, loader, _ = b.boost(model, optimizer, criterion, loader)

    for epoch in range(2):
        for images, labels in loader:
            loss = criterion(model(images), labels)
            b.backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        DistCoordinator().print_on_master(f"epoch {epoch}: loss {loss.item():.3f}")

    # The feature: gather() and reduce() over all processes.
    # 3,999 images do not divide among two processes: the sampler repeats one.
    test_set = Subset(read("t10k"), range(3999))
    test_loader = b.prepare_dataloader(test_set, batch_size=256)
    outputs, targets, total_loss = [], [], 0.0
    with torch.no_grad():
        for images, labels in test_loader:
            outputs.append(model(images))
            targets.append(labels)
            total_loss += criterion(outputs[-1], labels).item()
    loss = b.reduce(total_loss / len(test_loader), "mean")
    predictions = b.gather(torch.cat(outputs).argmax(-1), test_loader)
    labels = b.gather(torch.cat(targets), test_loader)
    right = [(predictions[labels == label] == label).float().mean().item() for label in range(10)]
    print_on_master = DistCoordinator().print_on_master
    print_on_master(
        f"{len(predictions)} images, loss {loss:.3f}, accuracy {(predictions == labels).float().mean():.1%}"
    )
    print_on_master("right in each class: " + "  ".join(f"{share:.0%}" for share in right))
    DistCoordinator().destroy()


if __name__ == "__main__":
    main()
