"""The page of optimizers shows what was tried, and torch's own train, resume and are freed as it says."""

import pytest
from optimizer_table import PAGE, PRECISIONS, ROWS, key_of, known, page, quiet_cell, version

TORCH = [row for row in ROWS if row.package == "torch" and row.kind == "optimizer"]
QUICK = [("AdamW", "fp32"), ("SGD", "fp16"), ("Muon", "bf16_naive"), ("RMSprop", "8-bit states")]


def test_the_page_is_made_of_the_cells():
    assert PAGE.read_text() == page(), "run: python tests/support/optimizer_table.py"


def test_every_optimizer_of_torch_has_its_row_and_every_row_one_place():
    paths = [row.path for row in ROWS]
    assert sorted(set(paths)) == sorted(paths)
    assert {row.name for row in TORCH} >= {"Adam", "AdamW", "SGD", "Adagrad", "RMSprop", "LBFGS", "Muon", "Adafactor"}


def agrees(row, precision, tmp_path):
    assert (
        quiet_cell(row, precision, "one device", tmp_path / "run")
        == known()["cells"][key_of(row, precision, "one device")]
    ), "run: python tests/support/optimizer_table.py, and look at what changed"


@pytest.mark.parametrize(("name", "precision"), QUICK)
def test_torchs_own_do_what_the_table_says(name, precision, tmp_path):
    agrees(next(row for row in TORCH if row.name == name), precision, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.path)
def test_all_that_are_installed_do_what_the_table_says(row, precision, tmp_path):
    stored = known()
    if version(row.package) is None or stored["versions"].get(row.package) != version(row.package):
        pytest.skip(f"{row.package} {stored['versions'].get(row.package)} is not installed")
    if key_of(row, precision, "one device") not in stored["cells"]:
        pytest.skip("this cell was not tried yet")
    agrees(row, precision, tmp_path)
