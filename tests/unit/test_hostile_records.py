"""Records from somebody who means harm, and disks and folders that turn against a run that writes one."""

import errno
import json
import os
from html.parser import HTMLParser

import pytest
import torch
from prescribed import parameters, sgd, step_on
from test_record import recorded

from booster import Booster
from booster.cli import main
from booster.numerics import read_run
from booster.numerics.record.record_file import LineFile


def written(folder, **changes):
    """A record of one step; changes: of its lines, by kind."""
    run = {"kind": "run", "schema": 1, "rank": 0, "world_size": 1, "time": 0.0}
    step = {
        "kind": "step",
        "optimizer": "0",
        "step": 1,
        "time": 1.0,
        "applied": True,
        "loss": 1.0,
        "loss_scale": 1.0,
        "lr": [0.1],
    }
    skip = step | {"step": 2, "applied": False, "reason": "nonfinite_grad", "culprit": ["w"]}
    lines = [line | changes.get(line["kind"], {}) for line in (run, step, skip)]
    (folder / "rank-00000.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_line_that_claims_a_billion_ranks_takes_no_memory(tmp_path):
    run = read_run(written(tmp_path, run={"world_size": 10**9}))
    assert "and 999999983 more are not here" in run.notes[0]
    with pytest.raises(ValueError, match="line 1 of .*world_size is 'many'"):
        read_run(written(tmp_path, run={"world_size": "many"}))


SAMPLE = {
    "kind": "sample",
    "of": "gradient",
    "name": "w",
    "group": 0,
    "place": 0,
    "optimizer": "0",
    "step": 1,
    "format": "float16",
    "scale": 1.0,
    "zeros": 3,
    "nonfinite": 0,
    "low": -20,
    "counts": [3, 1, 0, 5],
    "largest": 0.5,
    "norm": 1.0,
    "stored": "float32",
    "still": 1,
    "looked": 9,
    "update_norm": 0.1,
    "weight_norm": 1.0,
}


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        *(("run", {"world_size": 0}), ("run", {"time": 1e300}), ("run", {"schema": "x"}), ("run", {"format": []})),
        *(("step", {"loss": []}), ("step", {"step": "x"}), ("step", {"lr": 3}), ("step", {"culprit": [1]})),
        *(("step", {"time": None}), ("step", {"applied": 1}), ("step", {"loss": 10**400}), ("step", {"optimizer": []})),
        *(("sample", {"low": 2**40}), ("sample", {"low": -(2**40)}), ("sample", {"counts": [0] * 10**6})),
        *(("sample", {"counts": ["x"]}), ("sample", {"counts": [0]}), ("sample", {"format": "int8"})),
        *(("sample", {"copies": 0}), ("sample", {"zeros": 10**400}), ("sample", {"name": {}})),
    ],
)
def test_a_line_that_no_record_writes_is_refused_by_file_and_line(kind, change, tmp_path, capsys):
    folder = written(tmp_path, **{kind: change} if kind != "sample" else {})
    if kind == "sample":
        with (tmp_path / "rank-00000.jsonl").open("a") as file:
            file.write(json.dumps(SAMPLE | change) + "\n")
    for argv in (["report"], ["report", "--json"], ["compare", str(folder)]):
        assert main([*argv, str(folder)]) in (1, 2)
        said = capsys.readouterr().err
        assert f"line {['run', 'step', '', 'sample'].index(kind) + 1} of {folder / 'rank-00000.jsonl'}" in said
        assert f" {next(iter(change))} is " in said
        assert len(said) < 1000


def test_a_line_without_end_is_refused_before_it_is_read(tmp_path):
    written(tmp_path)
    with (tmp_path / "rank-00000.jsonl").open("r+b") as file:
        file.truncate(2**40)
    with pytest.raises(ValueError, match="line 4 of .* has more than 8388608 bytes"):
        read_run(tmp_path)


HOSTILE = ["\x1b]0;pwned\x07", "[/bold]", "[red]x", "\u202egpj.exe", "\ud800", "a\nb", "[link=file:///x]y"]


