"""The page of a record: it shows what there is, leaves out what says nothing, and loads nothing from elsewhere."""

import dataclasses
import re
import sys
from html.parser import HTMLParser

import pytest
from prescribed import parameters, sgd, step_on
from small_job import boost, train
from test_record import INF, recorded

from booster.cli import main
from booster.common.arguments import shortened
from booster.mixed_precision import BF16NaiveMixedPrecision, FP16NaiveMixedPrecision
from booster.numerics import read_run
from booster.numerics.record.recorded_run import Run, Step
from booster.numerics.reports.page import page
from booster.numerics.reports.pictures import Band, bars, lines, map_of

VOID = {"meta"}


class Reader(HTMLParser):
    """Checks that tags are closed in order, and keeps them and the headings."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.titles, self.text = [], [], [], ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if self.open and self.open[-1] == "h3":
            self.titles.append(data)


def test_a_run_with_everything_has_a_panel_for_everything(tmp_path):
    params = parameters(3, 2)
    optimizer = sgd(params, scale=2.0**10, clip_grad_norm=1.0)
    with recorded(tmp_path, optimizer, every=2):
        for step in range(10):
            tiny = 2.0**-34  # of which float16 keeps a bit, times the scale
            step_on(optimizer, params, INF if step == 5 else tiny, 2.0, value=10.0 - step)
    found = Reader(page(read_run(tmp_path)))
    assert found.titles == [
        "Loss",
        "Loss scale",
        "Gradient norm",
        "Skips by culprit",
        "Norms by parameter group",
        "Underflow",
        "Weights that stand still",
        "Exponents",
    ]
    assert "clipped, 100.0% of all" in found.text
    assert sum(tag == "svg" for tag, _ in found.tags) == 2 * 7
    assert any(attributes.get("class") == "mark" for _, attributes in found.tags)


def test_a_run_without_scale_clips_skips_and_underflow_has_no_panels_of_them(tmp_path):
    booster, model, optimizer = boost("fp32")
    with booster.record(tmp_path):
        train(booster, model, optimizer)
    found = Reader(page(read_run(tmp_path)))
    assert found.titles == ["Loss", "Norms by parameter group", "Exponents"]
    assert not any(attributes.get("class") == "mark" for _, attributes in found.tags)


def test_weights_that_stand_still_have_a_panel(tmp_path):
    booster, model, optimizer = boost(BF16NaiveMixedPrecision(master_weights="none"))
    optimizer.param_groups[0]["lr"] = 1e-6
    with booster.record(tmp_path):
        train(booster, model, optimizer)
    assert "Weights that stand still" in Reader(page(read_run(tmp_path))).titles


def test_the_page_loads_nothing_and_runs_nothing(tmp_path):
    booster, model, optimizer = boost(FP16NaiveMixedPrecision(initial_scale=2.0**4))
    with booster.record(tmp_path / "<b> & co", every=1):
        train(booster, model, optimizer)
    text = page(read_run(tmp_path / "<b> & co"))
    found = Reader(text)
    assert {"script", "img", "link", "iframe", "image", "use"}.isdisjoint(tag for tag, _ in found.tags)
    assert not any(
        name in attributes for _, attributes in found.tags for name in ("src", "href", "xlink:href", "onload")
    )
    assert set(re.findall(r"https?://[^\"' ]+", text)) == {"http://www.w3.org/2000/svg"}
    assert "url(" not in text
    assert "default-src 'none'" in text
    assert "<b> & co" in found.text


def test_names_of_parameters_are_text():
    assert "&lt;b&gt; $x$" in bars([("<b> $x$", 1.0)], width=300)
    Reader(map_of(['a"><x>'], ["1"], [[0.5]], width=300))


def step(number, loss, **more):
    known = {"applied": True, "time": 0.0, "loss_scale": 1.0, "grad_norm": None, "clip": None, "lr": (), "reason": None}
    return Step(**{"number": number, "loss": loss, "culprit": (), **known, **more})


@pytest.mark.parametrize(
    "steps",
    [
        [],
        [step(1, None)],
        [step(7, 2.0)],
        [step(1, INF), step(2, float("nan"))],
        [step(1, 0.0, grad_norm=0.0), step(2, 0.0, grad_norm=0.0)],
        [step(1, -1.0, grad_norm=INF, loss_scale=0.5), step(2, 1e30, grad_norm=1e-30, loss_scale=2.0**100)],
        [step(1, 1.0, applied=False), step(2, 1.0, applied=False)],
        [step(5, 1.0), step(10**9, 2.0)],
    ],
)
def test_odd_runs_have_pages(steps, tmp_path):
    Reader(page(Run(tmp_path, {}, {"0": steps})))


def test_skips_say_their_reason_and_culprits_that_are_all_alike_are_one_line(tmp_path):
    bad = {
        "applied": False,
        "reason": "nonfinite_loss",
        "loss_scale": 8.0,
        "culprit": tuple(f"p{n}" for n in range(40)),
    }
    steps = [step(1, 1.0, loss_scale=8.0), step(2, INF, **bad), step(3, INF, **bad)]
    found = Reader(page(Run(tmp_path, {}, {"0": steps})))
    assert "Skipped 2 steps, nonfinite_loss: the forward pass made an inf or NaN" in found.text
    assert "All 40 parameters that are named held an inf or NaN equally often, in 2 steps." in found.text
    assert "overflows" not in found.text
    differs = step(4, 1.0, applied=False, reason="nonfinite_grad", loss_scale=8.0, culprit=("p7",))
    assert "equally often" not in Reader(page(Run(tmp_path, {}, {"0": [*steps, differs]}))).text


def test_a_long_name_still_says_which_block_and_which_weight_it_is():
    names = [f"encoder.blocks.{n}.attention.in_proj_bias" for n in (1, 2)]
    drawn = re.findall(r">([^<]*bias)</text>", map_of(names, ["1"], [[0.5], [0.5]], width=340))
    assert drawn == ["e.b.1.a.in_proj_bias", "e.b.2.a.in_proj_bias"]
    assert shortened("model.layers.10.self_attn.q_proj.weight", 24) == "m.l.10.s.q_proj.weight"
    assert shortened("model.layers.10.a_very_long_name_of_a_weight", 20) == "m.l.10…e_of_a_weight"


@pytest.mark.parametrize("width", [340, 720])
def test_the_names_of_bands_are_whole_and_do_not_touch_each_other(width):
    names = [
        f"model.layers.{n}.self_attn.{part}"
        for n in (1, 2)
        for part in ("in_proj_bias", "out_proj.bias", "out_proj.weight")
    ]
    columns = [f"2^{exponent}" for exponent in range(-25, 18)]
    bands = [Band(0, 1, "lost"), Band(1, 11, "subnormal"), Band(11, 41, "normal"), Band(41, 43, "inf")]
    picture = map_of(names, columns, [[0.5] * 43] * 6, width=width, bands=bands)
    words = [
        (float(x), float(y), anchor, text)
        for anchor, x, y, text in re.findall(
            r'text-anchor: (\w+)[^>]* x="([\d.]+)" y="([\d.]+)">([^<]*)</text>', picture
        )
    ]
    assert {"lost", "subnormal", "normal", "inf"} <= {text for *_, text in words}
    assert len({text for *_, text in words if re.search("bias|weight", text)}) == 6, "each name differs from the others"
    spans = []
    for x, y, anchor, text in words:
        left = x - len(text) * 6 * {"start": 0, "middle": 0.5, "end": 1}[anchor]
        spans.append((y, left, left + len(text) * 6, text))
    for y, left, right, text in spans:
        assert left >= 0, text
        assert right <= width + 1, text
        in_line = [other for other in spans if other[0] == y and other[3] != text]
        assert [other for other in in_line if other[1] < right and left < other[2]] == [], text


@pytest.mark.slow
def test_a_long_run_makes_no_large_page(tmp_path):
    steps = [
        step(n, 1.0 / n, grad_norm=1.0 + n % 7, loss_scale=2.0, clip=0.5, applied=n % 3 > 0) for n in range(1, 50001)
    ]
    for scale in (lambda n: 2.0, lambda n: 2.0 ** (n % 2 + 1)):
        text = page(Run(tmp_path, {}, {"0": [dataclasses.replace(s, loss_scale=scale(s.number)) for s in steps]}))
        Reader(text)
        assert len(text) < 400_000


def points(picture):
    """Return the corners of the line of a picture."""
    (path,) = re.findall(r'd="M ([^"]*)"[^>]*stroke: var\(--accent\)', picture)
    return [tuple(map(float, point.split())) for point in path.strip().split("L ")]


def test_a_line_goes_through_its_values_and_leaves_out_what_is_not_finite():
    drawn = points(lines([1, 2, 3], [0.0, INF, 4.0], width=182, height=134))
    assert [x for x, _ in drawn] == [58.0, 158.0]
    assert drawn[0][1] > drawn[1][1], "larger is higher"
    corners = points(lines([1, 2, 3], [1.0, 2.0, 2.0], width=182, corners=True))
    assert [x for x, _ in dict.fromkeys(corners)] == [58.0, 108.0, 108.0, 158.0]


def test_pictures_without_matplotlib_say_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install '\.\[report\]'"):
        bars([("a", 1.0)], width=300)


def test_the_command_writes_the_page(tmp_path, capsys):
    booster, model, optimizer = boost("fp16")
    with booster.record(tmp_path / "run"):
        train(booster, model, optimizer)
    assert main(["report", str(tmp_path / "run"), "--html", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == page(read_run(tmp_path / "run"))
    assert main(["report", str(tmp_path / "run"), "--html", str(tmp_path / "no" / "page.html")]) == 1
    assert "booster report: " in capsys.readouterr().err
