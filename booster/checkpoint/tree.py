"""What a checkpoint says beside its tensors: the JSON tree of names, read and held to its form."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from booster.checkpoint.hashing import hash_of
from booster.checkpoint.layout import reference, references
from booster.checkpoint.manifest import STATE, CheckpointError, Manifest, read_text, room_of
from booster.common.untrusted_files import parse_json
from booster.update.state_dict import STATE_KEY

BESIDE = "beside"  # of an optimizer: states of no parameter, by keys of its own
_KINDS = ("models", "criteria", "optimizers", "dataloaders", "lr_schedulers", "pins", "run")


def read_tree(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """Read and check the tree of the checkpoint in `folder`: what is named in it is of the kind that a load takes it for.

    Raises CheckpointError for damage, and for what `save` did not write.
    """
    path = folder / STATE
    if STATE not in manifest.files:
        raise CheckpointError(f"{folder} is damaged: its manifest names no {STATE}")
    try:
        text, expected = read_text(folder, STATE), manifest.files[STATE]
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if hash_of(text, expected.hash) != expected.digest:
        raise CheckpointError(f"{STATE} holds other bytes than were written")
    try:
        tree = parse_json(text, room_of(folder))
        _check(tree)
        _check_references(tree, manifest)
    except ValueError as error:
        raise CheckpointError(f"{path} does not say what a checkpoint says: {error}") from error
    return dict.fromkeys(_KINDS, {}) | tree


def _check(tree: Any) -> None:
    _mapping("it", tree)
    for kind in _KINDS:
        _mapping(kind, tree.get(kind, {}))
    for kind in ("models", "criteria", "dataloaders"):
        _each(kind, tree.get(kind, {}), _mapping)
    for name, pins in tree.get("pins", {}).items():
        _mapping(f"pins {name!r}", pins)
        _texts(f"the names of pins {name!r}", pins.get("names", []))
        _each(f"the skips of pins {name!r}", _mapping("skips", pins.get("skips", {})), _numbers)
    for name, optimizer in tree.get("optimizers", {}).items():
        _check_optimizer(f"optimizers {name!r}", optimizer)
    _check_masters(tree)
    for kind in ("random", "loaders", "carried"):
        for own in _list(kind, tree.get(kind, [])):
            _mapping(kind, own)
            if kind != "random":
                _each(kind, own, _mapping)
    _list("extras", tree.get("extras", []))
    for own in _list("own", tree.get("own", [])):
        _texts("own tensors", list(_mapping("own", own).values()))
    missing = {"extra", "random", "loaders"} - tree.keys()
    if missing:
        raise ValueError(f"it has no {', '.join(sorted(missing))}")


def _check_optimizer(name: str, optimizer: Any) -> None:
    _mapping(name, optimizer)
    if not isinstance(optimizer.get("class"), str):
        raise ValueError(f"{name} is of no class")
    _each(f"the state of {name}", _mapping(f"the state of {name}", optimizer.get("state")), _mapping)
    for group in _list(f"the groups of {name}", optimizer.get("groups")):
        _mapping(f"a group of {name}", group)
        _mapping(f"the options of a group of {name}", group.get("options"))
        _mapping(f"the parameters of a group of {name}", group.get("params"))
    _mapping(f"the state of {name} of no parameter", optimizer.get(BESIDE, {}))
    own = _mapping(f"{STATE_KEY} of {name}", optimizer.get(STATE_KEY))
    _mapping(f"the loss scale of {name}", own.get("loss_scaler"))
    params = {param for group in optimizer["groups"] for param in group["params"]}
    _of_these(f"the state of {name}", optimizer["state"], params)
    if own.get("masters") is not None:
        masters = _mapping(f"the masters of {name}", own["masters"])
        weights = _mapping(f"the masters of {name}", masters.get("weights", {}))
        _of_these(f"the masters of {name}", weights, params)
        for param, value in weights.items():
            if not isinstance(reference(value), str):  # a load would take the half weight in its place
                raise ValueError(f"the master of {param} in {name} is no tensor, but {_kind(value)}")


def _check_masters(tree: Mapping[str, Any]) -> None:
    """Which master stands behind which weight: masters of the optimizers there, and weights of the modules."""
    told = _mapping("masters", tree.get("masters", {}))
    _texts("masters", list(told.values()))
    kept: set[Any] = set()
    for optimizer in tree.get("optimizers", {}).values():
        kept |= {
            reference(value) for value in ((optimizer[STATE_KEY].get("masters") or {}).get("weights", {})).values()
        }
    modules = [f"{kind}/{name}/" for kind in ("models", "criteria") for name in tree.get(kind, {})]
    for weight, master in told.items():
        if master not in kept or not weight.startswith(tuple(modules)):
            raise ValueError(f"it tells of a master {master!r} behind {weight!r}, and one of them is not in it")


def _check_references(tree: Mapping[str, Any], manifest: Manifest) -> None:
    """What is referred to is there, and masters have the shapes of the weights that they stand behind."""
    tensors = manifest.tensors
    if missing := sorted({name for name in references(tree) if name not in tensors}):
        raise ValueError(f"it refers to tensors {missing[:3]}, which the checkpoint does not hold")
    for name, own in (pair for each in tree.get("own", []) for pair in each.items()):
        if name not in tensors or own not in tensors:
            raise ValueError(f"it has {own!r} for {name!r}, which the checkpoint does not hold")
        if not name.startswith("extra/") and (tensors[name].shape, tensors[name].dtype) != (
            tensors[own].shape,
            tensors[own].dtype,
        ):
            raise ValueError(f"{own} is no tensor like {name}")
    for weight, master in tree.get("masters", {}).items():
        if weight in tensors and tensors[weight].shape != tensors[master].shape:
            raise ValueError(f"the master of {weight} has shape {tensors[master].shape}, not {tensors[weight].shape}")


def _of_these(what: str, found: Mapping[str, Any], params: Collection[str]) -> None:
    if unknown := sorted(found.keys() - params):
        raise ValueError(f"{what} names {unknown[:3]}, and none of its groups has such a parameter")


def _each(what: str, found: Mapping[str, Any], check: Callable[[str, Any], Any]) -> None:
    for name, value in found.items():
        check(f"{what} {name!r}", value)


def _mapping(what: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is no object, but {_kind(value)}")
    return value


def _list(what: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{what} is no list, but {_kind(value)}")
    return value


def _texts(what: str, value: Any) -> None:
    if not all(isinstance(entry, str) for entry in _list(what, value)):
        raise ValueError(f"{what} are no texts")


def _numbers(what: str, value: Any) -> None:
    if not all(type(entry) is int for entry in _list(what, value)):
        raise ValueError(f"{what} are no whole numbers")


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"a value of the kind {type(value).__name__}"
