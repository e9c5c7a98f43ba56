"""Train a GPT on text, or a vision transformer on images, on any parallelism and in any precision, by one loop.

python examples/gpt/train.py                                                     # one process, bf16
booster run --nproc_per_node 2 examples/gpt/train.py --plugin fsdp --precision fp16
booster run --nproc_per_node 4 examples/gpt/train.py --plugin hybrid --tp 2 --pp 2 --precision fp16
booster run --nproc_per_node 4 examples/gpt/train.py --plugin hybrid --tp 2 --pp 2 --model vit
booster run --max_restarts 5 examples/gpt/train.py --resume --save-every 50         # goes on after whatever kills it
python examples/gpt/plot.py runs/gpt/gpt-single-fp16.json runs/gpt/gpt-hybrid-tp2-pp2-fp16.json
"""

import argparse
import logging
import time
from pathlib import Path

import torch
from data import Splits, drawn, load_images, load_text, spread
from history import History
from model import GPT, cross_entropy, make_vit
from plugins import add_arguments, check_arguments, describe, make_plugin

import booster
from booster import Booster, DistCoordinator
from booster.mixed_precision import available
from booster.nn.lr_scheduler import CosineAnnealingWarmupLR

MAX_NORM = 1.0
VALIDATION_BATCHES = 10
STEPS_PER_LINE = 10
STOPPED = 75  # exit status: try again later


def train(b: Booster, model: torch.nn.Module, splits: Splits, args: argparse.Namespace) -> History:
    """Train `model` and validate it; every process calls this, whatever part of model and data it has."""
    show = DistCoordinator().print_on_master
    batch_size = args.batch_size // b.plugin.data_parallel_size
    loader = b.prepare_dataloader(drawn(splits.train, args.steps * args.batch_size, args.seed), batch_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05)
    lr_scheduler = CosineAnnealingWarmupLR(optimizer, total_steps=args.steps, warmup_steps=args.steps // 10)

    num_parameters = num_held(model)

    model, optimizer, criterion, loader, lr_scheduler = b.boost(model, optimizer, cross_entropy, loader, lr_scheduler)

    options = {name: str(value) for name, value in vars(args).items()}
    history = History(f"{describe(args)}, {args.precision}", options, num_held(model) / num_parameters)
    show(f"{history.label}: rank 0 holds {history.share:.0%} of {num_parameters:,} parameters")
    folder = args.output / f"{args.model}-{describe(args)}-{args.precision}-checkpoints"
    parts = (model, optimizer, criterion, loader, lr_scheduler)
    done = b.resume_or_start(folder, *parts, extra=history).step if args.resume else 0
    start = time.perf_counter()
    batches = iter(loader)
    model.train()
    for step in range(done + 1, args.steps + 1):
        loss = b.execute_pipeline(batches, model, criterion, optimizer, return_loss=True)["loss"]
        optimizer.clip_grad_by_norm(MAX_NORM)
        result = optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()

        history.loss.append(b.reduce(loss).item())
        history.loss_scale.append(result.loss_scale)
        history.skipped.append(not result.applied)
        if step % STEPS_PER_LINE == 0 or step == args.steps:
            show(f"step {step:4d}  loss {history.loss[-1]:.4f}  scale {result.loss_scale:g}")
        stopped = args.resume and b.stop_requested()
        if (args.save_every and step % args.save_every == 0) or stopped:
            b.save(folder, *parts, extra=history, step=step, keep_last=2)
        if stopped:
            show(f"stopped after step {step}; --resume goes on")
            raise SystemExit(STOPPED)
    history.seconds = time.perf_counter() - start

    history.validation_loss = validate(b, model, criterion, splits, args.batch_size)
    show(
        f"validation loss {history.validation_loss:.4f}, {sum(history.skipped)} steps skipped, {history.seconds:.1f} s"
    )
    return history


def validate(b: Booster, model: torch.nn.Module, criterion: object, splits: Splits, batch_size: int) -> float:
    """The mean loss over batches from all over the validation split."""
    samples = spread(splits.validation, VALIDATION_BATCHES * batch_size)
    # Pipelines know the shape of a batch beforehand, so the last, smaller one is dropped.
    loader = b.prepare_dataloader(samples, batch_size // b.plugin.data_parallel_size, drop_last=True)
    model.eval()
    batches = iter(loader)
    losses = [b.execute_pipeline(batches, model, criterion, return_loss=True)["loss"] for _ in range(len(loader))]
    return b.reduce(torch.stack(losses).mean()).item()


def num_held(model: torch.nn.Module) -> int:
    """How many numbers of the parameters are on this process: of a distributed tensor, its local part."""
    return sum((p.to_local() if hasattr(p, "to_local") else p).numel() for p in model.parameters())


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="train a GPT or a vision transformer on any parallelism")
    add_arguments(parser)
    parser.add_argument("--precision", choices=available(), default="bf16", help="default: bf16")
    parser.add_argument("--model", choices=("gpt", "vit"), default="gpt", help="default: gpt")
    parser.add_argument("--blocks", type=_positive, default=4, help="default: 4")
    parser.add_argument("--width", type=_positive, default=128, help="default: 128")
    parser.add_argument("--heads", type=_positive, default=4, help="default: 4")
    parser.add_argument("--context", type=_positive, default=64, help="bytes that the GPT reads at once (default: 64)")
    parser.add_argument("--tied-head", action="store_true", help="the GPT predicts with its embedding's weights")
    parser.add_argument("--steps", type=_positive, default=300, help="default: 300")
    parser.add_argument(
        "--batch-size", type=_positive, default=16, help="samples per step over all processes (default: 16)"
    )
    parser.add_argument("--lr", type=float, default=4e-3, help="peak of the learning rate (default: 4e-3)")
    parser.add_argument("--seed", type=int, default=1024)
    parser.add_argument("--save-every", type=_positive, metavar="STEPS", help="write a checkpoint every so many steps")
    parser.add_argument(
        "--resume", action="store_true", help="go on from the newest checkpoint; on SIGTERM or SIGUSR1, save and stop"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("runs/gpt"), help="folder of the history (default: runs/gpt)"
    )
    args = parser.parse_args()
    try:
        check_arguments(args)
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
    if args.plugin == "none" and coordinator.world_size > 1:
        raise ValueError(
            f"--plugin none on {coordinator.world_size} processes would train as many separate models; choose another"
        )
    b = Booster(mixed_precision=args.precision, plugin=make_plugin(args))
    if args.batch_size % b.plugin.data_parallel_size:
        raise ValueError(
            f"--batch-size {args.batch_size} does not divide among the {b.plugin.data_parallel_size} processes that see "
            "different data; give a multiple of their number"
        )

    torch.manual_seed(args.seed)  # the same initial weights for every plugin, and on every process
    size = {"width": args.width, "num_blocks": args.blocks, "num_heads": args.heads}
    if args.model == "gpt":
        model = GPT(**size, context=args.context, tied_head=args.tied_head)
        splits = load_text(args.context)
    else:
        model, splits = make_vit(**size), load_images()
    history = train(b, model, splits, args)

    if coordinator.is_master():
        path = args.output / f"{args.model}-{describe(args)}-{args.precision}.json"
        history.save(path)
        print(f"wrote {path}")
    coordinator.destroy()


if __name__ == "__main__":
    main()
