"""How messages and tables are worded."""

import torch

from booster.common.arguments import columns, counted, dtype_name, listed, raised


def test_names_are_listed_up_to_a_number_and_the_rest_is_counted():
    assert listed([]) == ""
    assert listed(["a", "b"], 2) == "a, b"
    assert listed(["a", "b", "c"], 2) == "a, b and 1 more"


def test_one_of_a_noun_has_no_plural():
    assert [counted(count, "step") for count in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]


def test_columns_are_as_wide_as_their_widest_cell_and_lines_end_where_their_text_does():
    assert columns([("a", "bb", "9"), ("ccc", "", "10")], right=[2]) == "a    bb   9\nccc      10"
    assert columns([("a", ""), ("ccc", "d")]) == "a\nccc  d"


def test_dtypes_are_called_as_torch_calls_them_and_powers_stand_high():
    assert dtype_name(torch.float8_e4m3fn) == "float8_e4m3fn"
    assert f"2{raised(-10)}" == "2\u207b\u00b9\u2070"
