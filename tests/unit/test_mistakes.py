"""Every mistake of the table is made, and what comes of it says what to do; see tests/support/mistakes.py."""

import logging
import re
import warnings
from pathlib import Path

import pytest
from mistakes import LEGAL, MISTAKES, PAGE, page

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("mistake", [each for each in MISTAKES if callable(each.make)], ids=lambda each: each.what)
def test_a_mistake_is_answered_with_what_to_do(mistake, caplog, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    caught = None
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING, "booster"):
        warnings.simplefilter("ignore")
        try:
            mistake.make()
        except Exception as error:
            caught = error
    logged = [record.getMessage() for record in caplog.records]
    if mistake.comes in (LEGAL, "WARNING"):
        assert caught is None
        assert len(logged) == (mistake.comes == "WARNING"), logged
        assert mistake.comes == LEGAL or mistake.message in logged[0]
    else:
        assert type(caught).__name__ == mistake.comes, caught
        assert mistake.message in str(caught)


@pytest.mark.parametrize(
    "mistake", [each for each in MISTAKES if isinstance(each.make, str)], ids=lambda each: each.what
)
def test_a_mistake_of_several_ranks_has_a_test(mistake):
    file, _, name = mistake.make.partition("::")
    text = (ROOT / file).read_text()
    assert f"def {name}(" in text if name else mistake.comes == LEGAL or re.search(re.escape(mistake.message), text)


def test_there_are_at_least_45_of_them_and_the_page_is_made_of_them():
    assert len(MISTAKES) >= 45
    assert PAGE.read_text() == page()
