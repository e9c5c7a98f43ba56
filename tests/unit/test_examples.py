"""The examples run, learn, and stay small."""

import difflib
import os
import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from programs import Ran, run

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
FEATURES = sorted(path.stem for path in (EXAMPLES / "features").glob("*.py") if path.stem != "fashion")


def run_in(folder: Path, *arguments: str) -> Ran:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return run(*arguments, folder=folder, environment=environment, timeout=240)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Ran]]]:
    """Every example, started when the first test asks; two at a time, each in a folder of its own."""
    commands = {name: [str(EXAMPLES / "features" / f"{name}.py")] for name in FEATURES}
    commands["quickstart"] = [str(EXAMPLES / "quickstart.py")]
    launch = ["-m", "booster", "run", "--nproc_per_node", "2"]
    commands["evaluation on two processes"] = [*launch, str(EXAMPLES / "features" / "evaluation.py")]
    train = str(EXAMPLES / "vit" / "train.py")
    commands["vit"] = [train, "--compare", "fp32,bf16", "--steps", "5", "--batch-size", "16", "--output", "pictures"]
    commands["conflict"] = [train, "--recipe", "tutorial", "--lr", "0.5"]
    pool = ThreadPoolExecutor(2)
    yield {name: pool.submit(run_in, tmp_path_factory.mktemp("run"), *command) for name, command in commands.items()}
    pool.shutdown(cancel_futures=True)


def output_of(runs: dict[str, Future[Ran]], name: str) -> str:
    done = runs[name].result()
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_vision_transformer_trains_in_two_precisions_and_compares_them(runs: dict[str, Future[Ran]]) -> None:
    output = output_of(runs, "vit")

    for precision in ("fp32", "bf16"):
        table = output[output.index("precision") :]
        row = next(line for line in table.splitlines() if line.startswith(f"{precision} "))
        steps, loss, accuracy = row.split()[1:4]
        assert steps == "5"
        assert 1.5 < float(loss) < 3.5
        assert 5 < float(accuracy.rstrip("%")) < 70
    for written in ("fp32-bf16.png", "fp32.html", "bf16.html"):
        assert f"wrote pictures/{written}" in output


def test_a_conflicting_flag_ends_the_program_before_it_trains(runs: dict[str, Future[Ran]]) -> None:
    done = runs["conflict"].result()

    assert done.returncode == 2
    assert "--recipe tutorial fixes lr 0.01; it conflicts with --lr 0.5" in done.stderr


def test_the_quickstart_is_short_and_learns(runs: dict[str, Future[Ran]]) -> None:
    assert len((EXAMPLES / "quickstart.py").read_text().splitlines()) <= 60
    assert accuracy_in(output_of(runs, "quickstart")) > 75


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


@pytest.mark.parametrize("name", sorted(set(FEATURES) - {"gan_two_optimizers", "resume"}))  # these print no accuracy
def test_a_feature_learns(runs: dict[str, Future[Ran]], name: str) -> None:
    assert accuracy_in(output_of(runs, name)) > 70


def test_every_feature_ends_well(runs: dict[str, Future[Ran]]) -> None:
    for name in FEATURES:
        output_of(runs, name)


def test_the_custom_strategy_keeps_its_loss_scale(runs: dict[str, Future[Ran]]) -> None:
    assert re.findall(r"loss scale (\d+)", output_of(runs, "custom_strategy")) == ["1024", "1024"]


def test_the_pinned_modules_compute_in_float32_and_the_others_do_not(runs: dict[str, Future[Ran]]) -> None:
    dtypes = dict(re.findall(r"'(\w+)': torch\.(\w+)", output_of(runs, "keep_fp32")))
    assert (dtypes["hidden"], dtypes["norm"], dtypes["head"]) == ("bfloat16", "float32", "float32")


def test_the_resumed_run_equals_the_one_without_a_break(runs: dict[str, Future[Ran]]) -> None:
    output = output_of(runs, "resume")
    assert "to the bit: True" in output
    assert len(set(re.findall(r"scale (\d+)", output))) == 1
    assert re.findall(r"scale (\d+)", output) != ["65536"] * 4  # else the scale's counters were not tested


def test_both_players_of_the_gan_take_nearly_all_steps(runs: dict[str, Future[Ran]]) -> None:
    skipped = re.findall(r"skipped (\d+)", output_of(runs, "gan_two_optimizers"))
    assert len(skipped) == 4
    assert max(map(int, skipped)) < 20


@pytest.mark.slow
def test_two_processes_evaluate_every_image_once(runs: dict[str, Future[Ran]]) -> None:
    output = output_of(runs, "evaluation on two processes")
    assert output.count("3999 images") == 1
    assert accuracy_in(output) > 75


def accuracy_in(output: str) -> float:
    return float(re.search(r"accuracy (\d+\.\d)%", output).group(1))  # type: ignore[union-attr]
