"""Feature: two models, two optimizers, one Booster, as in a GAN.

Each boosted optimizer has its own loss scale and skips its own steps.

    python examples/features/gan_two_optimizers.py
    booster run --nproc_per_node 2 examples/features/gan_two_optimizers.py
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

    generator = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 784), nn.Sigmoid())
    discriminator = nn.Sequential(nn.Linear(784, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    criterion = nn.BCEWithLogitsLoss()
    loader = b.plugin.prepare_dataloader(read("train"), batch_size=64, shuffle=True)
    # The feature: boost() once for each pair, and each optimizer has its own loss scale.
    generator, optimizer_g, _, _, _ = b.boost(generator, optimizer_g)
    discriminator, optimizer_d, criterion, loader, _ = b.boost(discriminator, optimizer_d, criterion, loader)

    for epoch in range(2):
        for real, _ in loader:
            fake = generator(torch.randn(len(real), 64, device=b.device))
            answers = discriminator(torch.cat([real, fake.detach()]))
            truth = torch.cat([torch.ones_like(answers[: len(real)]), torch.zeros_like(answers[len(real) :])])
            loss_d = criterion(answers, truth)
            b.backward(loss_d, optimizer_d)
            optimizer_d.step()

            answers = discriminator(fake)
            loss_g = criterion(answers, torch.ones_like(answers))
            b.backward(loss_g, optimizer_g)
            optimizer_g.step()

            optimizer_g.zero_grad()
            optimizer_d.zero_grad()  # the generator's loss went through the discriminator too
        DistCoordinator().print_on_master(
            f"epoch {epoch}: discriminator {loss_d.item():.3f} (scale {optimizer_d.loss_scale:g}, skipped "
            f"{optimizer_d.num_skipped}), generator {loss_g.item():.3f} (scale {optimizer_g.loss_scale:g}, skipped "
            f"{optimizer_g.num_skipped})"
        )
    DistCoordinator().destroy()


if __name__ == "__main__":
    main()
