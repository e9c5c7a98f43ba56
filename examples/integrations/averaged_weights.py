"""torch.optim.swa_utils: an exponential average, and stochastic weight averaging, of a boosted model's weights.

    python examples/integrations/averaged_weights.py

`bf16`, `fp16` and `fp32` keep float32 weights, which is what should be averaged. Under the naive precisions the model's own
weights are rounded to 16 bits, in which the differences of small steps are lost.
"""

import sys

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import booster


def main(precision: str = "bf16") -> None:
    torch.manual_seed(0)
    x = torch.randn(256, 8)
    y = x[:, :3].argmax(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(), torch.nn.Linear(32, 3)
    )
    averages = {
        "EMA": AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
        "SWA": AveragedModel(model),
    }
    b = booster.Booster(mixed_precision=precision)
    model, optimizer, criterion, _, _ = b.boost(
        model, torch.optim.AdamW(model.parameters(), 1e-2), torch.nn.CrossEntropyLoss()
    )
    trained = b.unwrap(model)
    for step in range(40):
        loss = criterion(model(x), y)
        b.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        averages["EMA"].update_parameters(trained)
        if step >= 30:
            averages["SWA"].update_parameters(trained)
    b.print(f"trained: loss {loss.item():.3f}")
    for name, average in averages.items():
        update_bn([x], average)  # statistics of the averaged weights
        average.eval()
        with torch.no_grad():
            b.print(f"{name}: loss {torch.nn.functional.cross_entropy(average(x), y).item():.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
