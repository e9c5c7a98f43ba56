"""What a checkpoint folder says, read from its format by nothing of the library, and how a job differs from it.

A load that raises nothing must have made the job so. Where a file says nothing of a value, as of the option of a schedule that
another version has, the job keeps its own.
"""

import json
import random
import sys
from functools import cached_property

import torch
from safetensors import safe_open


def snapshot(target):
    """Copies of all that a load may change, by name."""
    model, optimizer, _, loader, schedule = target.parts
    states = optimizer.state_dict()
    return copied(
        {
            "model": dict(model.state_dict()),
            "states": by_name(optimizer, states["state"]),
            "groups": [{k: v for k, v in group.items() if k != "params"} for group in states["param_groups"]],
            "own": {key: value for key, value in states["booster"].items() if key not in ("masters", "parameters")},
            "masters": states["booster"].get("masters", {}).get("weights", {}),
            "scheduler": schedule.state_dict(),
            "loader": loader.state_dict(),
            "random": random_states(),
        }
    )


def by_name(optimizer, states):
    names = [name for group in optimizer.parameter_names() for name, _ in group]
    return {names[number]: dict(state) for number, state in states.items() if state}


def random_states():
    version, words, gauss = random.getstate()
    found = {"torch": torch.get_rng_state(), "python": [version, torch.tensor(words), gauss]}
    if numpy := sys.modules.get("numpy"):
        name, keys, *rest = numpy.random.get_state(legacy=True)
        found["numpy"] = [name, torch.from_numpy(keys.astype("int64")), *rest]
    return found


