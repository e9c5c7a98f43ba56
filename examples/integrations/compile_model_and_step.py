"""torch.compile: the model, and the optimizer's step with its clip, scale and masters in the same kernels.

    python examples/integrations/compile_model_and_step.py fp16_naive

Compile the model before `boost`, or the boosted one: the names in checkpoints are the model's own either way.
"""

import sys

import torch

import booster


def train(precision: str, compiled: bool) -> list[float]:
    torch.manual_seed(0)
    x = torch.randn(64, 8)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 3))
    b = booster.Booster(mixed_precision=precision, clip_grad_norm=1.0, fused_optimizer="compile" if compiled else True)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    model, optimizer, criterion, _, _ = b.boost(
        torch.compile(model) if compiled else model, optimizer, torch.nn.CrossEntropyLoss()
    )
    losses = []
    for _ in range(15):
        loss = criterion(model(x), x[:, :3].argmax(1))
        b.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(precision: str = "bf16") -> None:
    eager, compiled = (train(precision, each) for each in (False, True))
    apart = max(abs(a - b) for a, b in zip(eager, compiled, strict=True))
    print(f"eager: loss {eager[0]:.3f} -> {eager[-1]:.3f}")
    print(f"compiled: loss {compiled[0]:.3f} -> {compiled[-1]:.3f}, at most {apart:.4f} apart")


if __name__ == "__main__":
    main(*sys.argv[1:])
