"""Train a vision transformer on real images, in any precision, on one process or many.

python examples/vit/train.py                                          # one process, bf16
booster run --nproc_per_node 2 examples/vit/train.py                  # two processes
python examples/vit/train.py --compare fp32,bf16,fp16                 # three runs, one table, one plot
booster run --nproc_per_node gpu examples/vit/train.py --recipe tutorial --precision fp16 --data DIR
booster run --max_restarts 5 examples/vit/train.py --resume --save-every 100    # goes on after whatever kills it
"""

import argparse
import logging
import os
import shutil
from itertools import islice
from pathlib import Path

import torch
import torchvision_ops

torchvision_ops.import_torchvision()  # timm needs torchvision, which fails with a CPU-only torch without this

from data import DATASETS, ImageSet, load_images
from history import History
from model import ModelSpec, find_model
from progress import ProgressBar
from recipe import RECIPES, Recipe, choose_recipe
from report import print_table, save_plot

import booster
from booster import Booster, DistCoordinator, cli
from booster.plugin import TorchDDPPlugin

TEST_BATCH = 256
STOPPED = 75  # exit status: try again later


def train(
    b: Booster, precision: str, recipe: Recipe, spec: ModelSpec, images: ImageSet, args: argparse.Namespace
) -> History:
    """Train one model, from its initialisation or from a checkpoint, and evaluate it; every rank calls this."""
    torch.manual_seed(args.seed)  # the same initialisation for every precision and on every rank
    world_size = DistCoordinator().world_size

    # What any PyTorch script has ...
    model = spec.build(None if recipe.tutorial else images.num_classes, drop_rate=recipe.drop_rate)
    loader = b.plugin.prepare_dataloader(
        images.train, recipe.batch_size // world_size, shuffle=True, seed=args.seed, drop_last=True
    )
    optimizer = recipe.make_optimizer(model.parameters())
    criterion = torch.nn.CrossEntropyLoss()
    lr_scheduler = recipe.make_scheduler(optimizer, len(loader))
    history = History(precision, peak_bytes=estimate_peak(b, model, optimizer, criterion, loader))

    # ... put under a precision and a parallelism in one line.
    model, optimizer, criterion, loader, lr_scheduler = b.boost(model, optimizer, criterion, loader, lr_scheduler)

    num_steps = recipe.num_steps(len(loader))
    folder = args.output / f"{recipe.model}-{precision}-checkpoints"
    parts = (model, optimizer, criterion, loader, lr_scheduler)
    if args.resume:
        b.resume_or_start(folder, *parts, extra=history)
    elif b.is_main:
        shutil.rmtree(record_folder(args, precision), ignore_errors=True)  # of a run before
    b.wait_for_everyone()
    with b.record(record_folder(args, precision)), ProgressBar(precision, num_steps) as bar:
        model.train()
        while history.num_steps < num_steps:
            for inputs, labels in islice(loader, num_steps - history.num_steps):
                loss = criterion(model(inputs), labels)
                b.backward(loss, optimizer)
                result = optimizer.step()
                optimizer.zero_grad()
                history.record(loss, result, num_images=len(inputs) * world_size)
                if not recipe.schedules_epochs or history.num_steps % len(loader) == 0:
                    lr_scheduler.step()
                bar.show(history, loss, optimizer)
                stopped = args.resume and b.stop_requested()
                if (args.save_every and history.num_steps % args.save_every == 0) or stopped:
                    history.close(b)
                    b.save(folder, *parts, extra=history, step=history.num_steps, keep_last=2)
                if stopped:
                    raise SystemExit(STOPPED)
    history.close(b)
    if images.test is not None:
        history.accuracy = evaluate(b, model, images)
    return history


def record_folder(args: argparse.Namespace, precision: str) -> Path:
    """Where every step of this run is written down."""
    return args.output / f"{args.recipe.model}-{precision}-record"


def estimate_peak(
    b: Booster,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    criterion: torch.nn.Module,
    loader: torch.utils.data.DataLoader,
) -> int:
    """Bytes at the highest point of a step, computed from shapes; nothing is allocated, and no batch is taken."""
    inputs, _ = loader.dataset[0]
    batch = torch.empty(loader.batch_size, *inputs.shape, device="meta")
    labels = torch.empty(loader.batch_size, dtype=torch.long, device="meta")
    return b.estimate_memory(model, optimizer, (batch, labels), criterion).peak


