"""`Booster.diagnose`: a step replayed, its first bad number named, and nothing changed by it."""

import copy
import random

import pytest
import torch
from comparing import assert_same
from torch import nn
from torch.nn import functional as F

from booster import Booster
from booster.numerics import Diagnosis


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x + self.down(F.dropout(F.gelu(self.up(self.norm(x))), 0.1))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Run:
    """A boosted Net, and a batch."""

    def __init__(self, precision="fp16", spoil=lambda model: None, **options):
        torch.manual_seed(0)
        self.raw = Net()
        with torch.no_grad():
            spoil(self.raw)
        self.booster = Booster("cpu", precision, **options)
        optimizer = torch.optim.AdamW(self.raw.parameters(), lr=1e-2)
        self.model, self.optimizer, *_ = self.booster.boost(self.raw, optimizer)
        self.x, self.y = torch.randn(6, 8), torch.randint(0, 4, (6,))

    def loss(self):
        return F.cross_entropy(self.model(self.x), self.y)

    def step(self):
        loss = self.loss()
        self.booster.backward(loss, self.optimizer)
        result = self.optimizer.step()
        return float(loss.detach()), result.applied

    def diagnose(self, forward=None):
        return self.booster.diagnose(forward or self.loss, self.optimizer)

    def everything(self):
        """All that a replay could have changed, as it is now."""
        return {
            "weights": copy.deepcopy(self.model.state_dict()),
            "gradients": {n: None if p.grad is None else p.grad.clone() for n, p in self.model.named_parameters()},
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "calls": [block.calls for block in self.raw.blocks],
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "versions": [param._version for param in self.model.parameters()],
            "hooks": [
                (len(module._forward_hooks), len(module._forward_pre_hooks), "forward" in vars(module))
                for module in self.raw.modules()
            ],
        }


def test_an_overflow_in_the_forward_pass_is_named_by_module_operation_and_line():
    run = Run(spoil=lambda model: model.blocks[1].up.weight.fill_(6e4))
    run.x.fill_(1.0)[0] += 1
    found = run.diagnose()
    assert isinstance(found, Diagnosis)
    assert (found.kind, found.module, found.operation) == ("overflow", "blocks.1.up", "aten.addmm")
    assert (found.direction, found.dtype, found.rank, found.certain) == ("forward", "float16", 0, True)
    assert found.modules == ("Net", "blocks.1", "blocks.1.up")
    assert "test_diagnosis.py:" in found.source
    assert found.source.endswith("in forward")
    assert found.inputs[1].shape == (6, 8)
    assert found.output.num_inf > 0
    assert any(remedy.startswith("finite with ") for remedy in found.remedies)
    assert "Overflow of float16" in str(found)
    assert "blocks.1.up" in str(found)


@pytest.mark.crossed
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16", "fp16_naive", "bf16_naive"])
@pytest.mark.parametrize("bad", [False, True])
def test_a_diagnosis_changes_nothing_and_the_next_steps_are_the_same_to_the_bit(precision, bad):
    def spoil(model):
        if bad:
            model.blocks[1].up.weight.fill_(6e4 if "fp16" in precision else 3e38)

    plain, diagnosed = (Run(precision, spoil, skip_nonfinite=True) for _ in range(2))
    torch.manual_seed(1)
    plain.step()
    expected = [plain.step() for _ in range(5)]
    torch.manual_seed(1)
    diagnosed.step()
    before = diagnosed.everything()
    found = diagnosed.diagnose()
    assert (found.kind is not None) == bad
    assert_same(before, diagnosed.everything())
    assert_same(expected, [diagnosed.step() for _ in range(5)])
    assert_same(plain.everything()["weights"], diagnosed.everything()["weights"])


def test_what_a_diagnosis_would_have_changed_is_noticed():
    run = Run()
    before = run.everything()
    with torch.no_grad():
        run.raw.head.weight[0, 0] += 1e-3
    with pytest.raises(AssertionError, match="weights/head.weight"):
        assert_same(before, run.everything())


def test_half_copies_of_weights_that_a_trial_repaired_are_not_used_after_it():
    """A user's autocast around a diagnosis keeps half copies of weights until it ends."""
    run = Run("bf16", lambda model: model.head.weight.fill_(torch.nan))
    with torch.autocast("cpu", torch.bfloat16):
        found = run.diagnose()
        assert run.loss().isnan()
    assert (found.kind, found.parameter, found.certain) == ("weights", "head.weight", True)


def test_a_bad_number_that_no_operation_made_is_said_to_be_untraced():
    run = Run("fp32")

    def forward():
        loss = run.loss()
        loss.detach().numpy()[()] = float("inf")
        return loss

    found = run.diagnose(forward)
    assert (found.kind, found.certain) == (None, False)
    assert "no operation of the replay made it so" in str(found)
