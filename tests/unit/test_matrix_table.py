"""The tables of precisions and parallelisms are what the tests of their cells found, and nothing that somebody typed."""

import pytest
from matrix_table import TABLES, render, with_table


@pytest.mark.parametrize(
    ("table", "page"), [pytest.param(t, page, id=f"{t.name} in {page.name}") for t in TABLES for page in t.pages]
)
def test_a_page_shows_the_recorded_results(table, page):
    text = page.read_text()
    assert with_table(text, table.name, table.render()) == text


def test_a_cell_that_did_not_pass_is_shown_as_such():
    table = render({"passed": [["fp32", "DDP"], ["fp32", "FSDP"], ["fp16", "DDP"]]})
    assert table.splitlines()[2:] == ["| `fp32` | yes | yes |", "| `fp16` | yes | no |"]


def test_each_table_has_its_own_place():
    page = "<!-- a -->\n<!-- end of a -->\n<!-- b -->\nold\n<!-- end of b -->\n"
    assert with_table(page, "b", "new\n") == page.replace("old", "new")


def test_a_page_without_a_place_for_the_table_is_refused():
    with pytest.raises(ValueError, match="no place"):
        with_table("nothing here", "matrix", "table")
