"""Estimates of memory beside the allocator's record of the same steps, on CPU.

    python -m benchmarks.estimates [--ranks 2] [--release] [--only NAME,...]

Without --ranks one process trains each case; with it, so many gloo ranks do, under DDP, ZeRO and FSDP. Held: what the job
leaves after a step, gradients and batch included, from the allocator's events since before the model was made. Peak: the
highest point of the next step. --release: with release_gradients="exact", with and without a clip. The rules of
`booster.memory` were fitted to "cnn"; they were not to the models of timm.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.scaling.bytes import Counting, high_level
from benchmarks.timing import describe_machine
from booster import Booster
from booster.memory import Estimate, Measured, estimate, measure
from booster.mixed_precision import BF16NaiveMixedPrecision, FP8MixedPrecision, MixedPrecision
from booster.plugin import LowLevelZeroPlugin, Plugin, SingleDevice, TorchDDPPlugin, TorchFSDPPlugin

cross_entropy = nn.functional.cross_entropy
KIB = 2**10


# ---- models


class Block(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(count, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).reshape(count, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(512, 128), nn.Parameter(torch.zeros(64, 128))
        self.blocks = nn.ModuleList(Block(128, 4, True) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(128), nn.Linear(128, 512)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.position = nn.Conv2d(3, 192, 4, stride=4), nn.Parameter(torch.zeros(64, 192))
        self.blocks = nn.ModuleList(Block(192, 3, False) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(192), nn.Linear(192, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.BatchNorm2d(64), nn.ReLU()),
        *(nn.Conv2d(64, 128, 3, stride=2, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        nn.Linear(128, 10),
    )


def of_timm(name: str) -> nn.Module:
    if "timm" not in sys.modules:
        from examples.vit.torchvision_ops import import_torchvision

        import_torchvision()
    import timm

    return timm.create_model(name, num_classes=10)


def images(size: int = 32) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    return lambda: (torch.randn(16, 3, size, size), torch.randint(0, 10, (16,)))


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, 512, (8, 64)), torch.randint(0, 512, (8, 64))


def token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], Callable[..., torch.Tensor]]] = {
    "vit": (ViT, images(), cross_entropy),
    "gpt": (GPT, tokens, token_loss),
    "cnn": (cnn, images(), cross_entropy),
    "resnet10t": (lambda: of_timm("resnet10t"), images(64), cross_entropy),
    "convnext_atto": (lambda: of_timm("convnext_atto"), images(64), cross_entropy),
}
PRECISIONS: dict[str, Callable[[], str | MixedPrecision]] = {
    "fp32": lambda: "fp32",
    "bf16": lambda: "bf16",
    "fp16": lambda: "fp16",
    "bf16_naive": lambda: "bf16_naive",
    "seven bytes": lambda: BF16NaiveMixedPrecision(master_weights="split24", states="8bit"),
    "fp8": lambda: FP8MixedPrecision(emulate=True),
    "fp8, gathered so": lambda: FP8MixedPrecision(emulate=True, gather_in_fp8=True),
    "fp8, bf16 weights gathered so": lambda: FP8MixedPrecision(emulate=True, weights="bf16", gather_in_fp8=True),
}
HAVE_LINEARS = ("vit", "gpt")  # beside the first and the last one
PLUGINS: dict[str, Callable[..., Plugin]] = {
    "single": SingleDevice,
    "ddp": TorchDDPPlugin,
    "zero1": lambda **options: LowLevelZeroPlugin(stage=1, **options),
    "zero2": lambda **options: LowLevelZeroPlugin(stage=2, **options),
    "fsdp": TorchFSDPPlugin,
}
RELEASED_BUCKET = 0.5
PLAIN: dict[str, dict[str, Any]] = {"": {}}
RELEASES: dict[str, dict[str, Any]] = {
    ", release": {"release": "exact"},
    ", release, clip": {"release": "exact", "clip": 1.0},
}


# ---- one case


@dataclass(frozen=True)
class Found:
    """One case: what was estimated, and what the allocator recorded and `measure` counted. Bytes on this rank."""

    estimate: Estimate
    held: int
    peak: int
    measured: Measured


def parts(name: str, make: Any = torch.optim.AdamW) -> tuple[nn.Module, torch.optim.Optimizer, Any, Callable[..., Any]]:
    """Return model, optimizer, batch and criterion of a case."""
    torch.manual_seed(0)
    build, data, criterion = MODELS[name]
    model = build()
    return model, make(model.parameters(), lr=1e-4), data(), criterion


def both(
    name: str,
    precision: str,
    plugin: str = "single",
    make: Any = torch.optim.AdamW,
    world_size: int = 1,
    release: Any = False,
    clip: float = 0.0,
) -> Found:
    """Estimate a case, then train it and record the fifth step: in the first ones FSDP looks for what forward writes.

    With a plugin of ranks: a collective.

    release, clip: release_gradients and clip_grad_norm, with buckets of `RELEASED_BUCKET` MiB, of which a model fills several.
    """
    of_buckets = {"bucket_cap_mb": RELEASED_BUCKET} if release else {}
    expected = estimate(
        *parts(name, make),
        precision=PRECISIONS[precision](),
        plugin=plugin,  # type: ignore[arg-type]
        world_size=world_size,
        release_gradients=release,
        clips=bool(clip),
        **of_buckets,  # type: ignore[arg-type]
    )
    kept: list[Any] = []

    def step() -> None:
        booster, boosted, optimizer, loss_of, (inputs, target) = kept
        booster.backward(loss_of(boosted(inputs), target), optimizer)
        optimizer.step()

    def begin() -> None:
        model, optimizer, batch, criterion = parts(name, make)
        options = {"release_gradients": release, "clip_grad_norm": clip}
        divides = of_buckets if plugin in ("ddp", "zero1", "zero2") else {}
        booster = Booster("cpu", PRECISIONS[precision](), PLUGINS[plugin](**divides), **options)
        boosted, stepped, loss_of, *_ = booster.boost(model, optimizer, criterion)
        del model, optimizer
        kept.extend([booster, boosted, stepped, loss_of, batch])
        for _ in range(4):
            step()
            stepped.zero_grad()
        with Counting(frees_gradients=True) as counting:
            step()
        if not release:  # otherwise nobody keeps them
            buffers.extend(counting.buffers)

    buffers: list[torch.UntypedStorage] = []  # of DDP, which no Python object holds
    gc.collect()  # what is freed while it is recorded is what the step frees
    _, held = high_level(begin, buffers)
    measured = measure(kept[1], kept[2])
    _, freed = high_level(kept[2].zero_grad, buffers)
    highest, _ = high_level(step, buffers)
    return Found(expected, held, held + freed + highest, measured)


# ---- all cases


def row(name: str, precision: str, found: Found) -> str:
    said = found.estimate
    numbers = (
        f"{said.held / KIB:.0f} | {found.held / KIB:.0f} | {said.held / found.held - 1:+.2%} | "
        f"{said.peak / KIB:.0f} | {found.peak / KIB:.0f} | {said.peak / found.peak - 1:+.2%}"
    )
    return f"| {name} | {precision} | {said.plugin} x {said.world_size} | {numbers} |"


HEADER = """| model | precision | ranks | held, estimate | recorded | | peak, estimate | recorded | |
|---|---|---|---|---|---|---|---|---|"""


def cases(names: list[str], plugins: list[str]) -> Iterator[tuple[str, str, str]]:
    for name in MODELS:
        for plugin in plugins:
            for precision in PRECISIONS:
                label = f"{name} {precision} {plugin}"
                left_out = plugin != "single" and precision == "fp16"
                left_out |= precision.startswith("fp8") and name not in HAVE_LINEARS
                left_out |= "gathered" in precision and plugin != "fsdp"
                if not left_out and (not names or any(part in label for part in names)):
                    yield name, precision, plugin


def on_rank(rank: int, world_size: int, meeting: str, names: list[str], releases: bool) -> None:
    """Run all cases of ranks; rank 0 prints."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world_size)
    for name, precision, plugin in cases(names, [p for p in PLUGINS if p != "single"]):
        for label, options in RELEASES.items() if releases else PLAIN.items():
            found = both(name, precision, plugin, world_size=world_size, **options)
            if rank == 0:
                print(row(name, f"{precision}{label}", found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--release", action="store_true", help="gradients are released")
    parser.add_argument("--only", default="", help="comma-separated parts of 'model precision plugin'")
    options = parser.parse_args()
    names = [part for part in options.only.split(",") if part]
    print(f"{describe_machine()}; KiB on one rank\n\n{HEADER}")
    if options.ranks > 1:
        with tempfile.TemporaryDirectory() as folder:
            arguments = (options.ranks, f"{folder}/meeting", names, options.release)
            torch.multiprocessing.spawn(on_rank, arguments, nprocs=options.ranks)  # type: ignore[attr-defined]
        return
    torch.set_num_threads(1)
    for name, precision, plugin in cases(names, ["single"]):
        for label, chosen in RELEASES.items() if options.release else PLAIN.items():
            print(row(name, f"{precision}{label}", both(name, precision, plugin, **chosen)), flush=True)


if __name__ == "__main__":
    main()
