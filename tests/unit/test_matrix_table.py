"""The table of precisions and parallelisms is what the matrix test found, and nothing that somebody typed."""

import json

import pytest
from matrix_table import PAGES, RESULTS, render, with_table


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_shows_the_recorded_results(page):
    text = page.read_text()
    assert with_table(text, render(json.loads(RESULTS.read_text()))) == text


def test_a_cell_that_did_not_pass_is_shown_as_such():
    table = render({"passed": [["fp32", "DDP"], ["fp32", "FSDP"], ["fp16", "DDP"]]})
    assert table.splitlines()[2:] == ["| `fp32` | yes | yes |", "| `fp16` | yes | no |"]


def test_a_page_without_a_place_for_the_table_is_refused():
    with pytest.raises(ValueError, match="no place"):
        with_table("nothing here", "table")
