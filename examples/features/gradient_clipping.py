"""Feature: clip the gradients by their norm, under a loss scaler too.

The limit is for the true gradients: the loss scale is taken out without another pass over them. The norm that comes back
is the one before clipping. Not finite, under fp16 an ordinary event, it makes the step a skip.

    python examples/features/gradient_clipping.py
    booster run --nproc_per_node 2 examples/features/gradient_clipping.py
"""

import torch
from fashion import read
from torch import nn

import booster
from booster import Booster, DistCoordinator
from booster.plugin import TorchDDPPlugin


def main() -> None:
    booster.launch_from_torch()
    b = Booster(mixed_precision="fp16", plugin=TorchDDPPlugin())

    model = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()
    loader = b.plugin.prepare_dataloader(read("train"), batch_size=64, shuffle=True)
    model, optimizer, criterion, loader, _ = b.boost(model, optimizer, criterion, loader)

    for epoch in range(2):
        for images, labels in loader:
            loss = criterion(model(images), labels)
            b.backward(loss, optimizer)
            # The feature: the norm of the true gradients, limited to 1.
            norm = optimizer.clip_grad_by_norm(1.0)
            optimizer.step()
            optimizer.zero_grad()
        DistCoordinator().print_on_master(f"epoch {epoch}: loss {loss.item():.3f}, gradient norm {norm.item():.3f}")

    test_loader = b.prepare_dataloader(read("t10k"), batch_size=256)
    with torch.no_grad():
        right = torch.cat([model(images).argmax(-1) == labels for images, labels in test_loader])
    accuracy = b.gather(right, test_loader).float().mean().item()
    DistCoordinator().print_on_master(f"test accuracy {accuracy:.1%}")
    DistCoordinator().destroy()


if __name__ == "__main__":
    main()
