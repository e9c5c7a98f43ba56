"""The table of loss curves in docs/measured/half_products.md comes from the record of their runs."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

curves = pytest.importorskip("benchmarks.half_products_curves", reason="examples are not installed")

from benchmarks.quality import Record

RECORD = Record(ROOT / "benchmarks" / "figures" / "half_products_curves.jsonl")


def row(choice, seed, losses):
    return {"model": "vit", "precision": "bf16", "choice": choice, "seed": seed, "losses": losses}


def test_the_page_shows_what_the_record_holds_and_every_curve_lies_within_the_spread_of_seeds():
    lines = list(curves.rows(RECORD))
    assert len(lines) == len(curves.MODELS) * len(curves.STEPS)
    assert all(within for _, within in lines)
    table = "\n".join([curves.HEAD, *(line for line, _ in lines)])
    assert table in (ROOT / "docs" / "measured" / "half_products.md").read_text()


@pytest.mark.parametrize(("off", "within"), [(0.05, True), (0.2, False)])
def test_curves_are_apart_that_differ_by_more_than_seeds_do(off, within):
    record = Record(None)
    for seed, losses in enumerate(([2.0] * 10 + [1.0] * 10, [2.1] * 10 + [1.1] * 10)):
        record.add(row("native", seed, losses))
        record.add(row("float32", seed, [loss + off for loss in losses]))
    assert [found for _, found in curves.rows(record)] == [within]


def test_a_curve_of_a_few_steps_is_made_the_same_again():
    once, again = (curves.losses("gpt", "bf16", "float32", 0, 2) for _ in range(2))
    assert once == again
