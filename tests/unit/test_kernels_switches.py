"""What a run on a card switched off is stepped and rounded by torch, by name; and who asks for kernels gets them."""

import logging
from importlib.util import find_spec

import pytest
import torch
from interpreted import interpreted
from torch import nn

from booster import Booster
from booster.kernels import eligibility as choice
from booster.kernels import matrices, switches
from booster.kernels.switches import KernelSwitch
from booster.mixed_precision import BF16NaiveMixedPrecision
from booster.number_formats.number_format import E4M3
from booster.number_formats.scaling import Scaling

WRONG = KernelSwitch(False, "a card", "2026-12-01", "weights differ")
PARTS = {
    "rule AdamW": {},
    "weights float32": {},
    "weights SplitBFloat16": {"precision": lambda: BF16NaiveMixedPrecision(keep_fp32=())},
    "states 8bit": {"states": "8bit"},
    "release": {"release_gradients": "exact"},
}


def boosted(fused, precision="fp32", **options):
    net = nn.Linear(6, 12)
    precision = precision() if callable(precision) else precision
    booster = Booster("cpu", precision, fused_optimizer=fused, **options)
    optimizer = booster.boost(net, torch.optim.AdamW(net.parameters(), lr=1e-2))[1]
    return type(optimizer._update.decision).__name__ == "KernelDecision"


def test_a_part_that_is_off_is_told_by_name_with_card_and_date(monkeypatch):
    assert switches.off(*switches.NAMES) is None
    monkeypatch.setattr(
        switches, "DECIDED", {"states 8bit": WRONG, "rule SGD": KernelSwitch(True, "a card", "2026-12-01")}
    )
    assert switches.off("rule SGD", "rule AdamW") is None
    said = "'states 8bit' is off in booster/kernels/switches.py: weights differ (a card, 2026-12-01)"
    assert switches.off("rule SGD", "states 8bit") == said


def test_a_decided_line_names_a_part_that_is_there():
    assert set(switches.DECIDED) <= set(switches.NAMES)


@pytest.mark.parametrize("part", [pytest.param(part, marks=interpreted) for part in PARTS])
def test_true_leaves_to_torch_what_is_off_and_who_asks_gets_it(part, monkeypatch, caplog):
    from booster.kernels import probe

    monkeypatch.setattr(choice, "TAKEN_BY_TRUE", ("cpu",))
    monkeypatch.setattr(switches, "DECIDED", {part: WRONG})
    monkeypatch.setattr(probe, "like_torch", lambda *given: pytest.fail("what is off is not tried"))
    caplog.set_level(logging.INFO)
    assert not boosted(True, **PARTS[part])
    said = f"{part!r} is off in booster/kernels/switches.py: weights differ (a card, 2026-12-01)"
    assert f"AdamW is stepped by torch, and not by Triton kernels: {said}" in caplog.messages
    caplog.clear()
    assert boosted("triton", **PARTS[part])
    assert f"AdamW is stepped by Triton kernels on cpu, where {said}" in caplog.messages
    monkeypatch.setattr(switches, "DECIDED", {"rule Adam": WRONG, "weights Kahan": WRONG, "shards": WRONG})
    monkeypatch.setattr(probe, "like_torch", lambda *given: None)
    assert boosted(True, **PARTS[part])


@pytest.mark.parametrize("part", ["matrices e4m3fn row", "matrices delayed"])
def test_matrices_that_are_off_are_rounded_by_torchs_operations(part, monkeypatch, caplog):
    monkeypatch.setattr(matrices, "TAKEN_ON", ("cpu",))
    monkeypatch.setattr(matrices, "find_spec", lambda name: True)
    monkeypatch.setattr(matrices, "_tried", lambda *given: None)
    monkeypatch.setattr(switches, "DECIDED", {part: WRONG})
    matrices._differs.cache_clear()
    caplog.set_level(logging.INFO)
    x = torch.randn(4, 32)
    assert not matrices.by_kernels(x, E4M3, Scaling("row"), delayed=True)
    assert f"{part!r} is off in booster/kernels/switches.py" in caplog.text
    assert matrices.by_kernels(x, E4M3, Scaling((1, 32)))
    matrices._differs.cache_clear()


@pytest.mark.skipif(not find_spec("triton"), reason="needs Triton; `make kernels` runs it")
def test_every_rule_and_form_has_a_switch():
    from booster.kernels import rules, weights

    names = {f"rule {kind.__name__}" for kind in rules._RULES} | {f"weights {kind.__name__}" for kind in weights.FORMS}
    assert names <= set(switches.NAMES)


def test_a_kernel_that_leaves_a_device_unusable_is_told_with_what_to_do():
    from booster.kernels.launch_cache import failure

    fault = ValueError("an illegal memory access")
    assert failure(fault, torch.device("cpu")) == "a trial raised ValueError: an illegal memory access"
    with pytest.raises(RuntimeError, match="left meta unusable in this process; switch it off in booster/kernels/swit"):
        failure(fault, torch.device("meta"))
