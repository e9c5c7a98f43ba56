"""Ports of scripts of others: the edits are few and the page shows them; the tool that compares losses finds what differs.

The scripts themselves are not here. What they printed when they were compared is on the page.
"""

import re
import runpy
from pathlib import Path

import pytest
from programs import run

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "ports"
EDITS = sorted(FOLDER.glob("*.ed"))
PLAIN = """\
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    loss = model(torch.ones(2, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item())
"""
PORT = """\
8c
    b.backward(loss, optimizer)
.
4a
b = Booster("cpu", mixed_precision="fp32", fused_optimizer=False)
model, optimizer, *_ = b.boost(model, optimizer)
.
1a
from booster import Booster
.
"""


@pytest.fixture(scope="module")
def apply():
    return runpy.run_path(str(FOLDER / "same_losses.py"))["apply"]


def test_edits_of_diff_are_applied_to_the_lines_that_they_name(apply) -> None:
    lines = [f"{number}\n" for number in range(1, 8)]
    edits = "6,7d\n4c\nfour\nand a half\n.\n0a\nfirst\n.\n"
    assert apply(edits, lines) == ["first\n", "1\n", "2\n", "3\n", "four\n", "and a half\n", "5\n"]
    assert lines[0] == "1\n"


def test_what_is_no_edit_is_refused(apply) -> None:
    with pytest.raises(ValueError, match="no command of diff -e: 's/a/b/"):
        apply("s/a/b/\n", ["a\n"])


def each_of(edits: str) -> list[tuple[str, str, str, str]]:
    """Of each edit its first and its last line, what is done there, and the new lines."""
    return re.findall(r"^(\d+)(?:,(\d+))?([acd])\n((?:(?!\.$).*\n)*)", edits, re.MULTILINE)


def shown(edits: str) -> str:
    """The edits from top to bottom, as the page writes them."""
    places = [
        f"after line {first}"
        if verb == "a"
        else f"in place of lines {first} to {last}"
        if last
        else f"in place of line {first}"
        for first, last, verb, _ in each_of(edits)
    ]
    return "".join(f"# {place}\n{new}" for place, (*_, new) in reversed(list(zip(places, each_of(edits), strict=True))))


def changed(edits: str) -> int:
    """How many lines go or come, as a unified diff would count them."""
    count = 0
    for first, last, verb, new in each_of(edits):
        count += 0 if verb == "a" else int(last or first) - int(first) + 1
        count += 0 if verb == "d" else new.count("\n")
    return count


@pytest.mark.parametrize("path", EDITS, ids=lambda path: path.stem)
def test_a_port_changes_at_most_15_lines_and_the_page_names_it_or_shows_it(path: Path) -> None:
    edits = path.read_text()
    assert 0 < changed(edits) <= 15
    assert "from booster import Booster\n" in edits
    page = (ROOT / "docs" / "migration" / "index.md").read_text()
    assert path.stem != "nanogpt" or f"```python\n{shown(edits)}```" in page
    assert f"[{path.name}](../../examples/ports/{path.name}) | {changed(edits)} |" in page


@pytest.mark.parametrize("name", ["gan.py", "gpt.py"])
def test_a_plain_loop_and_its_port_have_the_same_losses(name: str) -> None:
    runpy.run_path(str(FOLDER / name))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("edits", "outcome"), [(PORT, "6 numbers, 0 differ"), (PORT.replace("(loss,", "(2 * loss,"), "6 numbers, 5 differ")]
)
def test_losses_of_a_script_and_its_port_are_compared_to_the_bit(tmp_path: Path, edits: str, outcome: str) -> None:
    (tmp_path / "train.py").write_text(PLAIN)
    (tmp_path / "port.ed").write_text(edits)
    done = run(FOLDER / "same_losses.py", tmp_path / "train.py", tmp_path / "port.ed", folder=ROOT, timeout=600)
    assert outcome in done.stdout, done.stderr
    assert done.returncode == ("0 differ" not in outcome)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["port.ed", "train.py"]