@pytest.mark.parametrize("name", HOSTILE)
def test_names_reach_the_terminal_as_they_are_spelled_and_do_nothing_there(name, tmp_path, capsys):
    pytest.importorskip("rich", reason="the summary is drawn by rich")
    lines = {"reason": name, "culprit": [name]}
    written(tmp_path, run={"precision": name}, step=lines)
    with (tmp_path / "rank-00000.jsonl").open("a") as file:
        file.write(
            json.dumps({"kind": "step", "optimizer": name, "step": 1, "time": 1.0, "applied": False, **lines}) + "\n"
        )
    for options in ([], ["--json"], ["--html", str(tmp_path / "page.html")]):
        assert main(["report", *options, str(tmp_path)]) == 0
        said = capsys.readouterr().out
        assert all(char.isprintable() or char == "\n" for char in said)
    assert main(["report", str(tmp_path)]) == 0
    assert name.encode("unicode_escape").decode() in capsys.readouterr().out if not name.isprintable() else name


def test_a_full_disk_ends_the_record_with_one_warning_and_training_goes_on(tmp_path, monkeypatch, caplog):
    params = parameters(3, 2)
    optimizer = sgd(params)
    real = LineFile.write
    calls = 0

    def full(self, lines):
        nonlocal calls
        calls += 1
        if calls > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(self, lines)

    with recorded(tmp_path, optimizer) as record:
        monkeypatch.setattr(LineFile, "write", full)
        for step in range(6):
            step_on(optimizer, params, 2.0, 1.0, value=10.0 - step)
        assert record.closed
    assert caplog.text.count("No space left on device") == 1
    assert "training goes on" in caplog.text
    assert calls == 4
    assert [step.number for step in read_run(tmp_path).steps["0"]] == [1, 2, 3]


def test_a_disk_that_is_full_from_the_start_ends_the_record_and_not_the_training(tmp_path, monkeypatch, caplog):
    params = parameters(3, 2)
    optimizer = sgd(params)

    def full(descriptor, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        record = Booster("cpu").record(tmp_path)
    assert record.closed
    assert caplog.text.count("No space left on device") == 1
    record.attach(optimizer)
    step_on(optimizer, params, 2.0, 1.0, value=10.0)
    record.close()


def test_a_disk_that_becomes_full_within_a_line_keeps_none_of_it(tmp_path, monkeypatch, caplog):
    params = parameters(3, 2)
    optimizer = sgd(params)
    real, room = os.write, 1500

    def write(descriptor, data):
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = real(descriptor, data[:room])
        room -= written
        return written

    with recorded(tmp_path, optimizer) as record:
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", write)
            while not record.closed:
                step_on(optimizer, params, 2.0, 1.0, value=10.0)
    assert room == 0
    assert caplog.text.count("No space left on device") == 1
    text = (tmp_path / "rank-00000.jsonl").read_text()
    assert text.endswith("}\n")
    assert len(read_run(tmp_path).steps["0"]) == text.count('"kind":"step"') > 2


def test_a_tracker_that_raises_is_warned_of_once_and_ends_neither_training_nor_record(tmp_path, caplog):
    model = torch.nn.Linear(2, 2)
    b = Booster("cpu")
    model, optimizer, *_ = b.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    called = []

    def tracker(values, step):
        called.append(step)
        if step < 4:
            raise ConnectionError("the tracker's host is gone")

    with b.record(tmp_path, tracker=tracker):
        for _ in range(5):
            b.backward(model(torch.ones(1, 2)).sum(), optimizer)
            assert optimizer.step()
    assert called == [1, 2, 3, 4, 5]
    (said,) = [record for record in caplog.records if "tracker" in record.getMessage()]
    assert f"the tracker of the record in {tmp_path} raised in step 1; training goes on" in said.getMessage()
    assert "ConnectionError: the tracker's host is gone" in caplog.text
    assert [step.number for step in read_run(tmp_path).steps["0"]] == [1, 2, 3, 4, 5]


def test_a_full_disk_stops_no_switch_and_no_look_of_an_autopilot(tmp_path, monkeypatch, caplog):
    booster = Booster("cpu")
    booster.boost(torch.nn.Linear(2, 2))
    record = booster.record(tmp_path, every=None)

    def full(self, lines):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(LineFile, "write", full)
    booster.switch("bf16")
    assert booster.precision.half_dtype == torch.bfloat16
    assert record.closed
    record.write([{"kind": "look"}])
    assert caplog.text.count("No space left on device") == 1


def test_a_record_does_not_write_through_a_link_or_into_a_pipe(tmp_path):
    (tmp_path / "precious").write_text("mine")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "rank-00000.jsonl").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="is a link"):
        LineFile(folder, 0)
    assert (tmp_path / "precious").read_text() == "mine"
    os.mkfifo(folder / "rank-00001.jsonl")
    with pytest.raises(OSError, match="no regular file"):
        LineFile(folder, 1)


