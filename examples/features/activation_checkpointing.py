"""Feature: trade time for memory by computing activations a second time in backward.

The second forward runs in backward, under the same precision as the first: same dtypes, same gradients.

    python examples/features/activation_checkpointing.py
    booster run --nproc_per_node 2 examples/features/activation_checkpointing.py
"""

import torch
from fashion import read
from torch import nn
from torch.utils.checkpoint import checkpoint

import booster
from booster import Booster, DistCoordinator
from booster.plugin import TorchDDPPlugin


# The feature: a container that recomputes.
class Checkpointed(nn.Sequential):
    """Keeps only the inputs of its children until backward, which runs each child again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for child in self:
            x = checkpoint(child, x, use_reentrant=False)
        return x


def main() -> None:
    booster.launch_from_torch()
    b = Booster(mixed_precision="bf16", plugin=TorchDDPPlugin())

    # The feature: three blocks in it.
    blocks = [nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(3)]
    model = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), Checkpointed(*blocks), nn.Linear(256, 10))
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

    test_loader = b.prepare_dataloader(read("t10k"), batch_size=256)
    with torch.no_grad():
        right = torch.cat([model(images).argmax(-1) == labels for images, labels in test_loader])
    accuracy = b.gather(right, test_loader).float().mean().item()
    DistCoordinator().print_on_master(f"test accuracy {accuracy:.1%}")
    DistCoordinator().destroy()


if __name__ == "__main__":
    main()
