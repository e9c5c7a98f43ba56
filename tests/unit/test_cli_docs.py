"""Every option of the command line is on the page of its command, or on that of all commands, which the page then names.
Every line for a shell that a page prints runs."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
from packages import package
from programs import run

from booster.cli import _COMMANDS, main

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = {
    "run": "launch",
    "check": "launch",
    "env": "launch",
    "estimate": "memory",
    "checkpoint show": "checkpoints",
    "checkpoint verify": "checkpoints",
    "checkpoint convert": "checkpoints",
    "report": "numerics",
    "compare": "numerics",
    "advise": "guides/choose",
}


def options_in(text):
    return {name.replace("-", "_") for name in re.findall(r"(?<![\w-])--([a-z][a-z_-]*)", text)}


@pytest.mark.parametrize("command", PAGES)
def test_every_option_of_a_command_is_on_its_page(command, capsys):
    assert main([*command.split(), "--help"]) == 0
    spelled = options_in(capsys.readouterr().out) - {"help", "name_with_underscores", "name_with_hyphens"}
    page = (DOCS / f"{PAGES[command]}.md").read_text()
    assert f"booster {command}" in page
    if spelled - options_in(page):
        assert "reference/cli.md" in page
        section = (DOCS / "reference/cli.md").read_text().partition(f"\n## {command}\n")[2].partition("\n## ")[0]
        assert spelled - options_in(page) - options_in(section) == set()


def test_every_command_has_a_page():
    assert {command.partition(" ")[0] for command in PAGES} == set(_COMMANDS)


# ---- the lines that pages print ----

SHELL_BLOCK = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)
NAMES = {"booster run --max_restarts 5"}  # an option that a sentence names, without a script
# Of what a machine and a test have not: the word by which such a line is known.
ELSEWHERE = ("--nnodes", "--host", "--hostfile", "--nproc_per_node gpu", "examples/")
SLOW = ("advise train", "advise my_", "--layers", "--html", "booster check", "booster run", "timm:", "transformers:")


def printed():
    """Every line of a shell that starts `booster` or a script of the reader's, whole, without its comment, in order."""
    lines = {}
    for page in [DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))]:
        text = page.read_text()
        lines |= {line: None for block in SHELL_BLOCK.findall(text) for line in block.splitlines()}
        inline = re.findall(r"`(booster \w[^`]*)`", text)
        lines |= {line: None for line in inline if len(line.split()) > 3 or line.count(" ") == 2 and " -" not in line}
    plain = [line.partition("#")[0].removesuffix("&").rstrip() for line in lines]
    kept = [
        line for line in dict.fromkeys(plain) if line.startswith(("booster ", "python train.py")) and line not in NAMES
    ]
    return [line for line in kept if not any(word in line for word in ELSEWHERE)]


TRAIN = """
import contextlib

import torch
from torch import nn

import booster
from booster.plugin import TorchDDPPlugin

model_fn = lambda: nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))
batch = (torch.randn(8, 16), torch.randint(0, 4, (8,)))
criterion = nn.CrossEntropyLoss()


def optimizer_fn(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def job():
    model = model_fn()
    return model, optimizer_fn(model), batch, criterion


def task():
    return {"model_fn": model_fn, "batch": batch, "criterion": criterion, "optimizer_fn": optimizer_fn}


def train(record=None, save=None):
    torch.manual_seed(0)
    b = booster.Booster("cpu", "bf16_naive", TorchDDPPlugin())
    model, optimizer, loss_of, *_ = b.boost(*job()[:2], criterion)
    with contextlib.nullcontext() if record is None else b.record(record, every=1):
        for _ in range(3):
            b.backward(loss_of(model(batch[0]), batch[1]), optimizer)
            optimizer.step()
            optimizer.zero_grad()
    if save is not None:
        b.save(save, model, optimizer, step=3)


if __name__ == "__main__":
    booster.launch_from_torch()
    train()
"""


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    """A folder with what pages name: scripts, a package, records and checkpoints."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "my_package").mkdir()
    for name in ("train.py", "job.py", "my_package/train.py"):
        (folder / name).write_text(TRAIN)
    code = "import train\nfor name in ('first', 'before', 'after'): train.train(f'runs/{name}')\ntrain.train(save='FOLDER')"
    made = run("-c", code, folder=folder)
    assert made.returncode == 0, made.stderr
    return folder


@pytest.mark.parametrize(
    "line", [pytest.param(line, marks=[pytest.mark.slow] * any(map(line.__contains__, SLOW))) for line in printed()]
)
def test_a_line_that_a_page_prints_runs(line, reader, tmp_path, monkeypatch):
    folder = tmp_path / "reader"
    shutil.copytree(reader, folder)
    words = shlex.split(line)
    for name in ("timm", "transformers"):
        if f"{name}:" in line:  # in this process, where torchvision's missing operators can be made up for
            package(name)
            monkeypatch.chdir(folder)
            assert main(words[1:]) == 0
            return
    result = run(*(["-m", *words] if words[0] == "booster" else words[1:]), folder=folder)
    assert result.returncode == 0, f"{line}\n{result.stdout[-1000:]}\n{result.stderr[-2000:]}"


def test_pages_print_lines_of_every_command():
    assert {line.split()[1] for line in printed() if line.startswith("booster ")} == set(_COMMANDS)