def test_a_page_is_not_written_through_a_link_and_replaces_a_page(tmp_path, capsys):
    run = tmp_path / "run"
    run.mkdir()
    written(run)
    (tmp_path / "precious").write_text("mine")
    page = tmp_path / "page.html"
    page.symlink_to(tmp_path / "precious")
    assert main(["report", "--html", str(page), str(run)]) == 1
    assert (tmp_path / "precious").read_text() == "mine"
    page.unlink()
    for _ in range(2):
        assert main(["report", "--html", str(page), str(run)]) == 0
        assert page.read_text().startswith("<!doctype html>")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "precious", "run"]


def test_names_of_files_reach_the_terminal_as_they_are_spelled(tmp_path, capsys):
    pytest.importorskip("rich", reason="the summary is drawn by rich")
    path = written(tmp_path) / "rank-00000.jsonl"
    path = path.rename(tmp_path / "rank-\x1b]0;pwned\x07.jsonl")
    with path.open("a") as file:
        file.write('{"kind": "run"}\n{"kind": "step"')
    for argv in (["report"], ["report", "--json"], ["compare", str(tmp_path)]):
        assert main([*argv, str(tmp_path)]) == 0
        assert "\x1b" not in capsys.readouterr().out
    page = tmp_path / "page.html"
    assert main(["report", "--html", str(page), str(tmp_path)]) == 0
    assert "\x1b" not in page.read_text()


def test_a_record_of_more_optimizers_than_a_run_has_is_refused(tmp_path, capsys):
    path = written(tmp_path) / "rank-00000.jsonl"
    step = json.loads(path.read_text().splitlines()[1])
    with path.open("a") as file:
        file.writelines(json.dumps(step | {"optimizer": str(number)}) + "\n" for number in range(1200))
    assert main(["report", str(tmp_path)]) == 1
    assert "steps of more than 1000 optimizers" in capsys.readouterr().err


PIECES = [
    "<script>x</script>",
    '" onload="x',
    "' onload='x",
    "--><b>",
    "]]><b>",
    "</title><b>",
    "</style><b>",
    "&lt;b>",
]


def tags_of_page(text, folder):
    """Tags and attributes of a page of a record that says `text` wherever it says one."""
    lines = {"reason": text, "culprit": [text]}
    written(folder, run=dict.fromkeys(("precision", "plugin", "device", "booster", "torch"), text), step=lines)
    skip = {"kind": "step", "optimizer": text, "step": 1, "time": 1.0, "applied": False, **lines}
    more = [skip, *(SAMPLE | {"name": text, "of": of, "stored": text} for of in ("gradient", text))]
    with (folder / "rank-00000.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in more)
    assert main(["report", "--html", str(folder / "page.html"), str(folder)]) == 0
    tags, found = HTMLParser(), set()
    tags.handle_starttag = tags.handle_startendtag = lambda tag, given: found.add((tag, *(key for key, _ in given)))
    tags.feed((folder / "page.html").read_text())
    return found


@pytest.fixture(scope="module")
def plain_tags(tmp_path_factory):
    return tags_of_page("a name", tmp_path_factory.mktemp("plain"))


@pytest.mark.slow_cases("</text>", "</style><b>", "&#60;b>", "\\u2028<b>", "</title><b>")
@pytest.mark.parametrize("piece", [*PIECES, "</svg><img src=x onerror=y>", "</text>", "\u2028<b>", "&#60;b>"])
def test_a_page_has_no_tag_that_a_text_of_the_record_brings(piece, tmp_path, plain_tags):
    assert tags_of_page(piece, tmp_path) <= plain_tags


def test_a_record_that_is_a_pipe_is_refused_at_once(tmp_path, capsys):
    os.mkfifo(tmp_path / "rank-00000.jsonl")
    assert main(["report", str(tmp_path)]) == 1
    assert "no regular file" in capsys.readouterr().err
