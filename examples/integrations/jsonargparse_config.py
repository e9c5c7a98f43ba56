"""jsonargparse: precision, plugin and optimizer from a configuration file or the command line, checked by their signatures.

    pip install "jsonargparse[signatures]"
    python examples/integrations/jsonargparse_config.py --precision.scale 1024 --optimizer.lr 0.003
    python examples/integrations/jsonargparse_config.py --config run.yaml

An option that a class does not have is an error of the command line; the values reach the class itself, which checks them.
"""

import torch
from jsonargparse import ArgumentParser

import booster
from booster.mixed_precision import FP16TorchMixedPrecision


def build(arguments: list[str] | None = None) -> object:
    parser = ArgumentParser()
    parser.add_argument("--config", action="config")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_class_arguments(FP16TorchMixedPrecision, "precision", skip={"scale"})
    parser.add_argument("--precision.scale", type=float | None, default=None)
    parser.add_class_arguments(torch.optim.AdamW, "optimizer", skip={"params"})
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = build(arguments)
    torch.manual_seed(0)
    x = torch.randn(64, 8)
    model = torch.nn.Linear(8, 1)
    chosen = {name: value for name, value in vars(options.precision).items() if value is not None}
    scale = chosen.pop("scale", None)
    if scale is not None:
        chosen["scale"] = booster.mixed_precision.StaticScale(scale)
    b = booster.Booster(mixed_precision=FP16TorchMixedPrecision(**chosen))
    optimizer = torch.optim.AdamW(model.parameters(), **vars(options.optimizer))
    model, optimizer, criterion, _, _ = b.boost(model, optimizer, torch.nn.MSELoss())
    losses = []
    for _ in range(options.steps):
        loss = criterion(model(x), x.sum(1, keepdim=True))
        b.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    b.print(f"jsonargparse: loss {losses[0]:.3f} -> {losses[-1]:.3f}, scale {optimizer.loss_scale:g}")


if __name__ == "__main__":
    main()
