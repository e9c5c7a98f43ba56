"""Run a script as it is and with edits, and compare every number that it reads from a tensor with `.item()`.

    python examples/ports/same_losses.py --items 60 nanoGPT/train.py examples/ports/nanogpt.ed --device=cpu --dtype=float32

The edits are what `diff -e original ported` prints: line numbers of the original, and new lines. The edited script is next to
the original while it runs, so that it finds the same modules. What follows the edits is handed to both. Each runs in its own
process with one thread. The exit code is 1 where a number differs.

What docs/migration/index.md shows was run so, next to a clone of this repository:

    cd nanoGPT && python ../booster/examples/ports/same_losses.py --items 100 train.py ../booster/examples/ports/nanogpt.ed \\
        --device=cpu --dtype=float32 --compile=False --dataset=shakespeare_char --gradient_accumulation_steps=4 \\
        --batch_size=4 --block_size=32 --n_layer=2 --n_head=2 --n_embd=64 --max_iters=30 --eval_interval=15 \\
        --eval_iters=3 --warmup_iters=5 --lr_decay_iters=30 --learning_rate=1e-2 --min_lr=1e-3 --log_interval=1
    cd examples && python ../booster/examples/ports/same_losses.py --items 200 dcgan/main.py \\
        ../booster/examples/ports/dcgan.ed --dataset fake --batchSize 2 --ngf 8 --ndf 8 --workers 0 --manualSeed 3 --niter 1
    echo "device: cpu" > cpu.yaml   # images: 60 of each of 4 classes, 32 x 32
    python booster/examples/ports/same_losses.py --items 40 pytorch-image-models/train.py booster/examples/ports/timm.ed \\
        -c cpu.yaml --data-dir images --train-split train --val-split val --model test_resnet --input-size 3 32 32 \\
        --num-classes 4 -b 6 --epochs 2 --warmup-epochs 0 --opt momentum --lr 0.05 --clip-grad 1.0 --mixup 0.2 \\
        --model-ema -j 0 --grad-accum-steps 2
"""

import argparse
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Enough(BaseException):
    """As many numbers as were asked for; no Exception, so that scripts do not catch it."""


class Items(TorchFunctionMode):
    """Writes down the numbers that code of `script` reads with `.item()`, exactly."""

    def __init__(self, script: Path, limit: int) -> None:
        super().__init__()
        self.script, self.limit, self.seen = script, limit, list[str]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.item and sys._getframe(1).f_code.co_filename == str(self.script):
            self.seen.append(float(result).hex())
            if len(self.seen) >= self.limit:
                raise Enough
        return result


def apply(edits: str, lines: list[str]) -> list[str]:
    """Apply what `diff -e` printed. Its edits come last first, so that line numbers are those of the original."""
    lines, commands = list(lines), iter(edits.splitlines(keepends=True))
    for command in commands:
        found = re.fullmatch(r"(\d+)(?:,(\d+))?([acd])\n", command)
        if found is None:
            raise ValueError(f"no command of diff -e: {command!r}")
        first, last, verb = int(found[1]), int(found[2] or found[1]), found[3]
        new = [] if verb == "d" else list(iter(lambda: next(commands), ".\n"))
        lines[last if verb == "a" else first - 1 : last] = new
    return lines


def record(script: Path, limit: int, arguments: list[str]) -> list[str]:
    """Run `script` in its own process and return its numbers."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "items.json"
        own = [sys.executable, __file__, "--record", str(out), "--items", str(limit), str(script), "-"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run([*own, *arguments], env=environment, capture_output=True, text=True)
        if not out.exists():
            raise SystemExit(f"{script.name} failed:\n{done.stderr}")
        return list(json.loads(out.read_text()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=100, help="stop after so many numbers")
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("script", type=Path)
    parser.add_argument("edits", type=Path, help="what `diff -e original ported` printed")
    given, arguments = parser.parse_known_args()
    script = given.script.resolve()
    if given.record:
        sys.argv[:], sys.path[0] = [str(script), *arguments], str(script.parent)
        items = Items(script, given.items)
        try:
            with items:
                runpy.run_path(str(script), run_name="__main__")
        except Enough:
            pass
        given.record.write_text(json.dumps(items.seen))
        return 0
    ported = script.with_name(f"ported_{script.name}")
    ported.write_text("".join(apply(given.edits.read_text(), script.read_text().splitlines(keepends=True))))
    try:
        plain, boosted = (record(each, given.items, arguments) for each in (script, ported))
    finally:
        ported.unlink()
    apart = [abs(float.fromhex(a) - float.fromhex(b)) for a, b in zip(plain, boosted, strict=True)]
    print(f"{len(plain)} numbers, {sum(d > 0 for d in apart)} differ, by at most {max(apart, default=0):.3g}")
    print(f"from {float.fromhex(plain[0]):.4f} to {float.fromhex(plain[-1]):.4f}")
    return int(any(apart))


if __name__ == "__main__":
    sys.exit(main())
