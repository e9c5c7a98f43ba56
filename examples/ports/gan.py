"""A GAN in the manner of PyTorch's DCGAN example, in plain torch and boosted in fp32: all losses are equal, to the bit.

python examples/ports/gan.py
"""

import torch
from torch import nn

from booster import Booster

BATCH, LATENT = 8, 16


def make_generator():
    return nn.Sequential(
        nn.ConvTranspose2d(LATENT, 16, 4, 1, 0, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(True),
        nn.ConvTranspose2d(16, 1, 4, 2, 1, bias=False),
        nn.Tanh(),
    )


def make_discriminator():
    return nn.Sequential(
        nn.Conv2d(1, 16, 4, 2, 1, bias=False),
        nn.BatchNorm2d(16),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(16, 1, 4, 1, 0, bias=False),
        nn.Sigmoid(),
        nn.Flatten(0),
    )


images = torch.rand(6, BATCH, 1, 8, 8) * 2 - 1
ones, zeros = torch.ones(BATCH), torch.zeros(BATCH)

torch.manual_seed(0)
generator, discriminator, criterion = make_generator(), make_discriminator(), nn.BCELoss()
optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))

plain = []
for real in images:
    optimizer_d.zero_grad()
    loss_real = criterion(discriminator(real), ones)
    loss_real.backward()
    fake = generator(torch.randn(BATCH, LATENT, 1, 1))
    loss_fake = criterion(discriminator(fake.detach()), zeros)
    loss_fake.backward()
    optimizer_d.step()
    optimizer_g.zero_grad()
    loss_g = criterion(discriminator(fake), ones)
    loss_g.backward()
    optimizer_g.step()
    plain += [loss_real.item(), loss_fake.item(), loss_g.item()]

torch.manual_seed(0)
generator, discriminator, criterion = make_generator(), make_discriminator(), nn.BCELoss()
optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
b = Booster("cpu", mixed_precision="fp32", fused_optimizer=False)
discriminator, optimizer_d, criterion, *_ = b.boost(discriminator, optimizer_d, criterion)
generator, optimizer_g, *_ = b.boost(generator, optimizer_g)

boosted = []
for real in images:
    optimizer_d.zero_grad()
    loss_real = criterion(discriminator(real), ones)
    b.backward(loss_real, optimizer_d)
    fake = generator(torch.randn(BATCH, LATENT, 1, 1))
    loss_fake = criterion(discriminator(fake.detach()), zeros)
    b.backward(loss_fake, optimizer_d)
    optimizer_d.step()
    optimizer_g.zero_grad()
    loss_g = criterion(discriminator(fake), ones)
    b.backward(loss_g, optimizer_g)
    optimizer_g.step()
    boosted += [loss_real.item(), loss_fake.item(), loss_g.item()]

assert boosted == plain

print(f"{len(plain)} losses, all equal to the bit")
