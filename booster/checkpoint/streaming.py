"""Weights from files straight into a model, in the dtypes that they are to be stored in: never two copies of them."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from torch import nn

from booster.checkpoint.manifest import CheckpointError
from booster.checkpoint.tensor_file import Entry, entries_of, pieces, read_entry
from booster.checkpoint.tensor_layout import mark_written
from booster.checkpoint.weight_files import half_read, is_safetensors, weight_files
from booster.common.text import listed
from booster.common.untrusted_files import open_regular
from booster.frozen import Form, FrozenLinear, note_origin
from booster.mixed_precision.keep_fp32 import KeepFP32, KeptModules
from booster.model.modules import TensorPlace, places_of

_logger = logging.getLogger(__name__)

_WIDE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Storage:
    """How weights are to be stored. linear: those of linear layers that are to be frozen, None for none. wide: all other
    floating parameters, None for the dtype that the model has. compute: what frozen layers multiply in, None for that of
    autocast or their input.
    """

    linear: Form | torch.dtype | None
    wide: torch.dtype | None
    compute: torch.dtype | None


@dataclass(frozen=True, eq=False)
class _Step:
    """One tensor of the model, all its places, where its values come from, and in what it is stored."""

    tensor: torch.Tensor
    places: list[TensorPlace]
    entry: Entry
    stored: Form | torch.dtype
    frozen: bool
    packed: bool = False  # in the file already


def stream(
    model: nn.Module,
    path: Path,
    storage: Storage,
    *,
    keep: tuple[KeepFP32, ...],
    device: torch.device,
) -> nn.Module:
    """Load the weights in `path` into `model`, in place, and return it, which is another object where it is one layer itself.

    Tensor after tensor: first what has no memory yet, or is to be frozen, into new memory; then all else into the memory that
    it has, or, where its dtype changes, into new memory in its place. keep: linear layers that are not frozen. device: where
    what is on the meta device gets memory. Raises CheckpointError that lists all that does not fit, with nothing touched. One
    that another process cuts short meanwhile leaves the model as it was in the first half; in the second the error says that
    weights hold parts of it. What is to be packed is read twice, first to see that all of it is finite.
    """
    files = weight_files(path)
    others = [str(file) for file in files if not is_safetensors(file)]
    if others:
        raise CheckpointError(
            f"{others[0]} is not a safetensors file, and no other can be read in parts; save the weights as safetensors, by "
            "Booster.save_model or save_pretrained"
        )
    entries: dict[str, Entry] = {}
    problems = []
    for file in files:
        for name, entry in entries_of(file).items():
            if name in entries:
                problems.append(f"{name} is in {entries[name].file.name} and in {file.name}")
            entries[name] = entry
    steps, more = _plan(model, entries, storage, keep)
    problems += more
    if problems:
        raise CheckpointError(f"{path} does not fit this model:\n  " + "\n  ".join(problems))
    with ExitStack() as stack:
        opened = {file: stack.enter_context(open_regular(file)) for file in files}
        for step in steps:
            _refuse_what_has_no_code(opened[step.entry.file], step)
        steps.sort(key=lambda step: (str(step.entry.file), step.entry.start))
        # All memory first: between weights that stay, what is only needed for a while would leave holes.
        new = {step: _memory_for(step, device) for step in steps if _is_new(step)}
        for step, memory in new.items():
            _read(opened[step.entry.file], step, memory)
        try:
            for step in steps:
                if step not in new:
                    _read_in_place(opened[step.entry.file], step)
        except (CheckpointError, OSError) as error:
            raise half_read(error) from error
    for step in steps:
        model = _install(model, step, storage, new.pop(step, None))
    frozen = [place.holder for step in steps if step.frozen for place in step.places[:1]]
    if storage.linear is not None:
        layers = [name for name, module in model.named_modules() if type(module) is nn.Linear]
        _logger.info(
            "%d linear layers of %s are stored in %s and frozen; stored wide: %s",
            len(frozen),
            type(model).__name__,
            str(storage.linear).removeprefix("torch."),
            listed(layers) or "none",
        )
    return model


def _plan(
    model: nn.Module, entries: dict[str, Entry], storage: Storage, keep: Iterable[KeepFP32]
) -> tuple[list[_Step], list[str]]:
    """Return what is to be done, and all that does not fit, in words."""
    kept = KeptModules(model, tuple(keep), option="keep")
    params = {id(param) for param in model.parameters()}
    steps, problems, used = [], [], set()
    for tensor, places in places_of(model, buffers=True).items():
        saved = [place for place in places if place.own not in place.holder._non_persistent_buffers_set]
        names = [place.name for place in saved if place.name in entries]
        used |= set(names)
        first = places[0]
        if not saved:
            if tensor.is_meta:
                problems.append(
                    f"{first.name} is a buffer that no file holds, and it is on the meta device: build the "
                    f"{type(first.holder).__name__} that holds it on the CPU, and put it in its place first"
                )
            continue
        frozen = id(tensor) in params and storage.linear is not None and _can_freeze(places, kept)
        if frozen and not names and f"{first.name}_{storage.linear}" in entries:
            entry = entries[f"{first.name}_{storage.linear}"]
            fault = _fault_of_packed(tensor, entry, storage.linear)
            problems += [f"{entry.name} {fault}"] if fault else []
            used.add(entry.name)
            steps.append(_Step(tensor, places, entry, storage.linear, frozen, packed=True))  # type: ignore[arg-type]
            continue
        if not names:
            problems.append(f"{' and '.join(place.name for place in saved)}: not in the file")
            continue
        entry = entries[names[0]]
        if frozen and storage.linear is not None:
            stored: Form | torch.dtype = storage.linear
        else:
            stored = storage.wide if id(tensor) in params and storage.wide and _is_wide(tensor.dtype) else tensor.dtype
        is_param = id(tensor) in params
        fault = _fault(
            tensor,
            entry,
            stored,
            any_float=is_param and (storage.wide is not None or frozen),
            widens=not is_param or storage.linear is not None,
        )
        problems += [f"{names[0]} {fault}"] if fault else []
        problems += [
            f"{name} and {names[0]} are one tensor in the model, and differ in the file"
            for name in names[1:]
            if not fault and not _same(entries[name], entry)
        ]
        steps.append(_Step(tensor, places, entry, stored, frozen))
    problems += [f"{name}: not in the model" for name in entries if name not in used]
    return steps, problems


def _can_freeze(places: list[TensorPlace], kept: KeptModules) -> bool:
    """Whether the tensor of these places is the weight of one plain linear layer, not kept."""
    holder = places[0].holder
    return (
        type(holder) is nn.Linear
        and "forward" not in vars(holder)
        and all(place.holder is holder and place.own == "weight" for place in places)
        and not any(kept.contains(place.name.removesuffix(".weight")) for place in places)
    )


def _fault(tensor: torch.Tensor, entry: Entry, stored: Form | torch.dtype, *, any_float: bool, widens: bool) -> str:
    """What of `entry` does not fit `tensor`, in words; empty where it does.

    any_float: it was said how to store floating numbers. widens: it keeps the model's dtype, where that loses nothing.
    """
    if entry.shape != tuple(tensor.shape):
        return f"has shape {entry.shape} in the file and {tuple(tensor.shape)} in the model"
    if entry.dtype == stored:
        return ""
    has, wants = (str(dtype).removeprefix("torch.") for dtype in (entry.dtype, tensor.dtype))
    differ = f"is {has} in the file and {wants} in the model"
    if not (_is_wide(entry.dtype) and _is_wide(tensor.dtype)):
        return differ
    if any_float or (widens and torch.promote_types(entry.dtype, tensor.dtype) == tensor.dtype):
        return ""
    return (
        f"{differ}, which would lose bits" if widens else f"{differ}; pass storage_dtype= to say in which to store it"
    )


def _fault_of_packed(tensor: torch.Tensor, entry: Entry, form: Form | torch.dtype | None) -> str:
    wants = (tensor.shape[0], form.row_bytes(tensor.shape[1])) if isinstance(form, Form) else ()
    if entry.dtype == torch.uint8 and entry.shape == wants:
        return ""
    return (
        f"is {entry.dtype} of shape {entry.shape} in the file, and a weight of this layer in {form} is uint8 of {wants}"
    )


def _is_new(step: _Step) -> bool:
    """Whether a tensor gets memory beside what the model has; all else is read into what is there, or in its place."""
    return step.frozen or step.tensor.is_meta


def _memory_for(step: _Step, device: torch.device) -> torch.Tensor:
    """Return memory without values that one new tensor is to be read into."""
    old = step.tensor
    there = device if old.is_meta else old.device
    if step.frozen:
        return FrozenLinear.memory(step.places[0].holder, step.stored, there)  # type: ignore[arg-type]
    return torch.empty_strided(old.shape, old.stride(), dtype=step.stored, device=there)  # type: ignore[arg-type]


def _read_in_place(opened: IO[bytes], step: _Step) -> None:
    """Read one tensor into its memory, or give it new memory of another dtype, which replaces that."""
    tensor = step.tensor.detach()
    if tensor.dtype == step.stored:
        _read(opened, step, tensor)
        mark_written([step.tensor])
    else:
        memory = torch.empty_like(tensor, dtype=step.stored)  # type: ignore[arg-type]
        _read(opened, step, memory)
        step.tensor.data = memory


@torch.no_grad()
def _install(model: nn.Module, step: _Step, storage: Storage, memory: torch.Tensor | None) -> nn.Module:
    """Give one tensor what was read of it, in all its places; returns the model. memory: None where it has it already."""
    holders = [place.name.rpartition(".")[0] for place in step.places]
    if step.frozen:
        # By its name, as below: what was installed before may stand in the place of another module.
        linear = model.get_submodule(holders[0])
        layer = FrozenLinear.of(linear, step.stored, compute_dtype=storage.compute, weight=memory)  # type: ignore[arg-type]
        note_origin(layer, layer.stored_name, step.entry.dtype)
        for name in holders:
            if name:
                model.set_submodule(name, layer)
            else:
                model = layer
        return model
    target = step.tensor
    if memory is not None:
        target = nn.Parameter(memory, target.requires_grad) if isinstance(target, nn.Parameter) else memory
    for place, name in zip(step.places, holders, strict=True):
        holder = model.get_submodule(name)
        table = holder._parameters if place.own in holder._parameters else holder._buffers
        table[place.own] = target  # type: ignore[assignment]
        note_origin(holder, place.own, step.entry.dtype)
    return model


@torch.no_grad()
def _refuse_what_has_no_code(opened: IO[bytes], step: _Step) -> None:
    """Raise CheckpointError where `step` packs weights that are not finite, which the form would refuse midway."""
    if not isinstance(step.stored, Form) or step.packed:
        return
    for piece in pieces(opened, step.entry):
        if not bool(piece.float().isfinite().all()):  # a form packs what float32 makes of it
            raise CheckpointError(
                f"{step.entry.name}: {step.stored} has no code for inf or NaN, and there is one among these weights; leave "
                "its layer wide with keep="
            )


@torch.no_grad()
def _read(opened: IO[bytes], step: _Step, target: torch.Tensor) -> None:
    if isinstance(step.stored, Form) and not step.packed:
        columns, row = step.entry.shape[1], 0
        for piece in pieces(opened, step.entry, columns):
            matrix = piece.view(-1, columns)
            target[row : row + len(matrix)] = step.stored.pack(matrix.to(target.device))
            row += len(matrix)
        return
    if target.is_contiguous():
        read_entry(opened, step.entry, target)
    else:
        target.copy_(read_entry(opened, step.entry))


def _same(a: Entry, b: Entry) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    with open_regular(a.file) as one, open_regular(b.file) as other:
        pairs = zip(pieces(one, a), pieces(other, b), strict=True)
        return all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in pairs)


def _is_wide(dtype: torch.dtype) -> bool:
    return dtype in _WIDE
