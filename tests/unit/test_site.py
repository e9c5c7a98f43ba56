"""The documentation as a site is whole: its menu has every page, its reference every public name and every option."""

import inspect
import json
import os
import re
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path

import cli_page
import pytest
from pages import ROOT

from booster import Booster, StepResult
from booster.interface.optimizer import OptimizerWrapper
from booster.mixed_precision import FP16NaiveMixedPrecision, FP16TorchMixedPrecision

DOCS = ROOT / "docs"
# Where names are public: what these export is in the reference.
MODULES = [
    "booster",
    "booster.checkpoint",
    "booster.memory",
    "booster.mixed_precision",
    "booster.mixed_precision.apex_amp",
    "booster.nn.lr_scheduler",
    "booster.numerics",
    "booster.plugin",
    "booster.plugin.tensor_parallel",
]
PARTS = {"booster.mixed_precision", "booster.nn", "booster.plugin", "booster.__version__"}  # no entries of their own
BOOSTERS_OWN = {name for name in vars(Booster) if not name.startswith("_")} - {"plugin", "memory"}
# Pages that show users what to write: not those of design, nor that of mistakes.
SPOKEN = [
    ROOT / "README.md",
    *(
        page
        for page in sorted(DOCS.rglob("*.md"))
        if page.stem not in ("design", "mistakes") and page.parent.name != "design"
    ),
]
MADE = {"changes.md", "contributing.md"}  # by tools/hooks.py, from files next to docs/


def documented() -> set[str]:
    """Every `::: name` of the reference."""
    pages = (DOCS / "reference").glob("*.md")
    return {name for page in pages for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)}


def test_the_menu_has_every_page_once() -> None:
    menu = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    named = re.findall(r": ([\w./-]+\.md)$", menu, re.MULTILINE)
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert sorted(named) == sorted(pages | MADE)
    assert {len(each) for each in re.findall("^( *)- ", menu, re.MULTILINE)} == {2, 6, 10}  # else it is no YAML


def test_menu_and_page_say_the_same_words() -> None:
    menu = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    for words, name in re.findall(r'^ *- "?([^"\n]+?)"?: ([\w./-]+\.md)$', menu, re.MULTILINE):
        if name not in MADE:
            title = re.search(r"^# (.+)$", (DOCS / name).read_text(), re.MULTILINE)
            assert title is not None, name
            assert title[1] == words, name


def test_pages_for_users_are_read_in_eight_minutes() -> None:
    """1,800 words, tables and code included; what is longer is two pages, or says what another page says."""
    menu = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1].split("\n  - Reference:")[0]
    pages = [ROOT / "README.md", *(DOCS / name for name in re.findall(r": ([\w./-]+\.md)$", menu, re.MULTILINE))]
    assert {path.name: words for path in pages if (words := len(path.read_text().split())) > 1800} == {}


def test_lines_of_code_are_whole_beside_both_menus() -> None:
    """100 characters, for which docs/site.css makes room; a few calls with five results have some more."""
    long = []
    for path in [ROOT / "README.md", *DOCS.rglob("*.md")]:
        if path != cli_page.PAGE:
            blocks = re.findall(r"^```\w+\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)
            long += [line for block in blocks for line in block.splitlines() if len(line) > 104]
    assert [line for line in long if "}[dtype], fused_optimizer=False)" not in line] == []  # of a script of others


@pytest.mark.parametrize("page", SPOKEN, ids=lambda path: path.stem)
def test_what_a_page_calls_is_there(page: Path) -> None:
    """`b` is the Booster on every page, `optimizer` what boost returned, and `result` what its step returned."""
    text = page.read_text()
    owners: dict[str, type] = {"b": Booster}
    if page.parent.name != "migration":  # their left columns are the calls of others
        owners |= {"optimizer": OptimizerWrapper, "result": StepResult}
    for name, owner in owners.items():
        fields = {"precision", "plugin", "device"} | set(getattr(owner, "__dataclass_fields__", ()))
        called = re.findall(rf"(?<![\w.]){name}\.([a-z_]+)", text)
        assert [each for each in called if each not in fields and not hasattr(owner, each)] == []
    assert [each for each in re.findall(r"(?<![\w./])booster\.([a-z_]+)\(", text) if each in BOOSTERS_OWN] == []


def test_the_guide_of_choice_says_what_was_measured() -> None:
    measured = (DOCS / "measured/half_products.md").read_text()
    products = re.search(r"^\| AVX512_CORE_AMX \|[^|]*\| (\d+) / (\d+) ", measured, re.MULTILINE)
    step = re.search(
        r"which is AVX512_CORE_BF16\n.*?^\| ViT (?:\|[^|]*){2}\| [\d.]+ / ([\d.]+) ", measured, re.MULTILINE | re.DOTALL
    )
    assert products is not None
    assert step is not None
    text = (DOCS / "guides/choose.md").read_text()
    assert f"products {int(products[2]) / int(products[1]):.0f} times as fast" in text
    assert round(1 / float(step[1])) == 2
    assert "a whole ViT step, about twice as fast" in text


def test_the_tables_name_every_error_variable_and_logger() -> None:
    page = (DOCS / "reference/tables.md").read_text()
    source = {path: path.read_text() for path in (ROOT / "booster").rglob("*.py")}
    text = "".join(source.values())
    public = [getattr(import_module(module), name) for module in MODULES for name in import_module(module).__all__]
    errors = [each.__name__ for each in public if isinstance(each, type) and issubclass(each, BaseException)]
    variables = re.findall(r"environ(?:\.get\(|\.pop\(|\[)\"([A-Z_]+)\"|VARIABLE = \"([A-Z_]+)\"", text)
    variables += [(name, "") for name in re.findall(r'"((?:SLURM|OMPI)_[A-Z_]+)"', source[ROOT / "booster/launch.py"])]
    named = {name for pair in variables for name in pair if name}
    assert {name for name in [*errors, *named] if not re.search(rf"\b{name}\b", page)} == set()
    loggers = re.findall(r"`(booster\.[\w.*]+)`", page.split("## Loggers")[1])
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path, content in source.items()
        if "getLogger(__name__)" in content
    ]
    assert [each for each in modules if not any(fnmatch(each, name) for name in loggers)] == []
    assert [name for name in loggers if not any(fnmatch(each, name) for each in [*modules, "booster.numerics"])] == []


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_in_the_reference(module: str) -> None:
    public = {f"{module}.{name}" for name in import_module(module).__all__}
    assert public - PARTS - documented() == set()


