"""Optimizers of others: schedule-free, Lion, timm's, Muon; what a naive precision needs of them.

    pip install schedulefree lion-pytorch timm
    python examples/integrations/third_party_optimizers.py fp16

Any optimizer trains under `fp32`, `bf16` and `fp16`. Split masters, ZeRO and FSDP step it on parts of the weights, which is
right only where each element is treated by itself: say so with `register_elementwise`, as for Lion here. One that looks at
whole tensors or whole models must not be registered, and is refused there with that advice.
"""

import sys

import torch

import booster


def optimizers() -> dict:
    import lion_pytorch
    import schedulefree
    import timm.optim

    booster.register_elementwise(lion_pytorch.Lion, rule="lion")  # a sign and an average, element by element
    return {
        "schedule-free AdamW": lambda p: schedulefree.AdamWScheduleFree(p, lr=2e-2, warmup_steps=3),
        "Lion": lambda p: lion_pytorch.Lion(p, lr=3e-3, weight_decay=0.01),
        "timm LAMB": lambda p: timm.optim.Lamb(p, lr=2e-2),
        "timm AdamP": lambda p: timm.optim.AdamP(p, lr=1e-2),
        "Muon": lambda p: torch.optim.Muon(p, lr=2e-2),  # for matrices alone: the model here has no biases
    }


def main(precision: str = "bf16") -> None:
    for name, make in optimizers().items():
        torch.manual_seed(0)
        x = torch.randn(128, 16)
        y = x[:, :4].argmax(1)
        model = torch.nn.Sequential(
            torch.nn.Linear(16, 32, bias=False), torch.nn.ReLU(), torch.nn.Linear(32, 4, bias=False)
        )
        b = booster.Booster(mixed_precision=precision, clip_grad_norm=1.0)
        try:
            model, optimizer, criterion, _, _ = b.boost(model, make(model.parameters()), torch.nn.CrossEntropyLoss())
        except ValueError as error:
            b.print(f"{name}: refused under {precision}: {error}")
            continue
        if hasattr(b.unwrap(optimizer), "train"):
            b.unwrap(optimizer).train()  # schedule-free keeps two weights, one to train and one to evaluate
        losses = []
        for _ in range(30):
            loss = criterion(model(x), y)
            b.backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if hasattr(b.unwrap(optimizer), "eval"):
            b.unwrap(optimizer).eval()
        with torch.no_grad():
            b.print(f"{name}: loss {losses[0]:.3f} -> {criterion(model(x), y).item():.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
