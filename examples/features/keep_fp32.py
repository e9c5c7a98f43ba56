"""Feature: keep some modules in float32 inside a half-precision model.

`keep_fp32` takes module types, name patterns and predicates `(name, module) -> bool`, alone or in a tuple.

    python examples/features/keep_fp32.py
    booster run --nproc_per_node 2 examples/features/keep_fp32.py
"""

from collections import OrderedDict

import torch
from fashion import read
from torch import nn

import booster
from booster import Booster, DistCoordinator
from booster.mixed_precision import BF16MixedPrecision
from booster.plugin import TorchDDPPlugin


def main() -> None:
    booster.launch_from_torch()
    # The feature: modules that stay in float32, by type or name.
    b = Booster(mixed_precision=BF16MixedPrecision(keep_fp32=(nn.LayerNorm, "head")), plugin=TorchDDPPlugin())

    parts = {"hidden": nn.Linear(784, 256), "norm": nn.LayerNorm(256), "relu": nn.ReLU(), "head": nn.Linear(256, 10)}
    model = nn.Sequential(OrderedDict(parts))
    for name, module in model.named_children():
        module.register_forward_hook(lambda _, inputs, output, name=name: dtypes.update({name: output.dtype}))
    dtypes = {}
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
        DistCoordinator().print_on_master(f"epoch {epoch}: loss {loss.item():.3f}, computed in {dtypes}")

    test_loader = b.prepare_dataloader(read("t10k"), batch_size=256)
    with torch.no_grad():
        right = torch.cat([model(images).argmax(-1) == labels for images, labels in test_loader])
    accuracy = b.gather(right, test_loader).float().mean().item()
    DistCoordinator().print_on_master(f"test accuracy {accuracy:.1%}")
    DistCoordinator().destroy()


if __name__ == "__main__":
    main()
