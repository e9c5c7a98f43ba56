"""The page of other projects' scenarios shows the tests that run, and nothing that somebody typed."""

import sys

import pytest
from held_to_table import PAGE, render, with_tables
from scenarios import FOLDER, Scenario, collected


@pytest.fixture
def found(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    names = {path.stem for path in FOLDER.glob("test_*.py")} - set(sys.modules)
    yield list(collected())
    for name in names:
        sys.modules.pop(name, None)


def test_the_page_shows_the_scenarios_that_run(found):
    text = PAGE.read_text()
    assert with_tables(text, render(found)) == text, "run: python tests/support/held_to_table.py"


def test_every_scenario_has_one_place(found):
    keys = [(each.project, each.file, each.test, each.says) for each, _ in found]
    assert sorted(set(keys)) == sorted(keys)
    assert sum(cases for _, cases in found) >= 80
    assert not [each for each, _ in found if "|" in each.says + each.test + each.differs]


def test_a_scenario_that_differs_is_shown_with_its_reason():
    tables = render(
        [(Scenario("P", "f.py", "test_a", "it holds"), 2), (Scenario("P", "f.py", "test_b", "x", "why"), 1)]
    )
    assert (
        "3 cases from 1 files, where a test of ours that answers for two of theirs counts for both: 2 hold, 1 differ"
        in tables
    )
    assert "| `f.py` | `test_a`: it holds; `test_b`: x | 3 | 1 by design otherwise |" in tables
    assert "| P, `f.py`, `test_b` | x | why |" in tables


def test_a_page_without_a_place_for_the_tables_is_refused():
    with pytest.raises(ValueError, match="no place"):
        with_tables("nothing here", "table")


def test_a_test_without_an_origin_is_refused(monkeypatch, tmp_path):
    (tmp_path / "test_of_nobody.py").write_text("def test_something():\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("scenarios.FOLDER", tmp_path)
    with pytest.raises(ValueError, match="test_something names no scenario"):
        list(collected())
    del sys.modules["test_of_nobody"]
