"""Feature: a precision of your own, registered under a name.

This one is bfloat16 with criterion and outputs that stay in bfloat16, with gradients that are not finite treated as with a
loss scaler. Override what differs; `MixedPrecision` itself is float32.

    python examples/features/custom_strategy.py
    booster run --nproc_per_node 2 examples/features/custom_strategy.py
"""

import torch
from fashion import read
from torch import nn

import booster
from booster import Booster, DistCoordinator
from booster.mixed_precision import DtypePolicy, DynamicScale, MixedPrecision, register
from booster.plugin import TorchDDPPlugin


# The feature: a strategy of one's own,
class StaticScale(MixedPrecision):
    """float16 under a loss scale that never moves; a step that overflows is still skipped."""

    policy = DtypePolicy(compute=torch.float16, output=torch.float32)

    def make_scaler(self) -> DynamicScale:
        return DynamicScale(init_scale=1024, min_scale=1024, max_scale=1024)


def main() -> None:
    # registered under a name.
    register("fp16_static", StaticScale)
    booster.launch_from_torch()
    b = Booster(mixed_precision="fp16_static", plugin=TorchDDPPlugin())

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
        DistCoordinator().print_on_master(f"epoch {epoch}: loss {loss.item():.3f}, loss scale {optimizer.loss_scale:g}")

    test_loader = b.prepare_dataloader(read("t10k"), batch_size=256)
    with torch.no_grad():
        right = torch.cat([model(images).argmax(-1) == labels for images, labels in test_loader])
    accuracy = b.gather(right, test_loader).float().mean().item()
    DistCoordinator().print_on_master(f"test accuracy {accuracy:.1%}")
    DistCoordinator().destroy()


if __name__ == "__main__":
    main()
