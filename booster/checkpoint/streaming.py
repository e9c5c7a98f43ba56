"""Weights from files straight into a model, in the dtypes that they are to be stored in: never two copies of them."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import nn

from booster.checkpoint.manifest import CheckpointError
from booster.checkpoint.state_tree import mark_written
from booster.checkpoint.tensor_file import Entry, entries_of, pieces, read_entry
from booster.checkpoint.weight_files import check_unchanged, half_read, is_safetensors, weight_files
from booster.common.arguments import listed
from booster.common.untrusted_files import open_regular
from booster.frozen import Form, FrozenLinear, remember_origin
from booster.mixed_precision.keep_fp32 import KeepFP32, KeptModules
from booster.model.modules import TensorPlace, tensor_places

_logger = logging.getLogger(__name__)

_HIGH_PRECISION = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Storage:
    """How weights are to be stored.

    Attributes:
        linear: those of linear layers that are to be frozen; None for none.
        wide: all other floating parameters; None for the dtype that the model has.
        compute: what frozen layers multiply in; None for that of autocast or their input.
    """

    linear: Form | torch.dtype | None
    wide: torch.dtype | None
    compute: torch.dtype | None


@dataclass(frozen=True, eq=False)
class _Step:
    """One tensor of the model.

    Attributes:
        tensor: as the model has it now.
        places: all of it in the model.
        entry: where its values come from.
        stored: in what it is stored.
        frozen: it becomes the weight of a frozen layer.
        packed: its entry has the bits of the form already.
    """

    tensor: torch.Tensor
    places: list[TensorPlace]
    entry: Entry
    stored: Form | torch.dtype
    frozen: bool
    packed: bool = False

    @property
    def packs(self) -> bool:
        """Whether its values are packed as they are read."""
        return isinstance(self.stored, Form) and not self.packed

    @property
    def is_new(self) -> bool:
        """Whether it gets memory next to what the model has; all else is read into what is there, or replaces that."""
        return self.frozen or self.tensor.is_meta


def stream(
    model: nn.Module, path: Path, storage: Storage, *, keep: tuple[KeepFP32, ...], device: torch.device
) -> nn.Module:
    """Load the weights in `path` into `model`, in place, and return it, which is another object where it is one layer itself.

    Tensor after tensor: first what has no memory yet, or is to be frozen, into new memory; then all else into the memory that
    it has, or, where its dtype changes, into new memory in its place. keep: linear layers that are not frozen. device: where
    what is on the meta device gets memory. Raises CheckpointError that lists all that does not fit, with nothing touched. One
    that another process cuts short meanwhile leaves the model as it was in the first half; in the second the error says that
    weights hold parts of it. What is to be packed is read twice, first to see that all of it is finite.
    """
    # What the files were is noted first, and compared twice: another process may write them meanwhile.
    before, files = check_unchanged(path), weight_files(path)
    if others := [str(file) for file in files if not is_safetensors(file)]:
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
            _refuse_nonfinite(opened[step.entry.file], step)
        check_unchanged(path, before)
        # In the order of the files, so that a disk reads them from beginning to end.
        steps.sort(key=lambda step: (str(step.entry.file), step.entry.start))
        # All memory first: between weights that stay, what is only needed for a while would leave holes.
        new = {step: _memory_for(step, device) for step in steps if step.is_new}
        for step, memory in new.items():
            _read(opened[step.entry.file], step, memory)
        try:
            for step in steps:
                if step in new:
                    continue
                target = step.tensor.detach()
                if target.dtype != step.stored:
                    target = torch.empty_like(target, dtype=cast(Any, step.stored))
                _read(opened[step.entry.file], step, target)
                if target.dtype == step.tensor.dtype:
                    # The bytes were read past autograd: a graph that saved this weight has to notice.
                    mark_written([step.tensor])
                else:
                    step.tensor.data = target
            check_unchanged(path, before)
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
    for tensor, places in tensor_places(model, buffers=True).items():
        # Buffers that are not persistent are in no file, and are computed where the model is built.
        saved = [place for place in places if place.own not in place.holder._non_persistent_buffers_set]
        names = [place.name for place in saved if place.name in entries]
        used |= set(names)
        first, is_param = places[0], id(tensor) in params
        if not saved:
            if tensor.is_meta:
                problems.append(
                    f"{first.name} is a buffer that no file holds, and it is on the meta device: build the "
                    f"{type(first.holder).__name__} that holds it on the CPU, and put it in its place first"
                )
            continue
        frozen = is_param and storage.linear is not None and _can_freeze(places, kept)
        quantized_name = f"{first.name}_{storage.linear}"
        if frozen and not names and quantized_name in entries:
            form: Any = storage.linear
            entry, used = entries[quantized_name], used | {quantized_name}
            wants = (tensor.shape[0], form.row_bytes(tensor.shape[1])) if isinstance(form, Form) else ()
            if entry.dtype != torch.uint8 or entry.shape != wants:
                problems.append(
                    f"{entry.name} is {entry.dtype} of shape {entry.shape} in the file, and a weight of this layer in {form} "
                    f"is uint8 of {wants}"
                )
            steps.append(_Step(tensor, places, entry, form, frozen, packed=True))
            continue
        if not names:
            problems.append(f"{' and '.join(place.name for place in saved)}: not in the file")
            continue
        entry = entries[names[0]]
        stored: Any = storage.linear if frozen else tensor.dtype
        if not frozen and is_param and storage.wide and tensor.dtype in _HIGH_PRECISION:
            stored = storage.wide
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
        # Somebody put another forward on this instance, which would be lost with the layer.
        and "forward" not in vars(holder)
        and all(place.holder is holder and place.own == "weight" for place in places)
        and not any(kept.contains(place.name.removesuffix(".weight")) for place in places)
    )


def _fault(tensor: torch.Tensor, entry: Entry, stored: Form | torch.dtype, *, any_float: bool, widens: bool) -> str:
    """Return what of `entry` does not fit `tensor`, in words; empty where it does."""
    if entry.shape != tuple(tensor.shape):
        return f"has shape {entry.shape} in the file and {tuple(tensor.shape)} in the model"
    if entry.dtype == stored:
        return ""
    has, wants = (str(dtype).removeprefix("torch.") for dtype in (entry.dtype, tensor.dtype))
    differ = f"is {has} in the file and {wants} in the model"
    if not (entry.dtype in _HIGH_PRECISION and tensor.dtype in _HIGH_PRECISION):
        return differ
    # By the user's word any floating dtype will do; without it none that loses bits.
    if any_float or (widens and torch.promote_types(entry.dtype, tensor.dtype) == tensor.dtype):
        return ""
    return (
        f"{differ}, which would lose bits" if widens else f"{differ}; pass storage_dtype= to say in which to store it"
    )


@torch.no_grad()
def _refuse_nonfinite(opened: IO[bytes], step: _Step) -> None:
    """Raise CheckpointError where `step` packs weights that are not finite, which the form would refuse midway."""
    for piece in pieces(opened, step.entry) if step.packs else ():
        if not bool(piece.float().isfinite().all()):  # a form packs what float32 makes of it
            raise CheckpointError(
                f"{step.entry.name}: {step.stored} has no code for inf or NaN, and there is one among these weights; leave "
                "its layer wide with keep="
            )


def _memory_for(step: _Step, device: torch.device) -> torch.Tensor:
    """Return memory without values that one new tensor is to be read into."""
    old, stored = step.tensor, cast(Any, step.stored)
    there = device if old.is_meta else old.device
    if step.frozen:
        return FrozenLinear.memory(cast(nn.Linear, step.places[0].holder), stored, there)
    return torch.empty_strided(old.shape, old.stride(), dtype=stored, device=there)


@torch.no_grad()
def _read(opened: IO[bytes], step: _Step, target: torch.Tensor) -> None:
    if step.packs:
        form, columns, row = cast(Form, step.stored), step.entry.shape[1], 0
        for piece in pieces(opened, step.entry, columns):
            matrix = piece.view(-1, columns)
            target[row : row + len(matrix)] = form.pack(matrix.to(target.device))
            row += len(matrix)
    elif target.is_contiguous():
        read_entry(opened, step.entry, target)
    else:
        target.copy_(read_entry(opened, step.entry))


@torch.no_grad()
def _install(model: nn.Module, step: _Step, storage: Storage, memory: torch.Tensor | None) -> nn.Module:
    """Give one tensor what was read of it, in all its places; returns the model. memory: None where it has it already."""
    holders = [place.name.rpartition(".")[0] for place in step.places]
    if step.frozen:
        # By its name, as below: what was installed before may have taken the place of another module.
        linear: Any = model.get_submodule(holders[0])
        layer = FrozenLinear.of(linear, cast(Any, step.stored), compute_dtype=storage.compute, weight=memory)
        remember_origin(layer, layer.stored_name, step.entry.dtype)
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
        table: dict[str, Any] = holder._parameters if place.own in holder._parameters else holder._buffers
        table[place.own] = target
        remember_origin(holder, place.own, step.entry.dtype)
    return model


def _same(a: Entry, b: Entry) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    with open_regular(a.file) as one, open_regular(b.file) as other:
        pairs = zip(pieces(one, a), pieces(other, b), strict=True)
        # By bytes: NaN of equal bits are equal here.
        return all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in pairs)
