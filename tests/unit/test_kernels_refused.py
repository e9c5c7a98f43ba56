"""What kernels cannot step is refused by name where they are asked for, and stepped by torch where they are not."""

import os
from importlib.util import find_spec

import pytest
import torch
from interpreted import interpreted
from torch import nn
from torch.optim import SGD, Adagrad, AdamW, NAdam, RMSprop

from booster import Booster
from booster.mixed_precision import FP16NaiveMixedPrecision


def boost(make, precision="fp32", **options):
    net = nn.Linear(4, 3)
    booster = Booster("cpu", precision, **{"fused_optimizer": "triton", **options})
    return booster.boost(net, make(net.parameters()))[1]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="they can be stepped here")
def test_kernels_that_cannot_run_here_are_refused_and_true_does_without():
    reason = (
        "Triton is not installed" if find_spec("triton") is None else "its parameters lie on cpu; TRITON_INTERPRET=1"
    )
    with pytest.raises(ValueError, match=f"fused_optimizer=.triton. cannot step this AdamW by kernels: {reason}"):
        boost(lambda p: AdamW(p))
    assert type(boost(lambda p: AdamW(p), fused_optimizer=True)._update.decision).__name__ == "HostDecision"


class Own(AdamW):
    pass


def with_dtype(dtype):
    def make(params):
        return AdamW([nn.Parameter(param.detach().to(dtype)) for param in params])

    return make


REFUSED = {
    "its class has no rule among them": (lambda p: NAdam(p), {}),
    "its class has no rule": (lambda p: Own(p), {}),
    "it was built with differentiable=True": (lambda p: AdamW(p, differentiable=True), {}),
    "it was built with capturable=True": (lambda p: RMSprop(p, capturable=True), {}),
    "makes its own update": (lambda p: AdamW(p), {"precision": "fp16_apex"}),
    "its steps are logged": (lambda p: AdamW(p), {"precision": FP16NaiveMixedPrecision(verbose=True)}),
}


class TestInterpreted:
    pytestmark = interpreted

    @pytest.mark.parametrize("reason", REFUSED)
    def test_what_kernels_cannot_step_is_refused_by_name(self, reason):
        make, options = REFUSED[reason]
        with pytest.raises(
            ValueError, match=f"cannot step this .* by kernels: .*{reason}.*; leave fused_optimizer True"
        ):
            boost(make, **options)

    def test_float64_parameters_are_refused(self):
        net = nn.Linear(4, 3).double()
        with pytest.raises(ValueError, match=r"a parameter of shape \(3, 4\) is torch.float64"):
            Booster("cpu", "fp32", fused_optimizer="triton").boost(net, Adagrad(net.parameters()))

    def test_on_a_cpu_only_those_who_ask_are_stepped_by_kernels(self):
        assert type(boost(lambda p: AdamW(p), fused_optimizer=True)._update.decision).__name__ == "HostDecision"
        assert type(boost(lambda p: AdamW(p))._update.decision).__name__ == "KernelDecision"

    def test_a_step_with_a_sparse_gradient_or_a_hook_is_made_by_torch(self, caplog):
        caplog.set_level("INFO")
        net = nn.Linear(4, 3)
        booster = Booster("cpu", "fp32", fused_optimizer="triton", clip_grad_norm=1.0)
        model, optimizer, *_ = booster.boost(net, SGD(net.parameters(), 0.1))
        fired = []
        for hooked in (False, True, False):
            handle = optimizer.optimizer.register_step_post_hook(lambda *_: fired.append(1)) if hooked else None
            before = net.weight.detach().clone()
            booster.backward(model(torch.ones(2, 4)).sum(), optimizer)
            assert optimizer.step().applied
            assert not torch.equal(net.weight, before)
            optimizer.zero_grad()
            if handle is not None:
                handle.remove()
        assert fired == [1]
