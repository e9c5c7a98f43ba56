"""What hooks of state dicts make of a model and an optimizer is saved and loaded as torch does, or refused by name."""

import pytest
import torch
from comparing import same
from torch import nn

from booster import Booster
from booster.checkpoint import CheckpointError


class Counted(nn.Linear):
    """Keeps something besides tensors."""

    count = 0

    def get_extra_state(self):
        return {"count": self.count}

    def set_extra_state(self, state):
        self.count = state["count"]


def own(state, prefix):
    return [key for key in state if key.startswith(prefix) and key.endswith("weight")]


def doubled(module):
    module._register_state_dict_hook(
        lambda _, state, prefix, *rest: state.update({key: state[key] * 2 for key in own(state, prefix)})
    )
    module.register_load_state_dict_pre_hook(
        lambda _, state, prefix, *rest: state.update({key: state[key] / 2 for key in own(state, prefix)})
    )


def renamed(module):
    module.register_state_dict_post_hook(
        lambda _, state, prefix, *rest: state.update({prefix + "weights": state.pop(prefix + "weight")})
    )
    module.register_load_state_dict_pre_hook(
        lambda _, state, prefix, *rest: state.update({prefix + "weight": state.pop(prefix + "weights")})
    )


def added(module):
    module._register_state_dict_hook(lambda _, state, prefix, *rest: state.update({prefix + "note": torch.ones(3)}))
    module.register_load_state_dict_pre_hook(lambda _, state, prefix, *rest: state.pop(prefix + "note"))


def counting(module):
    module.register_state_dict_pre_hook(lambda module, *rest: setattr(module, "asked", True))
    module.register_load_state_dict_post_hook(lambda module, *rest: setattr(module, "given", True))


def scaled(states, factor):
    return {key: {n: v * factor if n == "exp_avg" else v for n, v in each.items()} for key, each in states.items()}


def doubled_states(optimizer):
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "state": scaled(state["state"], 2.0), "own": 5})
    optimizer.register_load_state_dict_pre_hook(lambda _, state: {**state, "state": scaled(state["state"], 0.5)})


HOOKS = {each.__name__: each for each in (doubled, renamed, added, counting)}


def job(precision, hook=None, of_optimizer=None, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 6), Counted(6, 6))
    if hook is not None:
        hook(model[1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if of_optimizer is not None:
        of_optimizer(optimizer)
    booster = Booster("cpu", precision)
    parts = booster.boost(model, optimizer)[:2]
    step(booster, *parts)
    return booster, parts, model


def step(booster, model, optimizer):
    booster.backward(model(torch.linspace(-1, 1, 12).view(2, 6)).float().square().mean(), optimizer)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(("saved", "loaded"), [("fp32",) * 2, ("bf16_naive",) * 2, ("bf16_naive", "fp32")])
@pytest.mark.parametrize("hook", [*HOOKS, "of the optimizer"])
def test_a_run_with_hooks_resumes_to_the_bit_and_moves_with_its_numbers(tmp_path, hook, saved, loaded):
    how = {"of_optimizer": doubled_states} if hook == "of the optimizer" else {"hook": HOOKS[hook]}
    booster, parts, model = job(saved, **how)
    model[1].count = 7
    booster.save(tmp_path, *parts)
    again, others, other = job(loaded, **how, seed=1)
    again.load(tmp_path, *others)
    assert other[1].count == 7
    if hook == "counting":
        assert (model[1].asked, other[1].given) == (True, True)
    pairs = [(p.float(), q.float()) for p, q in zip(model.parameters(), other.parameters(), strict=True)]
    half = "bf16_naive" in (saved, loaded)
    assert all(same(p.bfloat16(), q.bfloat16()) if half else same(p, q) for p, q in pairs)
    if saved == loaded:
        step(booster, *parts)
        step(again, *others)
        assert all(same(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("precision", ["fp32", "bf16_naive"])
def test_a_trained_weight_that_a_hook_leaves_out_is_refused_as_it_is_saved(tmp_path, precision):
    def left_out(module):
        module._register_state_dict_hook(lambda _, state, prefix, *rest: state.__delitem__(prefix + "bias"))

    booster, parts, _ = job(precision, left_out)
    with pytest.raises(CheckpointError, match=r"1.bias train, and the state_dict\(\) of this model leaves them out"):
        booster.save(tmp_path, *parts)
    assert not list(tmp_path.iterdir())
