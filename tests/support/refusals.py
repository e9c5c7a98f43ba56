"""States that no optimizer may load, and everything that a refused load must leave as it was."""

import copy

import torch
from torch import nn

MARK = "booster"
_CACHES = ("_addresses", "_views", "num_syncs")


def fingerprint(*roots):
    """All that hangs on `roots` as nested tuples that compare by value, tensors bit for bit; objects of booster and of
    torch.optim are walked through, others are their type."""
    return _walk(roots, {})


def _walk(value, seen):
    if isinstance(value, torch.Tensor) and value.is_meta:
        return ("no data", value.dtype, tuple(value.shape), tuple(value.stride()))
    if isinstance(value, torch.Tensor):
        local = value.to_local() if hasattr(value, "to_local") else value
        bits = local.detach().reshape(-1).contiguous().view(torch.uint8) if local.numel() else local
        key = ("grad of", id(value))
        grad = None
        if value.is_leaf and key not in seen:
            seen[key] = True
            grad = _walk(value.grad, seen)
        return ("tensor", value.dtype, tuple(local.shape), tuple(local.stride()), bytes(bits.tolist()), grad)
    if isinstance(value, (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, range)):
        return repr(value)
    if id(value) in seen:
        return ("seen", type(value).__name__)
    seen[id(value)] = value
    if isinstance(value, nn.Module):
        return [(name, _walk(param, seen)) for name, param in value.named_parameters()]
    if isinstance(value, dict):
        return [
            (_walk(key, seen) if not isinstance(key, torch.Tensor) else "tensor", _walk(v, seen))
            for key, v in value.items()
        ]
    if isinstance(value, (list, tuple)):
        return [_walk(item, seen) for item in value]
    if isinstance(value, (set, frozenset)):
        return ("set", len(value))
    if isinstance(value, torch.Generator):
        return bytes(value.get_state().tolist())
    if type(value).__module__.startswith(("booster.", "torch.optim")):
        held = {name: item for name, item in getattr(value, "__dict__", {}).items() if name not in _CACHES}
        return (type(value).__name__, _walk(held, seen))
    return type(value).__name__


def _last(state):
    return max(state["state"])


def _entry(state, key):
    """The last parameter's first tensor of the parameter's shape."""
    own = state["state"][key]
    return next(name for name, value in own.items() if isinstance(value, torch.Tensor) and value.dim())


def _with_tensor(change):
    def broken(state):
        key = _last(state)
        name = _entry(state, key)
        state["state"][key][name] = change(state["state"][key][name])
        return state

    return broken


def _group(**entries):
    def broken(state):
        state["param_groups"][0].update(entries)
        return state

    return broken


def _params(change):
    def broken(state):
        change(state["param_groups"][0]["params"])
        return state

    return broken


def _without(*path):
    def broken(state):
        *way, last = path
        holder = state
        for key in way:
            holder = holder[key]
        del holder[last]
        return state

    return broken


def _put(*path):
    *way, last, value = path

    def broken(state):
        holder = state
        for key in way:
            holder = holder[key]
        holder[last] = value
        return state

    return broken


def _plus(path, value):
    def broken(state):
        holder = state
        for key in path[:-1]:
            holder = holder[key]
        holder[path[-1]] = holder[path[-1]] + value
        return state

    return broken


def _master(change):
    def broken(state):
        weights = state[MARK]["masters"]["weights"]
        name = list(weights)[-1]
        weights[name] = change(weights[name])
        return state

    return broken


def _renamed_master(state):
    weights = state[MARK]["masters"]["weights"]
    weights["nobody.weight"] = weights.pop(next(iter(weights)))
    return state


def _nan_at_the_end(tensor):
    tensor = tensor.clone()
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    local.view(-1)[-1:] = float("nan")
    return tensor


