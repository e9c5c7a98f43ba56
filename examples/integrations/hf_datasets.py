"""datasets (Hugging Face): a Dataset as it is, with torch's format; `prepare_dataloader` divides it among ranks.

    pip install datasets
    booster run --nproc_per_node 2 examples/integrations/hf_datasets.py

Rows are dicts, and so are batches; they reach the device whole.
"""

import sys

import torch
from datasets import Dataset

import booster


def main(precision: str = "bf16") -> None:
    booster.launch_from_torch(seed=0)
    x = torch.randn(256, 8)
    rows = Dataset.from_dict({"features": x.tolist(), "label": x[:, :3].argmax(1).tolist()}).with_format("torch")
    b = booster.Booster(mixed_precision=precision, plugin=booster.plugin.TorchDDPPlugin())
    model = torch.nn.Linear(8, 3)
    model, optimizer, criterion, _, _ = b.boost(
        model, torch.optim.AdamW(model.parameters(), 3e-2), torch.nn.CrossEntropyLoss()
    )
    loader = b.prepare_dataloader(rows, batch_size=16, shuffle=True)
    losses = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        for batch in loader:
            loss = criterion(model(batch["features"]), batch["label"])
            b.backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(b.reduce(loss.detach()).item())
    b.print(f"datasets: {len(losses)} steps, loss {losses[0]:.3f} -> {losses[-1]:.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
