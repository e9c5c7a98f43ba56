"""Train low-rank adapters on a frozen GPT with weights stored in 4 bits, and on the same GPT in float32.

[booster run --nproc_per_node 2 | python] examples/gpt/adapters.py          # about two minutes on one core
"""

import argparse
import logging
from pathlib import Path

import torch
from data import drawn, load_text, spread
from model import GPT, cross_entropy
from torch import nn

import booster
from booster import Booster, DistCoordinator, describe, load_weights
from booster.plugin import TorchDDPPlugin


class Adapted(nn.Module):
    """A frozen linear layer plus the product of two small matrices, which begins at zero (Hu et al. 2021, "LoRA")."""

    def __init__(self, base_layer: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.Linear(base_layer.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base_layer.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + 2 * self.lora_B(self.lora_A(x))


def train(model: nn.Module, steps: int, seed: int, batch_size: int = 16) -> tuple[Booster, nn.Module, float]:
    """Train what is not frozen, under bf16; return the mean loss on the validation text, too."""
    b = Booster(mixed_precision="bf16", plugin=TorchDDPPlugin())
    splits, share = load_text(64), batch_size // b.plugin.data_parallel_size
    loader = b.prepare_dataloader(drawn(splits.train, steps * batch_size, seed), share)
    optimizer = torch.optim.AdamW((param for param in model.parameters() if param.requires_grad), lr=4e-3)
    model, optimizer, criterion, *_ = b.boost(model, optimizer, cross_entropy)
    for tokens, target in loader:
        b.backward(criterion(model(tokens), target), optimizer)
        optimizer.clip_grad_by_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
    held_out = b.prepare_dataloader(spread(splits.validation, 320), share, drop_last=True)
    with torch.no_grad():
        loss = b.reduce(torch.stack([criterion(model(tokens), target) for tokens, target in held_out]).mean())
    return b, model, loss.item()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--storage", nargs="+", default=["float32", "nf4"], help="float32, bfloat16, int8, fp8, nf4")
    parser.add_argument("--base-steps", type=int, default=300, help="of the GPT that is then frozen (default: 300)")
    parser.add_argument("--steps", type=int, default=200, help="of the adapters (default: 200)")
    parser.add_argument("--base", type=Path, default=Path("runs/gpt/base.safetensors"), help="file of the frozen GPT")
    args = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("booster.mixed_precision").setLevel(logging.INFO)
    booster.launch_from_torch(seed=0)
    b, model, loss = train(GPT(), args.base_steps, seed=0)
    b.save_model(model, args.base)
    DistCoordinator().print_on_master(f"base: validation loss {loss:.4f}")
    for storage in args.storage:
        torch.manual_seed(0)
        with torch.device("meta"):
            model = GPT()
        model = load_weights(model, args.base, storage_dtype=getattr(torch, storage) if "float" in storage else storage)
        model.requires_grad_(False)
        for name in [
            name for name, _ in model.named_modules() if name.endswith(("q_proj", "v_proj", "fc", "mlp.proj"))
        ]:
            model.set_submodule(name, Adapted(model.get_submodule(name)))
        _, model, loss = train(model, args.steps, seed=1)
        rows = [row for row in describe(model).rows if "Linear" in row.kind and not row.gradient]
        each = sum(row.bytes for row in rows) / sum(row.numbers for row in rows)
        DistCoordinator().print_on_master(f"{storage}: loss {loss:.4f}, frozen layers {each:.3f} bytes a parameter")
    DistCoordinator().destroy()


if __name__ == "__main__":
    main()