ANY = {
    "None": lambda state: None,
    "a number": lambda state: 3,
    "a list": lambda state: [state],
    "empty": lambda state: {},
    "no groups": _without("param_groups"),
    "no state": _without("state"),
    "groups are None": _put("param_groups", None),
    "groups are a dict": _put("param_groups", {}),
    "no group": _put("param_groups", []),
    "a group is a list": _put("param_groups", 0, [1, 2]),
    "one group more": _plus(("param_groups",), [{"params": [], "lr": 0.1}]),
    "a group without params": _without("param_groups", 0, "params"),
    "params are None": _group(params=None),
    "one parameter more": _params(lambda params: params.append(99)),
    "one parameter less": _params(lambda params: params.pop()),
    "a parameter twice": _params(lambda params: params.__setitem__(-1, params[0])),
    "a group without lr": _without("param_groups", 0, "lr"),
    "state is None": _put("state", None),
    "state is a list": _put("state", [1]),
    "an entry is a number": lambda state: _put("state", _last(state), 3)(state),
    "state of an unknown parameter": lambda state: _put("state", 99, state["state"][_last(state)])(state),
    "a key that is no name": lambda state: _put("state", _last(state), 7, torch.zeros(()))(state),
    "another shape": _with_tensor(lambda tensor: torch.zeros(3, 5, 7)),
    "an empty tensor": _with_tensor(lambda tensor: torch.zeros(0)),
    "a text for a tensor": _with_tensor(lambda tensor: "zeros"),
    "own entry is None": _put(MARK, None),
    "own entry is a number": _put(MARK, 3),
    "own entry is empty": _put(MARK, {}),
    "no counters": _without(MARK, "num_steps"),
    "a negative counter": _put(MARK, "num_applied", -1),
    "a counter is a bool": _put(MARK, "num_steps", True),
    "a counter is a fraction": _put(MARK, "num_steps", 9.5),
    "counters contradict each other": _plus((MARK, "num_applied"), 100),
    "more skips than steps": _plus((MARK, "num_consecutive_skips"), 100),
    "no loss scaler": _without(MARK, "loss_scaler"),
    "the loss scaler is a number": _put(MARK, "loss_scaler", 3),
    "the loss scaler is another's": _put(MARK, "loss_scaler", {"colour": "blue"}),
}
SCALED = {
    "a scale below zero": _put(MARK, "loss_scaler", "scale", -1.0),
    "a scale that is NaN": _put(MARK, "loss_scaler", "scale", float("nan")),
    "a scale that is infinite": _put(MARK, "loss_scaler", "scale", float("inf")),
    "a scale that is a bool": _put(MARK, "loss_scaler", "scale", True),
    "a scale that is a text": _put(MARK, "loss_scaler", "scale", "8.0"),
    "no scale": _without(MARK, "loss_scaler", "scale"),
    "a growth tracker that is a bool": _put(MARK, "loss_scaler", "growth_tracker", True),
    "a growth tracker that is a fraction": _put(MARK, "loss_scaler", "growth_tracker", 1.5),
    "a hysteresis tracker below zero": _put(MARK, "loss_scaler", "hysteresis_tracker", -1),
}
APEX = {
    "an apex scale that is a bool": _put(MARK, "loss_scaler", "loss_scaler0", "loss_scale", True),
    "an apex scale that is NaN": _put(MARK, "loss_scaler", "loss_scaler0", "loss_scale", float("nan")),
    "an apex scale that is a text": _put(MARK, "loss_scaler", "loss_scaler0", "loss_scale", "8"),
    "an apex count below zero": _put(MARK, "loss_scaler", "loss_scaler0", "unskipped", -1),
    "an apex entry that is a number": _put(MARK, "loss_scaler", "loss_scaler0", 3),
    "an apex entry that is nobody's": _put(MARK, "loss_scaler", "nobody", {"loss_scale": 8.0, "unskipped": 0}),
}
MASTERS = {
    "masters are a number": _put(MARK, "masters", 3),
    "masters without weights": _put(MARK, "masters", {}),
    "weights of masters are a list": _put(MARK, "masters", {"weights": [1]}),
    "masters of an unknown name": _put(MARK, "masters", {"weights": {"nobody": torch.zeros(3)}}),
    "rounding is a number": _put(MARK, "masters", "rounding", 3),
}
ROUNDING = {
    "rounding of an unknown device": _put(MARK, "masters", "rounding", {"moon": torch.zeros(8, dtype=torch.uint8)}),
    "a rounding that is no random state": _put(MARK, "masters", "rounding", {"cpu": torch.zeros(8, dtype=torch.uint8)}),
}
FILLED_MASTERS = {
    "a master that is a number": _master(lambda tensor: 3.0),
    "a master that is None": _master(lambda tensor: None),
    "a master of integers": _master(lambda tensor: tensor.to(torch.int64)),
    "a master of bools": _master(lambda tensor: tensor > 0),
    "a master of complex numbers": _master(lambda tensor: tensor.to(torch.complex64)),
    "a master of half numbers": _master(lambda tensor: tensor.half()),
    "a master of NaN": _master(_nan_at_the_end),
    "a master of another shape": _master(lambda tensor: torch.zeros(3, 5, 7)),
    "a master of an unknown name": _renamed_master,
}


def zoo(good):
    """(name, broken state) for all that fit the kind of state that `good` is. Tensors are shared with `good`, not changed."""
    kinds = dict(ANY)
    scaler = good[MARK]["loss_scaler"]
    kinds |= APEX if "loss_scaler0" in scaler else SCALED if scaler else {}
    if "masters" in good[MARK]:
        kinds |= MASTERS
        if "rounding" in good[MARK]["masters"]:
            kinds |= ROUNDING
        if good[MARK]["masters"]["weights"]:
            kinds |= FILLED_MASTERS
    else:
        kinds["masters of another precision"] = _put(MARK, "masters", {"weights": {"weight": torch.zeros(2)}})
    for name, broken in kinds.items():
        yield name, broken(_copied(good))


def _copied(value):
    """Containers copied, tensors shared."""
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copied(item) for item in value]
    return value if isinstance(value, torch.Tensor) else copy.deepcopy(value)
