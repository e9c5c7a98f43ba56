"""What a checkpoint says beside its tensors: the JSON tree of names, read and held to its form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from booster.checkpoint.hashing import hash_of
from booster.checkpoint.manifest import STATE, CheckpointError, Manifest, read_text
from booster.foreign_files import parse_json
from booster.update.checkpoint import STATE_KEY

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
        tree = parse_json(text)
        _check(tree)
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
    _texts("masters", list(_mapping("masters", tree.get("masters", {})).values()))
    for kind in ("random", "loaders", "carried"):
        for own in _list(kind, tree.get(kind, [])):
            _mapping(kind, own)
            if kind != "random":
                _each(kind, own, _mapping)
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
    own = _mapping(f"{STATE_KEY} of {name}", optimizer.get(STATE_KEY))
    _mapping(f"the loss scale of {name}", own.get("loss_scaler"))
    masters = own.get("masters")
    if masters is not None:
        _mapping(f"the masters of {name}", masters)
        _mapping(f"the masters of {name}", masters.get("weights", {}))


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
