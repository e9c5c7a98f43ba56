"""Train on the workers of Ray Train, for clusters without a scheduler: `pip install "ray[train]"`, then

    python examples/launchers/ray_train.py --workers 2

Ray starts the workers and makes their process group, so nothing is launched here; a Booster finds the group. Seeds are
the script's own. Results go through Ray, or through files that all workers reach.
"""

import argparse
import json
from pathlib import Path

import torch
from ray import init
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

import booster


def train(config: dict) -> None:
    booster.seed_everything(3)
    data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randint(3, (64,)))
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    b = booster.Booster(mixed_precision=config["precision"], plugin=booster.plugin.TorchDDPPlugin())
    model, optimizer, criterion, _, _ = b.boost(
        model, torch.optim.AdamW(model.parameters(), 1e-2), torch.nn.CrossEntropyLoss()
    )
    losses = []
    for x, y in b.prepare_dataloader(data, batch_size=8, shuffle=True):
        loss = criterion(model(x), y)
        b.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(b.reduce(loss.detach())))
    b.print("loss by step:", *(f"{loss:.4f}" for loss in losses))
    if b.is_main:
        Path(config["output"]).write_text(json.dumps([torch.distributed.get_world_size(), losses]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--output", default="losses.json")
    options = parser.parse_args()
    init(num_cpus=options.workers + 1, include_dashboard=False)
    output = Path(options.output).resolve()
    TorchTrainer(
        train,
        train_loop_config={"precision": options.precision, "output": str(output)},
        torch_config=TorchConfig(backend="nccl" if torch.cuda.is_available() else "gloo"),
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=torch.cuda.is_available()),
        run_config=RunConfig(storage_path=str(output.parent / "ray"), name="train"),
    ).fit()