@torch.no_grad()
def evaluate(b: Booster, model: torch.nn.Module, images: ImageSet) -> float:
    """The share of test images that the model names correctly, over all ranks."""
    loader = b.prepare_dataloader(images.test, TEST_BATCH)
    model.eval()
    right = [model(inputs).argmax(-1) == labels for inputs, labels in loader]
    # One row per test image, in the data set's order: what the sampler repeated to divide among ranks is gone.
    return b.gather(torch.cat(right), loader).float().mean().item()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="train a vision transformer on real images, in any precision")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--precision", default="bf16", help="fp32, bf16, fp16, ... (default: bf16)")
    group.add_argument("--compare", metavar="NAMES", help="train in each of these in turn, e.g. fp32,bf16,fp16")
    parser.add_argument("--plugin", choices=("ddp", "none"), default="ddp", help="parallelism (default: ddp)")
    parser.add_argument("--recipe", choices=tuple(RECIPES), default="default", help="tutorial: ViT-B/16 on Caltech101")
    parser.add_argument("--model", help="vit_small_grey (default) or any model of timm")
    parser.add_argument("--dataset", choices=DATASETS, help="default: fashion-mnist-subset, which needs no download")
    data = Path(os.environ.get("DATA", "data"))
    parser.add_argument("--data", type=Path, default=data, help="folder of downloaded sets (default: $DATA or ./data)")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--epochs", type=_positive)
    length.add_argument("--steps", type=_positive, help="updates (default: 500; 300 with --compare)")
    parser.add_argument("--batch-size", type=_positive, help="images per update, over all processes (default: 64)")
    parser.add_argument("--lr", type=float, help="peak learning rate (default: 1e-3)")
    parser.add_argument("--seed", type=int, default=1024)
    parser.add_argument("--save-every", type=_positive, metavar="STEPS", help="write a checkpoint every so many steps")
    parser.add_argument(
        "--resume", action="store_true", help="go on from the newest checkpoint; on SIGTERM or SIGUSR1, save and stop"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("runs/vit"), help="folder of the picture (default: runs/vit)"
    )
    args = parser.parse_args()
    try:
        args.recipe = choose_recipe(args)
    except ValueError as error:
        parser.error(str(error))
    return args


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of at least 1")
    return int(text)


def main() -> None:
    args = parse_args()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("booster.mixed_precision").setLevel(logging.INFO)
    booster.launch_from_torch(seed=args.seed)
    coordinator = DistCoordinator()
    recipe = args.recipe
    if args.plugin == "none" and coordinator.world_size > 1:
        raise ValueError(
            f"--plugin none on {coordinator.world_size} processes would train as many separate models; use --plugin ddp"
        )
    if recipe.batch_size % coordinator.world_size:
        raise ValueError(
            f"--batch-size {recipe.batch_size} does not divide among {coordinator.world_size} processes; "
            "give a multiple of their number"
        )
    plugin = TorchDDPPlugin() if args.plugin == "ddp" else None
    names = args.compare.split(",") if args.compare else [args.precision]
    # A wrong name fails now.
    boosters = {name: Booster(mixed_precision=name, plugin=plugin) for name in names}

    spec = find_model(recipe.model)
    images = load_images(recipe.dataset, args.data, channels=spec.channels, size=spec.size, tutorial=recipe.tutorial)
    histories = [train(b, name, recipe, spec, images, args) for name, b in boosters.items()]
    coordinator.block_all()  # until the records of all ranks are whole

    if coordinator.is_master():
        processes = "1 process" if coordinator.world_size == 1 else f"{coordinator.world_size} processes"
        title = f"{recipe.model} on {images.name}, {processes}"
        print_table(histories, title)
        picture = args.output / f"{'-'.join(boosters)}.png"
        save_plot(histories, title, picture)
        print(f"wrote {picture}")
        for name in boosters:  # every step and what underflowed, with pictures, to open in a browser
            cli.main(["report", "--html", str(args.output / f"{name}.html"), str(record_folder(args, name))])
    coordinator.destroy()


if __name__ == "__main__":
    main()
