"""The Python in README.md and docs/ runs as it is, and links of the pages lead somewhere."""

import re
from pathlib import Path

import pytest
from pages import ROOT, as_script, run_page

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", PAGES, ids=_name)
def test_the_python_of_a_page_runs(path: Path, tmp_path: Path) -> None:
    if not as_script(path.read_text()).strip():
        return
    result = run_page(path.read_text(), tmp_path)
    assert result.returncode == 0, f"{_name(path)}, by line number:\n{result.stderr[-3000:]}"


@pytest.mark.parametrize("path", PAGES, ids=_name)
def test_links_of_a_page_lead_to_files_and_headings_that_exist(path: Path) -> None:
    for target in re.findall(r"\]\((?!https?://)([^)\s]+)\)", path.read_text()):
        name, _, anchor = target.partition("#")
        file = (path.parent / name) if name else path
        assert file.exists(), f"{_name(path)} links to {target}"
        assert not anchor or anchor in _anchors(file.read_text()), f"{_name(path)} links to {target}"


def test_the_script_of_colossalai_runs_with_the_lines_that_its_page_changes(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "migration" / "colossalai.md").read_text()
    before, answers = re.findall(r"^```python\n(.*?)^```\n(.*?)^\|", page, re.MULTILINE | re.DOTALL)[0]
    answers = re.sub(r"\s+", " ", answers)
    lines = before.splitlines()
    for old, new in {
        "import colossalai": "import booster",
        "from colossalai.booster import Booster": "from booster import Booster",
        "from colossalai.booster.plugin import TorchDDPPlugin": "from booster.plugin import TorchDDPPlugin",
        "colossalai.launch_from_torch()": "booster.launch_from_torch()",
        "    loader.sampler.set_epoch(epoch)": "",
        "        x, y = x.cuda(), y.cuda()": "",
    }.items():
        assert f"`{new}`" in answers or (
            not new and any(name in old and name in answers for name in ("set_epoch", ".cuda()"))
        )
        lines[lines.index(old)] = new
    assert "colossalai" not in "\n".join(lines)
    result = run_page("\n".join(["```python", BEFORE_THE_SCRIPT, *lines, "```"]), tmp_path)
    assert result.returncode == 0, result.stderr[-3000:]


# What that script has from lines before it; on one process its loader is not divided, and needs no launcher.
BEFORE_THE_SCRIPT = """
import torch

dataset = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randint(0, 4, (64,)))
model, criterion = torch.nn.Linear(8, 4), torch.nn.CrossEntropyLoss()
optimizer = torch.optim.AdamW(model.parameters())
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=2)
"""


def test_a_block_that_fails_is_reported_with_its_line_in_the_page(tmp_path: Path) -> None:
    result = run_page("# Page\n\n```python\nx = 1\n```\n\ntext\n\n```python\nx / 0\n```\n", tmp_path)
    assert result.returncode == 1
    assert "line 10" in result.stderr
    assert "ZeroDivisionError" in result.stderr


def test_blocks_of_a_page_share_their_names_and_warnings_are_errors(tmp_path: Path) -> None:
    page = "```python\nimport warnings\n```\n\n```python\nwarnings.warn('old')\n```\n"
    assert "UserWarning: old" in run_page(page, tmp_path).stderr


def test_only_python_that_is_not_exempt_runs() -> None:
    exempt = "<!-- not run: needs two machines -->\n```python\nraise SystemExit(1)\n```\n"
    other = "```bash\nexit 1\n```\n"
    assert as_script(exempt + other).strip() == ""
    assert as_script(exempt + "\n```python\nx = 1\n```\n").strip() == "x = 1"


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "docs/design.md"])
def test_files_that_a_page_names_exist(name: str) -> None:
    named = re.findall(r"`([\w./]+\.py)`", (ROOT / name).read_text())
    assert named
    files = [f"/{path.relative_to(ROOT)}" for path in [*ROOT.glob("booster/**/*.py"), *ROOT.glob("*s/**/*.py")]]
    assert [file for file in named if "NAME" not in file and not any(p.endswith(f"/{file}") for p in files)] == []


def test_what_the_design_says_to_open_is_there() -> None:
    rows = (ROOT / "docs/design.md").read_text().split("## 3. What to change")[1].split("\n## ")[0]
    targets = [line.split("|")[2] for line in rows.splitlines() if line.startswith("|")][2:]
    assert len(targets) > 10
    elsewhere = {"group", "place", "pp_style", "state_dict", "fully_shard"}  # not of the file named before
    for target in targets:
        file = ""
        for named in re.findall(r"`([\w./]*\w)`", target):
            if named.endswith(".py"):
                file = (ROOT / ("" if named.startswith("tests/") else "booster") / named).read_text()
            elif named not in elsewhere:
                words = [rf"(class|def) {word}\b|^{word}\b" for word in named.split(".")]
                missing = [word for word in words if not re.search(word, file, re.MULTILINE)]
                assert missing == [], f"{named} is not in the file named before"


def test_the_map_of_the_pipeline_shows_every_file() -> None:
    folder = ROOT / "booster/plugin/pipeline"
    shown = re.findall(r"^    (\w+\.py) ", (folder / "__init__.py").read_text(), re.MULTILINE)
    assert sorted(shown) == sorted(path.name for path in folder.glob("*.py") if path.name != "__init__.py")


def test_every_example_of_extending_is_linked() -> None:
    for page in ("CONTRIBUTING.md", "docs/**/*.md"):
        text = "".join(path.read_text() for path in ROOT.glob(page))
        missing = [p.name for p in ROOT.glob("examples/extending/*.py") if f"examples/extending/{p.name})" not in text]
        assert missing == [], page


def _anchors(page: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_each_entry_of_the_changelog_stands_there_once() -> None:
    entries = re.findall(r"^- \*\*(.+?)\*\*", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert entries
    assert sorted(entries) == sorted(set(entries))