def test_every_name_of_the_reference_is_there() -> None:
    for name in sorted(documented() - {"booster.logging"}):
        module, _, last = name.rpartition(".")
        assert hasattr(import_module(module), last), name


def test_the_guide_of_options_names_every_option_of_fp16() -> None:
    text = (DOCS / "guides/options.md").read_text()
    names = inspect.signature(FP16TorchMixedPrecision).parameters
    assert [name for name in names if f"`{name}" not in text and f"## {name}" not in text] == []


def test_the_guide_of_half_weights_and_the_reference_it_points_to_name_every_option() -> None:
    text = (DOCS / "guides/half_weights.md").read_text()
    (section,) = re.findall(r"^## All options\n(.*?)^## ", text, re.MULTILINE | re.DOTALL)
    names, described = inspect.signature(FP16NaiveMixedPrecision).parameters, inspect.getdoc(FP16NaiveMixedPrecision)
    assert "(../reference/precisions.md)" in section
    assert described is not None
    assert [name for name in names if f"`{name}" not in text and not re.search(rf"\b{name}\b", described)] == []
    listed = set(re.findall(r"`(\w+)(?:=\w+)?`", section)) - {"boost", "zero_grad", "BF16NaiveMixedPrecision"}
    assert listed - {FP16NaiveMixedPrecision.__name__} <= names.keys()


@pytest.mark.parametrize("command", cli_page.commands(), ids=" ".join)
def test_every_option_of_a_command_is_in_its_page(command: tuple[str, ...]) -> None:
    sections = re.split(r"^## ", cli_page.PAGE.read_text(), flags=re.MULTILINE)
    (shown,) = [section for section in sections if section.startswith(f"{' '.join(command)}\n")]
    assert _options(cli_page.help_of(command)) == _options(shown), "python tests/support/cli_page.py writes the page"


def test_a_look_at_the_help_of_a_command_leaves_the_width_for_the_tests_that_follow() -> None:
    before = dict(os.environ)
    cli_page.help_of(("env",))
    assert os.environ == before


@pytest.mark.parametrize("picture", sorted((DOCS / "images").glob("*.svg")), ids=lambda path: path.stem)
def test_every_figure_is_there_for_light_pages_and_for_dark_ones(picture: Path) -> None:
    name = picture.stem.removesuffix("-dark")
    assert name == "favicon" or all((DOCS / "images" / f"{name}{end}.svg").exists() for end in ("", "-dark"))


def test_figures_are_drawn_by_scripts_of_the_repository() -> None:
    drawn = {
        name
        for path in (ROOT / "benchmarks/figures").glob("*.py")
        for name in re.findall(r'draw\("(\w+)"', path.read_text())
    }
    assert drawn == {path.stem.removesuffix("-dark") for path in (DOCS / "images").glob("*.svg")} - {"favicon"}
    taken = re.findall(r'"(\w+\.png)"', (ROOT / "benchmarks/figures/pictures.py").read_text())
    assert set(taken) == {path.name for path in (DOCS / "images").glob("*.png")}


@pytest.mark.parametrize("results", ["matrix", "resume"])
def test_the_map_may_say_that_all_cells_passed(results: str) -> None:
    passed = {tuple(cell) for cell in json.loads((ROOT / f"benchmarks/results/{results}.json").read_text())["passed"]}
    assert passed == {(precision, parallelism) for precision, _ in passed for _, parallelism in passed}


def _options(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", text))
