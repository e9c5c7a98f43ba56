"""The drills of CONTRIBUTING, done: how many files a change opens, and that it needs no other."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST = {"a precision": 6, "an optimizer": 2, "a field of checkpoints": 2, "a message": 2}


def opened():
    """Of each drill of CONTRIBUTING, the files that its row names, in order."""
    section = (ROOT / "CONTRIBUTING.md").read_text().split("## Four drills")[1].split("\n## ")[0]
    rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| ")][1:]
    return {name.strip(): re.findall(r"`([\w/]+\.(?:py|md))`", files) for name, files in rows}


def test_the_drills_open_as_many_files_as_they_may():
    found = opened()
    assert found.keys() == MOST.keys()
    for name, files in found.items():
        assert 0 < len(files) <= MOST[name], files
        assert [file for file in files if not (ROOT / file).exists() and "NAME" not in file] == []


# What each drill writes, by file: text that is appended, or (text, what takes its place).
PRECISION = '''"""Models with outputs rounded to bfloat16."""

import torch

from booster.mixed_precision.base import MixedPrecision
from booster.mixed_precision.policy import DtypePolicy


class RoundedOutputs(MixedPrecision):
    """Computes in float32; what models return is bfloat16."""

    policy = DtypePolicy(output=torch.bfloat16)
'''
FIELD = '''

class Modes(Part):
    """Whether each model trains."""

    def collect(self, into: SaveContext) -> dict[str, Any]:
        return {"modes": {name: model.training for name, model in self.objects.models.items()}}

    def prepare(self, found: LoadContext) -> None:
        self._modes = found.saved.tree.get("modes", {})

    def finish(self) -> None:
        for name, model in self.objects.models.items():
            model.train(self._modes.get(name, model.training))
'''
WRITES = {
    "a precision": {
        "booster/mixed_precision/NAME.py": PRECISION,
        "booster/mixed_precision/__init__.py": (
            "from booster.mixed_precision.half import",
            "from booster.mixed_precision.NAME import RoundedOutputs\nfrom booster.mixed_precision.half import",
            '    "fp32": FP32,\n',
            '    "fp32": FP32,\n    "rounded": RoundedOutputs,\n',
        ),
    },
    "an optimizer": {
        "booster/model/optimizers.py": (
            "    optim.Adamax: OptimizerInfo(",
            '    optim.SparseAdam: OptimizerInfo(granularity="per tensor", counts=(), reads_all=False),\n'
            "    optim.Adamax: OptimizerInfo(",
        )
    },
    "a field of checkpoints": {
        "booster/checkpoint/parts/run_objects.py": FIELD,
        "booster/checkpoint/parts/__init__.py": (
            "import ErrorFeedback, Random, StatefulObjects",
            "import ErrorFeedback, Modes, Random, StatefulObjects",
            "    Random,\n)",
            "    Random,\n    Modes,\n)",
        ),
    },
    "a message": {
        "booster/mixed_precision/__init__.py": ("is unknown; choose one of", "is no precision; choose one of"),
    },
}
TRIES = """
import json, tempfile, torch
from torch import nn
import booster
from booster import Booster
from booster.model.optimizers import granularity_of

def job(b):
    model = nn.Linear(2, 2)
    return b.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))[:2]

b = Booster("cpu", "rounded")
model, optimizer = job(b)
out = model(torch.ones(1, 2))
b.backward(out.float().sum(), optimizer)
found = {"from": booster.__file__, "dtype": str(out.dtype), "applied": bool(optimizer.step())}
optimizer.zero_grad()
found["kind"] = granularity_of(torch.optim.SparseAdam(nn.Linear(2, 2).parameters()))
with tempfile.TemporaryDirectory() as folder:
    model.eval()
    b.save(folder, model, optimizer)
    model, optimizer = job(b)
    b.load(folder, model, optimizer)
found["training"] = model.training
try:
    Booster("cpu", "fp17")
except ValueError as error:
    found["message"] = str(error)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """What a copy of the library does once each drill has written its files, and no other."""
    copy = tmp_path_factory.mktemp("drills")
    shutil.copytree(
        ROOT / "booster", copy / "booster"
    )  # with what is compiled, which holds for files that stay as they are
    for files in WRITES.values():
        for name, change in files.items():
            path = copy / name
            if isinstance(change, str):
                path.write_text((path.read_text() if path.exists() else "") + change)
                continue
            text = path.read_text()
            for old, new in zip(change[::2], change[1::2], strict=True):
                assert text.count(old) == 1, (name, old)
                text = text.replace(old, new)
            path.write_text(text)
    ran = subprocess.run(
        [sys.executable, "-c", TRIES],
        cwd=copy,
        env={"PYTHONPATH": str(copy)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert Path(found["from"]).is_relative_to(copy)
    return found


@pytest.mark.slow_cases("a precision-expected0")
@pytest.mark.parametrize(
    ("drill", "expected"),
    [
        ("a precision", {"dtype": "torch.bfloat16", "applied": True}),
        ("an optimizer", {"kind": "per tensor"}),
        ("a field of checkpoints", {"training": False}),
    ],
)
def test_a_drill_needs_no_file_that_its_row_does_not_name(done, drill, expected):
    assert {key: done[key] for key in expected} == expected
    assert set(WRITES[drill]) <= set(opened()[drill])


def test_a_message_that_is_mended_is_what_is_raised(done):
    assert done["message"].startswith("mixed_precision='fp17' is no precision; choose one of ")
    assert len(opened()["a message"]) <= 2
