"""Which states of an optimizer are never negative, and which are to stay float32."""

from __future__ import annotations

import copy
from collections import defaultdict

import torch
from torch.optim import Optimizer

from booster.optimizer_kinds import Sign, declared_states
from booster.torch_internals import unhooked

_MOMENTS: dict[str, Sign] = {"exp_avg": "signed", "exp_avg_sq": "unsigned", "max_exp_avg_sq": "unsigned"}
_KNOWN: dict[type[Optimizer], dict[str, Sign]] = {
    torch.optim.Adam: _MOMENTS,
    torch.optim.AdamW: _MOMENTS,
    torch.optim.NAdam: _MOMENTS,
    torch.optim.RAdam: _MOMENTS,
    torch.optim.Adamax: {"exp_avg": "signed", "exp_inf": "unsigned"},
    torch.optim.SGD: {"momentum_buffer": "signed"},
    torch.optim.Adagrad: {"sum": "unsigned"},
    torch.optim.RMSprop: {"square_avg": "unsigned", "momentum_buffer": "signed"},
    torch.optim.Adadelta: {"square_avg": "unsigned", "acc_delta": "unsigned"},
    torch.optim.ASGD: {"ax": "fp32"},  # an average of weights, which somebody will use as weights
    torch.optim.Rprop: {"prev": "signed", "step_size": "unsigned"},
}
_STEPS, _ELEMENTS = 8, 64


class StateSigns:
    """The sign of each state of `optimizer`: from its class, from what was declared of it, else from steps that are tried.

    measured: names of the states whose sign is what trial steps showed. Raises ValueError for an optimizer that cannot
    step on rounded states, or on a tensor of a few numbers.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        if type(optimizer) is torch.optim.RMSprop and any(group["centered"] for group in optimizer.param_groups):
            raise ValueError(
                "RMSprop(centered=True) takes the root of a difference of two of its states, which rounding makes negative; "
                "use states='fp32', or centered=False"
            )
        declared = declared_states(type(optimizer))
        self.measured: set[str] = set()
        if type(optimizer) in _KNOWN:
            self._signs = dict(_KNOWN[type(optimizer)])
        else:
            tried = _tried(optimizer)
            self._signs = {**tried, **declared}
            self.measured = set(tried) - set(declared)

    @property
    def watched(self) -> set[str]:
        """Names of the states that trial steps never made negative, which says nothing of the steps to come."""
        return {name for name in self.measured if self._signs[name] == "unsigned"}

    def __getitem__(self, name: str) -> Sign:
        """Return the sign of the state `name`; a state that nobody knows stays float32."""
        return self._signs.get(name, "fp32")


def _tried(optimizer: Optimizer) -> dict[str, Sign]:
    """Step a copy of `optimizer` on random weights and gradients, and see which states become negative."""
    generator = torch.Generator().manual_seed(0)
    signs: dict[str, Sign] = {}
    for group in optimizer.param_groups:
        weights = torch.nn.Parameter(torch.randn(_ELEMENTS, generator=generator, dtype=torch.float32))
        probe = object.__new__(type(optimizer))
        vars(probe).update({name: copy.copy(value) for name, value in vars(optimizer).items()})
        probe.state = defaultdict(dict)
        probe.param_groups = [{**group, "params": [weights]}]
        for _ in range(_STEPS):
            weights.grad = torch.randn(_ELEMENTS, generator=generator, dtype=torch.float32)
            try:
                with torch.no_grad():
                    unhooked(type(probe).step)(probe)
            except Exception as error:
                raise ValueError(
                    f"which states of {type(optimizer).__name__} are never negative could not be tried out ({error}); declare "
                    f"them: register_elementwise({type(optimizer).__name__}, states={{'exp_avg': 'signed', ...}})"
                ) from error
            for name, value in probe.state[weights].items():
                if isinstance(value, torch.Tensor) and value.shape == weights.shape and value.dtype == torch.float32:
                    negative = bool((value < 0).any()) or signs.get(name) == "signed"
                    signs[name] = "signed" if negative else "unsigned"
    return signs
