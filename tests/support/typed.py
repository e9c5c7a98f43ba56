"""The library, README's program, and what `boost` returns, by one run of mypy: programs under its strict rules."""

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
RETURNED = """
import torch
from torch import nn
from typing_extensions import assert_type

from booster import Booster
from booster.interface.optimizer import OptimizerWrapper
from booster.update.decision import StepResult


class Net(nn.Module):
    hidden: int = 4


net = Net()
sgd = torch.optim.SGD(net.parameters())
b = Booster("cpu")
model, optimizer, criterion, loader, schedule = b.boost(net, sgd, nn.MSELoss())
assert_type(model, Net)
assert_type(model.hidden, int)
assert_type(optimizer, OptimizerWrapper)
assert_type(optimizer.step(), StepResult)
_, several, *_ = b.boost(net, [sgd, sgd])
assert_type(several, list[OptimizerWrapper])
_, nothing, _, _, _ = b.boost(net)
assert_type(nothing, None)
two, names = b.boost(net, sgd)  # type: ignore[misc]
Booster("cpu", precision="bf16")  # type: ignore[arg-type]
b.prepare(net)  # type: ignore[attr-defined]
"""


def readme() -> str:
    """The whole script of README."""
    text = (ROOT / "README.md").read_text()
    return text[text.index("## A whole script") :].split("```python\n", 1)[1].split("```", 1)[0]


def check(*programs: str) -> tuple[int, str]:
    """Return mypy's exit code and what it says of the library and of `programs`."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"program_{number}.py" for number in range(len(programs))]
        for file, program in zip(files, programs, strict=True):
            file.write_text(program)
        command = [sys.executable, "-m", "mypy", "booster", *map(str, files)]  # in one run, which reads torch once
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


if __name__ == "__main__":
    code, said = check(readme(), RETURNED)
    print(said, end="")
    sys.exit(code)
