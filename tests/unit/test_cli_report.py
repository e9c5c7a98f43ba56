"""`booster report`: what it says of a run, as text and as JSON, and its exit statuses."""

import builtins
import json
import math

import pytest
from prescribed import parameters, sgd, step_on
from test_page import step
from test_record import INF, recorded

from booster.cli import main
from booster.numerics.record.recorded_run import Run
from booster.numerics.reports.terminal import _show_rounded, show, sparkline


@pytest.fixture
def run(tmp_path):
    """A record of ten steps, of which two were skipped and all others clipped."""
    params = parameters(3, 2)
    optimizer = sgd(params, scale=1024.0, clip_grad_norm=1.0)
    with recorded(tmp_path, optimizer):
        for step in range(10):
            step_on(optimizer, params, 2.0, INF if step in (4, 5) else 1.0, value=10.0 - step)
    return tmp_path


def test_the_summary_names_losses_scales_skips_and_culprits(run, capsys):
    pytest.importorskip("rich", reason="the summary is drawn by rich")
    assert main(["report", str(run)]) == 0
    said = capsys.readouterr().out
    assert "steps 1 to 10, 2 skipped" in said
    assert "clipped in 100.0% of the steps" in said
    rows = {line.split("  ")[0]: line.split() for line in said.splitlines()}
    assert rows["loss"][1:5] == ["10", "1", "1", "10"]
    assert rows["loss scale"][2:6] == ["1024", "256", "256", "1024"]
    assert rows["p1"] == ["p1", "2"]
    assert "p0" not in rows
    assert "Skipped 2 steps, nonfinite_grad: gradients held an inf or NaN" in " ".join(said.split())


@pytest.mark.parametrize(
    ("values", "shown"), [((math.nan, math.nan), ["nan", "nan"]), ((INF, math.nan), ["inf", "nan"])]
)
def test_a_run_whose_losses_are_all_not_finite_says_so(values, shown, tmp_path, capsys):
    params = parameters(3, 2)
    optimizer = sgd(params)
    with recorded(tmp_path / "run", optimizer):
        for value in values:
            step_on(optimizer, params, 2.0, 1.0, value=value)
    assert main(["report", "--json", str(tmp_path / "run")]) == 0
    (found,) = json.loads(capsys.readouterr().out)["optimizers"]
    assert (found["loss"], found["nonfinite_losses"]) == (None, 2)
    assert main(["report", str(tmp_path / "run"), "--html", str(tmp_path / "page.html")]) == 0
    assert "<dt>last loss</dt><dd>none finite</dd>" in (tmp_path / "page.html").read_text()
    capsys.readouterr()
    pytest.importorskip("rich", reason="the summary is drawn by rich")
    assert main(["report", str(tmp_path / "run")]) == 0
    rows = {line.split("  ")[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    assert rows["loss"] == ["loss", *shown, "××"]


def test_names_that_are_too_long_differ_nevertheless_and_many_culprits_alike_are_one_line(
    tmp_path, capsys, monkeypatch
):
    console = pytest.importorskip("rich.console", reason="the summary is drawn by rich").Console(width=80)
    names = [f"encoder.{n}.attention.projections.{end}" for n in range(4) for end in ("weight", "bias", "scale")]
    rows = [
        dict(zip(("name", "product", "operand", "format"), (name, "forward", "weight", "e4m3"), strict=True))
        | {"top": 0.5, "underflow": 0.25, "saturated": 0.0}
        for name in names
    ]
    _show_rounded(console, rows[:6])
    lines = capsys.readouterr().out.splitlines()
    shown = [line.split()[0] for line in lines if "e4m3" in line]
    assert len(set(shown)) == 6
    assert max(map(len, lines)) <= 80
    monkeypatch.setenv("COLUMNS", "80")
    bad = {"applied": False, "reason": "nonfinite_loss", "loss_scale": 8.0}
    steps = [step(1, 1.0, loss_scale=8.0), step(2, INF, **bad, culprit=tuple(names))]
    show(Run(tmp_path, {}, {"0": steps}))
    said = capsys.readouterr().out
    assert "All 12 parameters that are named held an inf or NaN equally often, in 1 step." in " ".join(said.split())
    assert names[0] not in said


def test_a_sample_that_overflowed_is_told_beside_the_room_of_the_others(tmp_path, capsys):
    pytest.importorskip("rich", reason="the summary is drawn by rich")
    params = parameters(3, 2)
    optimizer = sgd(params, scale=1024.0)
    with recorded(tmp_path / "run", optimizer, every=1):
        for gradient in (INF, 1.0, 1.0):
            step_on(optimizer, params, 2.0, gradient)
    assert main(["report", str(tmp_path / "run")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "In 3 samples gradients came within" in said
    assert "bits of overflow, and in 1 of them some held an inf or NaN. Of constant loss scales" in said
    assert main(["report", str(tmp_path / "run"), "--html", str(tmp_path / "page.html")]) == 0
    assert "<dt>least headroom</dt><dd>none</dd>" in (tmp_path / "page.html").read_text()


def test_json_has_the_same_numbers(run, capsys):
    assert main(["report", "--json", str(run)]) == 0
    (optimizer,) = json.loads(capsys.readouterr().out)["optimizers"]
    assert (optimizer["num_steps"], optimizer["num_skipped"], optimizer["clipped"]) == (10, 2, 1.0)
    assert optimizer["loss"] == [10.0, 1.0, 1.0, 10.0]
    assert optimizer["skips_by_culprit"] == {"p1": 2}


def test_no_record_is_status_1_with_the_reason(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 1
    assert "booster report: there is no record in" in capsys.readouterr().err


def test_without_rich_the_error_names_the_line_that_installs_it(run, capsys, monkeypatch):
    real = builtins.__import__

    def refuse(name, *arguments, **options):
        if name.partition(".")[0] == "rich":
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    assert main(["report", str(run)]) == 1
    assert "pip install rich" in capsys.readouterr().err
    assert main(["report", "--json", str(run)]) == 0


def test_a_sparkline_has_a_bar_for_each_stretch_of_steps():
    assert sparkline([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]) == "▁▂▃▄▅▆▇█"
    assert sparkline([1.0, None, INF, 1.0]) == "▁ ×▁"
    assert len(sparkline([1.0] * 1000, width=32)) <= 32
    assert sparkline([1.0, 2.0, 4.0, 8.0], logarithmic=True)[1] == "▃"


def test_a_page_without_a_name_lies_in_the_folder_of_the_record(run, capsys):
    for argv in (["report", str(run), "--html"], ["report", "--html", str(run)]):
        assert main(argv) == 0
        assert capsys.readouterr().out == f"wrote {run / 'report.html'}\n"
        assert (run / "report.html").read_text().startswith("<!")
        (run / "report.html").unlink()
    assert main(["report", "--html"]) == 2
    assert "required: FOLDER" in capsys.readouterr().err
