"""Train the example's GPT with gradients sent in four ways, and write down the losses.

for n in 2 4; do booster run --nproc_per_node $n benchmarks/figures/communication_run.py; done     # writes communication.json

All start from the same weights and see the same batches of 8 windows, divided among the ranks. A loss is the mean over ranks;
the last one is of the held-out text. Weights, gradients and updates are float32, so that curves differ by what is sent alone.
Each run is added to the file, under its number of ranks.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.utils.data import DataLoader

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "gpt")]

from data import drawn, load_text
from model import GPT, cross_entropy

import booster
from booster import Booster
from booster.nn.lr_scheduler import CosineAnnealingWarmupLR
from booster.plugin import FP8Communication, TorchDDPPlugin

SENT: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"comm_hook": bf16_compress_hook},
    "float8": {"fp8_communication": True},
    "float8, error feedback": {"fp8_communication": FP8Communication(error_feedback=True)},
}
BATCH = 8  # windows a step, on all ranks together


def train(sent: str, steps: int) -> dict[str, Any]:
    """Train once; returns the losses of all steps, and that of the held-out text."""
    splits = load_text(64)
    torch.manual_seed(0)
    b = Booster("cpu", "fp32", TorchDDPPlugin(**SENT[sent]))
    raw = GPT()
    adamw = torch.optim.AdamW(raw.parameters(), lr=4e-3, weight_decay=0.05)
    cosine = CosineAnnealingWarmupLR(adamw, total_steps=steps, warmup_steps=steps // 10)
    model, optimizer, criterion, _, scheduler = b.boost(raw, adamw, cross_entropy, lr_scheduler=cosine)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    losses = []
    for x, y in DataLoader(drawn(splits.train, steps * BATCH, 0), BATCH):
        loss = criterion(model(x.chunk(ranks)[rank]), y.chunk(ranks)[rank])
        b.backward(loss, optimizer)
        optimizer.clip_grad_by_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        dist.all_reduce(mean := loss.detach() / ranks)
        losses.append(round(float(mean), 5))
    total = count = 0.0
    model.eval()
    with torch.no_grad():
        for x, y in DataLoader(splits.validation, 256):
            total += float(cross_entropy(model(x), y)) * y.numel()
            count += y.numel()
    return {"loss": losses, "held_out": round(total / count, 5)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--sent", nargs="+", choices=list(SENT), default=list(SENT))
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("communication.json"))
    args = parser.parse_args()
    booster.launch_from_torch()
    torch.set_num_threads(1)
    for sent in args.sent:
        run = train(sent, args.steps)
        if dist.get_rank() == 0:
            found = json.loads(args.out.read_text())["ranks"] if args.out.exists() else {}
            found.setdefault(str(dist.get_world_size()), {})[sent] = run
            args.out.write_text(json.dumps({"torch": torch.__version__, "ranks": found}) + "\n")
            print(sent, run["loss"][-1], run["held_out"], flush=True)


if __name__ == "__main__":
    main()
