"""torchmetrics: metrics over all ranks. They synchronise over the job's process group by themselves.

pip install torchmetrics
booster run --nproc_per_node 2 examples/integrations/torchmetrics_accuracy.py
"""

import sys

import torch
from torchmetrics.classification import MulticlassAccuracy

import booster


def main(precision: str = "bf16") -> None:
    booster.launch_from_torch(seed=0)
    x = torch.randn(256, 8)
    data = torch.utils.data.TensorDataset(x, x[:, :3].argmax(1))
    b = booster.Booster(mixed_precision=precision, plugin=booster.plugin.TorchDDPPlugin())
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3))
    model, optimizer, criterion, _, _ = b.boost(
        model, torch.optim.AdamW(model.parameters(), 1e-2), torch.nn.CrossEntropyLoss()
    )
    accuracy = MulticlassAccuracy(num_classes=3, average="micro").to(b.device)
    loader = b.prepare_dataloader(data, batch_size=32, shuffle=True)
    for epoch in range(5):
        loader.set_epoch(epoch)
        for features, labels in loader:
            output = model(features)
            b.backward(criterion(output, labels), optimizer)
            optimizer.step()
            optimizer.zero_grad()
            accuracy.update(output.detach().float(), labels)
        value = accuracy.compute()  # a collective: all ranks call it
        accuracy.reset()
        b.print(f"epoch {epoch}: accuracy {value.item():.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
