"""Feature: a run that begins in a low precision and ends in a wide one, by itself.

python examples/features/precision_schedule.py
booster run --nproc_per_node 2 examples/features/precision_schedule.py
"""

import torch
from fashion import read
from torch import nn

import booster
from booster import Booster, DistCoordinator
from booster.mixed_precision import FP8MixedPrecision, PrecisionSchedule
from booster.plugin import TorchDDPPlugin

EPOCHS = 2


def main() -> None:
    booster.launch_from_torch()

    # The feature: fp8 for nine tenths of the steps, emulated where no hardware has it; then bfloat16.
    steps = EPOCHS * (60_000 // (64 * DistCoordinator().world_size))
    schedule = PrecisionSchedule({0: FP8MixedPrecision(emulate="auto", convert="all"), 0.9: "bf16"}, total_steps=steps)
    b = Booster(mixed_precision=schedule, plugin=TorchDDPPlugin())

    model = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()
    loader = b.plugin.prepare_dataloader(read("train"), batch_size=64, shuffle=True)
    model, optimizer, criterion, loader, _ = b.boost(model, optimizer, criterion, loader)

    for epoch in range(EPOCHS):
        for images, labels in loader:
            loss = criterion(model(images), labels)
            b.backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        DistCoordinator().print_on_master(f"epoch {epoch}: loss {loss.item():.3f}, in {type(b.precision).__name__}")

    test_loader = b.prepare_dataloader(read("t10k"), batch_size=256)
    with torch.no_grad():
        right = torch.cat([model(images).argmax(-1) == labels for images, labels in test_loader])
    accuracy = b.gather(right, test_loader).float().mean().item()
    DistCoordinator().print_on_master(f"test accuracy {accuracy:.1%}")
    DistCoordinator().destroy()


if __name__ == "__main__":
    main()
