"""The GPT example from end to end: with another plugin the same script draws the same loss curve."""

import json
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from programs import Ran, run

ROOT = Path(__file__).resolve().parents[2]
TRAIN = str(ROOT / "examples" / "gpt" / "train.py")
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
STEPS = 10
TINY = f"--width 32 --blocks 2 --heads 2 --context 16 --batch-size 8 --steps {STEPS} --output .".split()

# name: processes, options
JOBS = {
    "gpt fp32": (1, "--precision fp32"),
    "gpt fp32 ddp": (2, "--precision fp32 --plugin ddp"),
    "gpt fp16": (1, "--precision fp16"),
    "gpt fp16 hybrid": (4, "--precision fp16 --plugin hybrid --tp 2 --pp 2"),
    "vit fp32": (1, "--precision fp32 --model vit"),
    "vit fp32 hybrid": (2, "--precision fp32 --model vit --plugin hybrid --pp 2"),
    "separate models": (2, ""),
}

Done = tuple[Ran, Path]

pytestmark = pytest.mark.slow


def train(folder: Path, num_processes: int, options: str) -> Done:
    launch = ["-m", "booster", "run", "--nproc_per_node", str(num_processes)] if num_processes > 1 else []
    inherited = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    environment = {**inherited, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return run(*launch, TRAIN, *TINY, *options.split(), folder=folder, environment=environment, timeout=600), folder


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Done]]]:
    """Every job, started when the first test asks; two at a time, each in its own folder."""
    pool = ThreadPoolExecutor(2)
    yield {name: pool.submit(train, tmp_path_factory.mktemp("job"), *job) for name, job in JOBS.items()}
    pool.shutdown(cancel_futures=True)


def history_of(jobs: dict[str, Future[Done]], name: str) -> dict:
    done, folder = jobs[name].result()
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("*.json")
    return json.loads(path.read_text())


@pytest.mark.parametrize("name", ["gpt fp32", "gpt fp16", "vit fp32"])
def test_one_process_learns_and_validates(jobs: dict[str, Future[Done]], name: str) -> None:
    history = history_of(jobs, name)

    assert len(history["loss"]) == len(history["skipped"]) == STEPS
    assert sum(history["loss"][-3:]) < sum(history["loss"][:3])
    assert history["validation_loss"] < history["loss"][0]


@pytest.mark.parametrize(
    ("name", "tolerance"),
    [("gpt fp32 ddp", 5e-6), ("gpt fp16 hybrid", 2e-3), ("vit fp32 hybrid", 5e-6)],
)
def test_several_processes_draw_the_loss_curve_of_one(
    jobs: dict[str, Future[Done]], name: str, tolerance: float
) -> None:
    one, several = history_of(jobs, name.rpartition(" ")[0]), history_of(jobs, name)

    assert several["skipped"] == one["skipped"]
    assert several["loss_scale"] == one["loss_scale"]
    assert several["loss"] == pytest.approx(one["loss"], rel=0, abs=tolerance)
    assert several["validation_loss"] == pytest.approx(one["validation_loss"], rel=0, abs=tolerance)


def test_layers_and_stages_of_the_hybrid_are_on_different_processes(jobs: dict[str, Future[Done]]) -> None:
    assert history_of(jobs, "gpt fp32")["share"] == history_of(jobs, "gpt fp32 ddp")["share"] == 1
    assert 0.2 < history_of(jobs, "gpt fp16 hybrid")["share"] < 0.45
    assert 0.4 < history_of(jobs, "vit fp32 hybrid")["share"] < 0.6


def test_only_rank_0_of_a_job_prints(jobs: dict[str, Future[Done]]) -> None:
    done, _ = jobs["gpt fp16 hybrid"].result()

    assert done.stdout.count(f"step {STEPS:4d}") == done.stdout.count("validation loss") == 1


def test_several_processes_without_a_plugin_are_refused(jobs: dict[str, Future[Done]]) -> None:
    done, folder = jobs["separate models"].result()

    assert done.returncode != 0
    assert "--plugin none on 2 processes would train as many separate models" in done.stderr
    assert not list(folder.glob("*.json"))


@pytest.mark.parametrize("mode", ["ring_attn", "all_to_all"])
def test_ranks_that_share_sequences_have_the_losses_of_one(tmp_path: Path, mode: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    script = [str(ROOT / "examples" / "gpt" / "long_sequences.py"), "--tokens", "1000", "--steps", "4", "--mode", mode]
    losses = []
    for launch in ([], ["-m", "booster", "run", "--nproc_per_node", "2"]):
        done = run(*launch, *script, folder=tmp_path, environment=environment, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        losses.append([float(line.split("loss ")[1].split(",")[0]) for line in done.stdout.splitlines()])
    assert losses[1] == pytest.approx(losses[0], abs=5e-3)  # products in bfloat16, in another order
    assert losses[0][-1] < losses[0][0] - 0.3