def copied(value):
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: copied(entry) for key, entry in value.items()}
    return [copied(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


def different(now, said, where=""):
    """Yield where two snapshots, or parts of them, are not the same to the bit; lists and tuples are alike."""
    if isinstance(now, torch.Tensor) or isinstance(said, torch.Tensor):
        now, said = torch.as_tensor(now), torch.as_tensor(said)
        said = said.to(now.dtype)
        if now.shape != said.shape or not torch.equal(bits(now), bits(said)):
            yield f"{where} is {str(now)[:60]}, and {str(said)[:60]} is said"
    elif isinstance(now, dict) and isinstance(said, dict):
        for key in now.keys() | said.keys():
            if key not in now or key not in said:
                yield f"{where}/{key} is {'here' if key in now else 'said'} alone"
            else:
                yield from different(now[key], said[key], f"{where}/{key}")
    elif isinstance(now, (list, tuple)) and isinstance(said, (list, tuple)):
        if len(now) != len(said):
            yield f"{where} has {len(now)} entries, and {len(said)} are said"
        for index, (one, other) in enumerate(zip(now, said, strict=False)):
            yield from different(one, other, f"{where}[{index}]")
    elif repr(now) != repr(said) and not (isinstance(now, (int, float)) and now == said):
        yield f"{where} is {now!r:.60}, and {said!r:.60} is said"


class SavedContent:
    """What the checkpoint in `folder` says of the one model "0", optimizer, loader and scheduler that it has."""

    def __init__(self, folder):
        content = json.loads((folder / "manifest.json").read_bytes())["content"]
        self.step, self.tensors = content["step"], content["tensors"]
        self.folder = folder

    @cached_property
    def tree(self):
        return json.loads((self.folder / "state.json").read_bytes())

    @property
    def optimizer(self):
        return self.tree["optimizers"]["0"]

    @property
    def extra(self):
        return self.value(self.tree["extra"])

    def tensor(self, name):
        said = self.tensors[name]
        whole = torch.zeros(said["shape"], dtype=getattr(torch, said["dtype"]))
        for chunk in said["chunks"]:
            if 0 in chunk["sizes"]:
                continue
            with safe_open(self.folder / chunk["file"], "pt") as file:
                part = file.get_tensor(chunk["key"])
            assert (part.dtype, list(part.shape)) == (whole.dtype, chunk["sizes"])
            whole[tuple(slice(o, o + s) for o, s in zip(chunk["offsets"], chunk["sizes"], strict=True))] = part
        return whole

    def value(self, coded):
        if isinstance(coded, list):
            return [self.value(entry) for entry in coded]
        if not isinstance(coded, dict):
            return coded
        kind = coded.get("__booster__")
        if "__booster__" not in coded:
            return {key: self.value(entry) for key, entry in coded.items()}
        if kind == "tensor":
            return self.tensor(coded["name"])
        if kind == "float":
            return float(coded["value"])
        if kind in ("tuple", "set", "frozenset"):
            return [self.value(entry) for entry in coded["items"]]
        if kind == "dict":
            return {self.value(key): self.value(entry) for key, entry in coded["items"]}
        if kind == "dtype":
            return getattr(torch, coded["value"])
        assert kind == "device", coded
        return torch.device(coded["value"])

    def weight(self, name):
        return self.value(self.tree["models"]["0"][name])

    def behind(self):
        """Which tensor has the numbers behind which weight, by the weight's name; earlier versions had the names alone."""
        reported = self.tree.get("masters")
        if reported is None:
            return {name: value["name"] for name, value in self.masters().items()}
        return {name.removeprefix("models/0/"): master for name, master in reported.items()}

    def wide(self, name):
        """The numbers behind a weight: what is said to stand behind it, else its own."""
        behind = self.behind().get(name)
        return (self.tensor(behind) if behind is not None else self.weight(name)).float()

    def masters(self):
        return (self.optimizer["booster"].get("masters") or {}).get("weights", {})

    def master(self, name):
        """The numbers that the optimizer steps."""
        return self.value(self.masters()[name]).float() if name in self.masters() else self.wide(name)


def rounded(wide, dtype):
    """Float32 numbers as half ones: to nearest, ties of bfloat16 away from zero."""
    if dtype != torch.bfloat16:
        return wide.to(dtype)
    halves = ((wide.view(torch.int32).to(torch.int64) + 0x8000) >> 16).to(torch.int16)
    return torch.where(wide.isnan(), wide.to(dtype), halves.view(dtype))


PROGRESS = ("last_epoch", "_step_count", "_last_lr", "base_lrs")


def wrong_after(reader, reported, before, now):
    """Yield where a job, a snapshot `before` and `now`, is not what the load of `reported` by `reader` should have made it.

    reader: "load", of everything, "load_model" or "load_optimizer".
    """
    optimizer, model = reader != "load_model", reader != "load_optimizer"
    masters = set(before["masters"])
    said = dict(before)
    if model:
        said["model"] = {
            name: rounded(reported.wide(name), tensor.dtype)
            if name in masters
            else reported.weight(name).to(tensor.dtype)
            for name, tensor in before["model"].items()
        }
        said["masters"] = {name: followed(reported, name, before) for name in masters}
    if optimizer:
        said["masters"] = {name: reported.master(name) for name in masters}
        weights = {name: rounded(wide, before["model"][name].dtype) for name, wide in said["masters"].items()}
        said["model"] = {**said["model"], **weights}
        states = {name: reported.value(state) for name, state in reported.optimizer["state"].items()}
        said["states"] = {name: state for name, state in states.items() if state}
        options = [reported.value(group["options"]) for group in reported.optimizer["groups"]]
        defaults = [{key: own[key] for key in TORCHS & own.keys()} for own in before["groups"]]
        # Those of schedules may be left out, and how steps are computed is a matter of the job.
        gone = [{key: own[key] for key in OF_SCHEDULERS & own.keys()} for own in now["groups"]]
        own = [{key: own[key] for key in ("foreach", "fused")} for own in before["groups"]]
        said["groups"] = [a | b | c | d for a, b, c, d in zip(defaults, gone, options, own, strict=True)]
        own = reported.optimizer["booster"]
        said["own"] = {key: reported.value(own[key]) for key in before["own"] if key in own or key != "release"}
        if said["own"]["loss_scaler"].keys() != before["own"]["loss_scaler"].keys():
            said["own"]["loss_scaler"] = before["own"]["loss_scaler"]  # of another kind, with a warning
        elif "hysteresis_tracker" in said["own"]["loss_scaler"]:
            said["own"]["loss_scaler"]["hysteresis_tracker"] = 0  # the jobs back off at each overflow, and count none
    if reader == "load":
        state = reported.value(reported.tree["lr_schedulers"]["0"])
        for name in PROGRESS:
            if name not in state:
                yield f"the scheduler has not got {name}"
        said["scheduler"] = {key: state.get(key, own) for key, own in before["scheduler"].items()}
        position = reported.value(reported.tree["dataloaders"]["0"])
        # Who saved before orders were written does not say one.
        said["loader"] = {key: position[key] for key in before["loader"] if key in position or key != "order"}
    if len(reported.tree["random"]) == 1:
        state = reported.value(reported.tree["random"][0])
        said["random"] = before["random"] | {
            "torch": torch.Generator().set_state(state["torch"]).get_state(),  # as torch writes what it was given
            "python": [state["python"][key] for key in ("version", "words", "gauss")],
        }
        if "numpy" in before["random"] and "numpy" in state:
            said["random"]["numpy"] = [state["numpy"][key] for key in ("name", "words", "position", "gauss", "cached")]
    yield from different(now, said)


OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr", "param_names"}
# Options that torch gives what it takes for a default.
TORCHS = {"amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay"}


def followed(reported, name, before):
    """The master of a weight that was loaded without its optimizer: one that rounds to just that weight stays."""
    own, weight = before["masters"][name], reported.weight(name)
    half = before["model"][name].dtype
    if name not in reported.behind() and not list(different(rounded(own, half), weight.to(half))):
        return own
    return reported.wide(name)
