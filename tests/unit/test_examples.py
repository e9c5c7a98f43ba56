"""The examples run, learn, and stay small."""

import difflib
import lzma
import os
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from programs import Ran, run

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
FEATURES = sorted(path.stem for path in (EXAMPLES / "features").glob("*.py") if path.stem != "fashion")
VIT = ["vit/train.py", "--compare", "fp32,bf16", "--steps", "5", "--batch-size", "16", "--output", "pictures"]
# Images for training and for testing, and the percent that a program then names correctly.
FEW, ALL = (2_000, 4_000), (10_000, 4_000)
LEARNT = [pytest.param(FEW, 55, id="2,000 images"), pytest.param(ALL, 70, id="all images", marks=pytest.mark.slow)]

Start = Callable[..., Ran]


def with_first_images(folder: Path, train: int, test: int) -> Path:
    """A copy of the examples with the first so many images of each set as their data."""
    copy = folder / "examples"
    shutil.copytree(EXAMPLES, copy, ignore=shutil.ignore_patterns("__pycache__", "*.xz"))
    for split, number in (("train", train), ("t10k", test)):
        for kind, header, size in (("images-idx3", 16, 28 * 28), ("labels-idx1", 8, 1)):
            name = f"data/fashion_mnist_subset/{split}-{kind}-ubyte.xz"
            content = lzma.decompress((EXAMPLES / name).read_bytes())
            said = content[:4] + number.to_bytes(4, "big") + content[8:header]
            (copy / name).write_bytes(lzma.compress(said + content[header : header + number * size], preset=0))
    return copy


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    """`start(*command, images=ALL)`: what a program of the examples did, in its own folder; each runs once."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    @cache
    def examples(images: tuple[int, int]) -> Path:
        return EXAMPLES if images == ALL else with_first_images(tmp_path_factory.mktemp("few"), *images)

    @cache
    def started(*command: str, images: tuple[int, int] = ALL) -> Ran:
        words = [str(examples(images) / word) if word.endswith(".py") else word for word in command]
        return run(*words, folder=tmp_path_factory.mktemp("run"), environment=environment, timeout=600)

    return started


def output_of(done: Ran) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "images", [pytest.param((80, 40), id="few images"), pytest.param(ALL, id="all images", marks=pytest.mark.slow)]
)
def test_the_vision_transformer_trains_in_two_precisions_and_compares_them(
    start: Start, images: tuple[int, int]
) -> None:
    output = output_of(start(*VIT, images=images))

    for precision in ("fp32", "bf16"):
        table = output[output.index("precision") :]
        row = next(line for line in table.splitlines() if line.startswith(f"{precision} "))
        steps, loss, accuracy = row.split()[1:4]
        assert steps == "5"
        assert 1.5 < float(loss) < 3.5
        assert 5 < float(accuracy.rstrip("%")) < 70
    for written in ("fp32-bf16.png", "fp32.html", "bf16.html"):
        assert f"wrote pictures/{written}" in output


def test_a_conflicting_flag_ends_the_program_before_it_trains(start: Start) -> None:
    done = start("vit/train.py", "--recipe", "tutorial", "--lr", "0.5")

    assert done.returncode == 2
    assert "--recipe tutorial fixes lr 0.01; it conflicts with --lr 0.5" in done.stderr


def test_the_quickstart_is_short_and_learns(start: Start) -> None:
    assert len((EXAMPLES / "quickstart.py").read_text().splitlines()) <= 60
    assert accuracy_in(output_of(start("quickstart.py"))) > 75


def test_the_quickstart_imports_nothing_beyond_torch() -> None:
    imported = re.findall(r"^(?:from|import) (\w+)", (EXAMPLES / "quickstart.py").read_text(), flags=re.MULTILINE)
    assert set(imported) <= {"lzma", "pathlib", "torch", "booster"}


@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_is_a_small_difference_from_the_quickstart(name: str) -> None:
    # Without the reading of the data, which the features share and the quickstart shows.
    base, feature = (
        [
            line
            for line in re.sub(r'^.*?"""\n\n|def read.*?\n\n\n', "", path.read_text(), flags=re.DOTALL).splitlines()
            if line
        ]
        for path in (EXAMPLES / "quickstart.py", EXAMPLES / "features" / f"{name}.py")
    )
    assert any("feature" in line and line.lstrip().startswith("#") for line in feature)
    kept = sum(block.size for block in difflib.SequenceMatcher(None, base, feature).get_matching_blocks())
    assert kept / len(base) > 1 / 3
    assert len(feature) < 2 * len(base)


@pytest.mark.slow_cases("activation_checkpointing")
@pytest.mark.slow_cases(
    "gradient_clipping", "keep_fp32", "gradient_accumulation", "precision_schedule", "trackers", "custom_strategy"
)
@pytest.mark.crossed
@pytest.mark.parametrize(("images", "percent"), LEARNT)
@pytest.mark.parametrize("name", sorted(set(FEATURES) - {"gan_two_optimizers", "resume"}))  # these print no accuracy
def test_a_feature_learns(start: Start, name: str, images: tuple[int, int], percent: int) -> None:
    assert accuracy_in(output_of(start(f"features/{name}.py", images=images))) > percent


def test_the_custom_strategy_keeps_its_loss_scale(start: Start) -> None:
    output = output_of(start("features/custom_strategy.py", images=FEW))
    assert re.findall(r"loss scale (\d+)", output) == ["1024", "1024"]


def test_the_pinned_modules_compute_in_float32_and_the_others_do_not(start: Start) -> None:
    dtypes = dict(re.findall(r"'(\w+)': torch\.(\w+)", output_of(start("features/keep_fp32.py", images=FEW))))
    assert (dtypes["hidden"], dtypes["norm"], dtypes["head"]) == ("bfloat16", "float32", "float32")


@pytest.mark.slow
def test_the_resumed_run_equals_the_one_without_a_break(start: Start) -> None:
    output = output_of(start("features/resume.py"))
    assert "to the bit: True" in output
    assert len(set(re.findall(r"scale (\d+)", output))) == 1
    assert re.findall(r"scale (\d+)", output) != ["65536"] * 4  # else the scale's counters were not tested


@pytest.mark.parametrize(
    "images", [pytest.param(FEW, id="2,000 images"), pytest.param(ALL, id="all images", marks=pytest.mark.slow)]
)
def test_both_players_of_the_gan_take_nearly_all_steps(start: Start, images: tuple[int, int]) -> None:
    skipped = re.findall(r"skipped (\d+)", output_of(start("features/gan_two_optimizers.py", images=images)))
    assert len(skipped) == 4
    assert max(map(int, skipped)) < 20


@pytest.mark.slow
def test_two_processes_evaluate_every_image_once(start: Start) -> None:
    output = output_of(start("-m", "booster", "run", "--nproc_per_node", "2", "features/evaluation.py"))
    assert output.count("3999 images") == 1
    assert accuracy_in(output) > 75


def accuracy_in(output: str) -> float:
    return float(re.search(r"accuracy (\d+\.\d)%", output).group(1))  # type: ignore[union-attr]
