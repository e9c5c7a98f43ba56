"""Patterns for names, and which modules stay in float32 by them."""

import pytest
from torch import nn

from booster.mixed_precision import KeptModules
from booster.model.modules import matcher, parents


@pytest.mark.parametrize(
    ("pattern", "matching", "other"),
    [
        ("head", ["head"], ["heads", "a.head", "head.0"]),
        ("blocks.*.norm", ["blocks.0.norm", "blocks.10.norm"], ["blocks.norm", "blocks.0.1.norm", "blocks.0.norm1"]),
        ("blocks.*.norm*", ["blocks.0.norm", "blocks.0.norm1"], ["blocks.0.norm.weight"]),
        ("**.norm", ["blocks.0.norm", "a.norm"], ["norm", "blocks.0.norm.weight"]),
        ("**norm", ["norm", "blocks.0.norm", "blocks.0.prenorm"], ["norms"]),
        ("blocks.**", ["blocks.0", "blocks.0.norm"], ["blocks", "other.blocks.0"]),
        ("a.b", ["a.b"], ["axb"]),
        ("a[0]+", ["a[0]+"], ["a0"]),
        ("*", ["head", ""], ["a.b"]),
    ],
)
def test_a_pattern_is_matched_against_the_whole_name(pattern, matching, other):
    matches = matcher(pattern)
    assert [name for name in [*matching, *other] if matches(name)] == matching


def test_the_parents_of_a_name_are_what_holds_it():
    assert list(parents("a.b.c")) == ["a", "a.b"]
    assert list(parents("a")) == []


def test_kept_modules_contain_those_selected_and_all_inside_them():
    model = nn.Sequential(
        nn.Linear(2, 2), nn.Sequential(nn.LayerNorm(2), nn.Sequential(nn.Linear(2, 2))), nn.LayerNorm(2)
    )
    kept = KeptModules(model, ["1", nn.LayerNorm])
    assert kept.names == {"1", "2"}
    inside = [name for name, _ in model.named_modules() if kept.contains(name)]
    assert inside == ["1", "1.0", "1.1", "1.1.0", "2"]
    assert not KeptModules(model, ()).contains("0")
    with pytest.raises(ValueError, match=r"keep_fp32='nothing' selects no module of Sequential"):
        KeptModules(model, "nothing")
