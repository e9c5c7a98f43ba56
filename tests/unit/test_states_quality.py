"""The tables of benchmarks/results/quality.md on packed states come from the record of their runs."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.quality import Record
from benchmarks.states_quality import LENGTHS, NAMES, PACKED, WIDE, compare, table

RECORD = Record(ROOT / "benchmarks" / "figures" / "states_quality.jsonl")


def row(mode, seed, accuracy, **others):
    return {
        "model": "mlp",
        "optimizer": "adamw",
        "length": 5,
        "mode": mode,
        "seed": seed,
        "accuracy": accuracy,
        **others,
    }


@pytest.mark.parametrize("model", LENGTHS)
def test_the_page_shows_what_the_record_holds(model):
    assert table(RECORD, model, LENGTHS[model]) in (ROOT / "benchmarks" / "results" / "quality.md").read_text()


@pytest.mark.parametrize("model", LENGTHS)
def test_every_optimizer_was_run_on_five_seeds_and_lies_within_what_is_allowed(model):
    rows = table(RECORD, model, LENGTHS[model]).splitlines()[2:]
    assert [line.split(" | ")[0].strip("| ") for line in rows] == list(NAMES.values())
    assert all(line.split(" | ")[1] == "5" and line.endswith("| within |") for line in rows)


def test_a_difference_of_a_point_or_two_standard_errors_is_allowed_and_no_more():
    assert compare([80.0, 80.0], [81.0, 81.0]) == (1.0, 1.0)
    apart, allowed = compare([70.0, 80.0], [72.0, 74.0])
    assert apart == -2.0
    assert allowed == pytest.approx(2 * (25.0 + 1.0) ** 0.5)


def test_a_table_counts_only_seeds_that_both_were_run_on_and_runs_of_its_length(tmp_path):
    record = Record(None)
    for seed, wide, packed in ((0, 80.0, 80.5), (1, 82.0, 84.5)):
        record.add(row(WIDE, seed, wide))
        record.add(row(PACKED, seed, packed))
    record.add(row(WIDE, 2, 10.0))
    record.add(row(PACKED, 3, 10.0))
    record.add(row(PACKED, 0, 10.0) | {"length": 1})
    assert table(record, "mlp", 5).splitlines()[2:] == [
        "| AdamW | 2 | 81.00 ± 2.00 | 82.50 ± 4.00 | +1.50 | 4.47 | within |"
    ]
