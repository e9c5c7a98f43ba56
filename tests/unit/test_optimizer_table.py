"""The page of optimizers shows what was tried, and torch's own train, resume and are freed as it says."""

import warnings
from pathlib import Path

import pytest
from optimizer_table import (
    PAGE,
    PLACEMENTS,
    PRECISIONS,
    RESUMED,
    ROWS,
    key_of,
    known,
    net,
    page,
    quiet_cell,
    resumed,
    start,
    version,
)

TORCH = [row for row in ROWS if row.package == "torch" and row.kind == "optimizer"]
QUICK = [("AdamW", "fp32"), ("SGD", "fp16"), ("Muon", "bf16_naive"), ("RMSprop", "8-bit states")]


def test_the_page_is_made_of_the_cells():
    assert PAGE.read_text() == page(), "run: python tests/support/optimizer_table.py"


def test_every_optimizer_of_torch_has_its_row_and_every_row_one_place():
    paths = [row.path + row.used for row in ROWS]
    assert sorted(set(paths)) == sorted(paths)
    assert {row.name for row in TORCH} >= {"Adam", "AdamW", "SGD", "Adagrad", "RMSprop", "LBFGS", "Muon", "Adafactor"}


def agrees(row, precision, tmp_path):
    assert (
        quiet_cell(row, precision, "one device", tmp_path / "run")
        == known()["cells"][key_of(row, precision, "one device")]
    ), "run: python tests/support/optimizer_table.py, and look at what changed"


@pytest.mark.slow_cases("SGD-fp16")
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


# ---- every optimizer resumes to the bit, or is refused by name before it has trained ----

CROSSED = [(number, row) for number, row in enumerate(ROWS) if row.kind == "optimizer" and version(row.package)]


def resumes_or_is_refused(row, result):
    """Whether a run goes on to the bit, or boost or save say by name what is not kept."""
    result = result.removeprefix("registered: ")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of packages, on their own code
        name = type(row.make(net())).__name__  # of some packages a class is called otherwise in them
    return result == "yes" or (result.startswith(("refused at boost: ", "refused at save: ")) and name in result)


@pytest.mark.slow
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_optimizer_resumes_to_the_bit_or_is_refused_by_name(placement):
    found = {}
    wanted = [(number, precision, placement) for number, _ in CROSSED for precision in RESUMED]
    start(wanted, lambda of, result: found.update({of: result}), "--resume")
    assert len(found) == len(wanted)
    wrong = {
        key_of(ROWS[of[0]], *of[1:]): result
        for of, result in found.items()
        if not resumes_or_is_refused(ROWS[of[0]], result)
    }
    assert not wrong


OF_EACH_KIND = [
    row for row in TORCH if row.name in ("AdamW", "LBFGS", "Muon")
]  # of elements, of all at once, of matrices


def resumed_here(rank, world_size, placement, folder):
    return {row.name: quiet_cell(row, "fp32", placement, Path(folder) / row.name, of=resumed) for row in OF_EACH_KIND}


@pytest.mark.slow_cases("DDP")
@pytest.mark.parametrize("placement", ["DDP", "ZeRO-2", "FSDP"])
def test_one_of_each_kind_resumes_to_the_bit_on_ranks_or_is_refused_by_name(run_on_ranks, tmp_path, placement):
    for cells in run_on_ranks(resumed_here, 2, placement, str(tmp_path)):
        assert {
            row.name: cells[row.name] for row in OF_EACH_KIND if not resumes_or_is_refused(row, cells[row.name])
        } == {}


@pytest.mark.slow_cases("bf16_naive")
@pytest.mark.parametrize("precision", ["bf16_naive", "8-bit states"])
def test_one_of_each_kind_resumes_to_the_bit_with_half_weights(tmp_path, precision):
    for row in OF_EACH_KIND:
        result = quiet_cell(row, precision, "one device", tmp_path / row.name, of=resumed)
        assert resumes_or_is_refused(row, result), result
