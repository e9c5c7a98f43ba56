"""Files of weights of other programs: found, fitted to a model, and written for them, whole or in shards with an index.

Safetensors is the safe form, of which tensors are read in place. Files of `torch.save` are read by torch, which runs no code.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from booster.checkpoint.folder import write_synced
from booster.checkpoint.manifest import PAIRS, SAFETENSORS_DTYPES, CheckpointError, Manifest, Tensor, dtype_of
from booster.checkpoint.objects import user_module
from booster.checkpoint.state_tree import empty_like_whole, shard_like
from booster.checkpoint.tensor_file import Entry, entries_of, write_tensors
from booster.checkpoint.tensor_reader import TensorReader
from booster.common.arguments import listed
from booster.common.untrusted_files import ROOM, names_a_regular_file, open_regular, parse_json, read_regular
from booster.model.modules import tensor_places
from booster.model.params import local_shard, memory_of
from booster.nn.stacked_experts import stacked_names

Named = list[tuple[str, Entry | torch.Tensor]]
ReadEntries = Callable[[Mapping[str, Entry], Mapping[str, torch.Tensor]], None]
"""Reads entries of files into tensors of the same names."""

# (name of one file, ending) as transformers looks for them.
SAFETENSORS, TORCH = ("model", ".safetensors"), ("pytorch_model", ".bin")


def weight_files(path: Path) -> list[Path]:
    """Return the files of weights that `path` means: itself, or those of a folder, by its index where it has one."""
    if names_a_regular_file(path):
        return [path]
    indices = sorted(path.glob("*.index.json")) if path.is_dir() else []
    if len(indices) == 1:
        try:
            most = (
                sum(file.stat().st_size for file in path.iterdir() if file != indices[0] and names_a_regular_file(file))
                // 2
                + ROOM
            )
            names = sorted(set(parse_json(read_regular(indices[0], most), most)["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{indices[0]} is no index of weights: {error!r}") from error
        if not all(isinstance(name, str) and name and Path(name).name == name for name in names):
            raise CheckpointError(f"{indices[0]} names files outside its folder")
        missing = [name for name in names if not names_a_regular_file(path / name)]
        if missing:
            raise CheckpointError(f"{path} lacks {missing}, which {indices[0].name} names")
        return [path / name for name in names]
    single = [path / "".join(kind) for kind in (SAFETENSORS, TORCH) if names_a_regular_file(path / "".join(kind))]
    if not single:
        raise CheckpointError(
            f"{path} is neither a file of weights nor a folder with an index or {''.join(SAFETENSORS)}"
        )
    return single[:1]


def check_unchanged(path: Path, before: object = None) -> object:
    """Return what the files of weights in `path` are now; raises CheckpointError where they were `before` something else."""
    stats = [file.stat() for file in weight_files(path)]
    if (now := [(each.st_ino, each.st_size, each.st_mtime_ns) for each in stats]) != before and before is not None:
        raise CheckpointError(f"files of weights in {path} were replaced or written to while they were read")
    return now


def is_safetensors(file: Path) -> bool:
    """Return whether a file is one of safetensors, by its name or how it begins."""
    with open_regular(file) as opened:
        return file.suffix == ".safetensors" or opened.read(9)[8:] == b"{"  # the header's length, and its JSON


def named_in(path: Path) -> Iterator[tuple[str, Entry | torch.Tensor]]:
    """Yield every tensor in files of weights by its name: as an entry of a safetensors file; of `torch.save`, read."""
    for file in weight_files(path):
        yield from entries_of(file).items() if is_safetensors(file) else read_torch_file(file)


def read_torch_file(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of a file of `torch.save`, mapped from it where it is an archive, as those since torch 1.6 are."""
    try:
        with open_regular(file) as opened:  # nothing that makes whoever opens it wait
            mapped = zipfile.is_zipfile(opened)
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # whatever torch raises for a file that torch did not write
        # Torch gives the reason last. Before, it advises to load without weights_only, which would run what is in the file.
        said = [
            line for line in str(error).split("\n") if line.strip() and not line.startswith("Check the documentation")
        ]
        reason = (said or [type(error).__name__])[-1].strip().partition(". Please use")[0].rstrip(".")
        # Raised before the first tensor, for all that is no dict of dense tensors by name.
        raise CheckpointError(
            f"{file} is not a file of weights: {reason}; write its tensors as safetensors, with safetensors.torch.save_file or "
            "save_pretrained"
        ) from error
    if not isinstance(state, dict):
        raise CheckpointError(
            f"{file} is not a file of weights: it holds a {type(state).__name__}, not tensors by name"
        )
    for name, value in state.items():
        if not isinstance(name, str) or type(value) not in (torch.Tensor, nn.Parameter):
            raise CheckpointError(f"{file} is not a file of weights: it holds a {type(value).__name__} as {name!r:.80}")
        if value.layout is not torch.strided or value.dtype not in (*SAFETENSORS_DTYPES, torch.complex128):
            raise CheckpointError(f"{file} is not a file of weights: {name:.80} is {value.layout} of {value.dtype}")
        if value.is_meta:
            raise CheckpointError(
                f"{file} is not a file of weights: {name:.80} has no numbers: it was saved on the meta device"
            )
    yield from ((name, value.detach().resolve_conj().resolve_neg()) for name, value in state.items())


@dataclass
class FittedWeights:
    """What files of weights have for a module.

    Attributes:
        state: what the module must be given; read already, and sharded as it is there.
        in_place: entries that are read into the module's own tensors, with these.
        left_out: names that one side alone has, in words.
    """

    state: dict[str, torch.Tensor] = field(default_factory=dict)
    in_place: dict[str, tuple[Entry, torch.Tensor]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)


def weights_for(
    module: nn.Module,
    path: Path,
    own: Mapping[str, torch.Tensor],
    read: ReadEntries,
    *,
    strict: bool,
) -> FittedWeights:
    """Return what the files of weights in `path` have for this rank of `module`, of which nothing is written to yet.

    own: tensors of `module`, by name, that may be read into. read: reads entries into new tensors.
    """
    current = module.state_dict()
    placed = getattr(module, "module", None)
    partial = getattr(placed, "is_partial", False)
    given = list(named_in(path))
    different, given = _tied_elsewhere(given, getattr(placed, "names_elsewhere", {}), read)
    found, unread = FittedWeights(), dict[str, Entry]()
    unknown, seen = list[str](), set[str]()
    stacked, parts = stacked_names(user_module(module)), dict[str, dict[str, Entry | torch.Tensor]]()
    for name, value in given:
        holder, _ = stacked.get(name, (name, 0))
        here = current.get(holder)
        if name in seen:
            # All that differs is listed in one error.
            different.append(f"{name} is in two files")
        seen.add(name)
        if here is None:
            unknown.append(name)
        elif (shape := tuple(here.shape[holder != name :])) != tuple(value.shape):
            different.append(f"{name} has shape {tuple(value.shape)} in the file and {shape} in the model")
        elif not fits(value.dtype, here.dtype):
            different.append(f"{name} has dtype {value.dtype} in the file and {here.dtype} in the model")
        elif holder != name:
            parts.setdefault(holder, {})[name] = value
        elif isinstance(value, torch.Tensor):
            found.state[name] = shard_like(value.to(here.device), here)
        elif name in own and memory_of(own[name]) == memory_of(here):
            # The state dict has the memory of the model itself, so nothing needs to be loaded afterwards.
            found.in_place[name] = value, here
        else:
            unread[name] = value
            found.state[name] = empty_like_whole(value.shape, value.dtype, here)
    for holder, own_parts in parts.items():
        experts = [name for name, (own_name, _) in stacked.items() if own_name == holder]
        if lacking := [name for name in experts if name not in own_parts]:
            different.append(f"{listed(lacking, 4)} are not in the file, and other experts of {holder} are")
        if different:
            continue
        single = {name: value for name, value in own_parts.items() if isinstance(value, torch.Tensor)}
        entries = {name: value for name, value in own_parts.items() if not isinstance(value, torch.Tensor)}
        single |= {name: torch.empty(entry.shape, dtype=entry.dtype) for name, entry in entries.items()}
        read(entries, {name: single[name] for name in entries})
        # One weight of one layer is there whole at a time.
        found.state[holder] = shard_like(
            torch.stack([single[name] for name in experts]).to(current[holder].device), current[holder]
        )
    read(unread, {name: found.state[name] for name in unread})
    found.state |= {name: shard_like(found.state[name], current[name]) for name in unread}
    different += ties_that_differ(module, found.state)
    # Files of other programs hold a tied weight once.
    names = found.state.keys() | found.in_place.keys()
    held = {id(current[name]) for name in names} | {memory_of(current[name]) for name in names}
    missing = [
        name
        for name, here in current.items()
        if name not in names and isinstance(here, torch.Tensor) and memory_of(here) not in held
    ]
    found.left_out = [f"{name} is not in the file" for name in missing]
    found.left_out += [] if partial else [f"{name} is not in the model" for name in unknown]
    if different or (strict and found.left_out):
        raise CheckpointError(f"{path} does not fit this model:\n  " + "\n  ".join(different + found.left_out))
    return found


def _tied_elsewhere(given: Named, elsewhere: Mapping[str, str], read: ReadEntries) -> tuple[list[str], Named]:
    """Return what differs of weights that are tied across ranks, and `given` with those that a file holds once, under the name
    of another rank, under this rank's name.

    elsewhere: names on other ranks, with this rank's. A file may hold both; then they have to be the same numbers.
    """
    values = dict(given)
    different = []
    for other, own in elsewhere.items():
        if other in values and own in values:
            both = [_read_whole(values[name], read) for name in (other, own)]
            if not _same_bits(*both):
                different.append(f"{own} and {other} are one tensor in the model, and differ in the file")
    once = {other: own for other, own in elsewhere.items() if own not in values}
    return different, [(once.get(name, name), value) for name, value in given]


def _read_whole(value: Entry | torch.Tensor, read: ReadEntries) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    whole = torch.empty(value.shape, dtype=value.dtype)
    read({"": value}, {"": whole})
    return whole


def fits(saved: torch.dtype, own: torch.dtype) -> bool:
    """Return whether numbers of dtype `saved` may be loaded into `own`: as they are, or rounded to another precision."""
    return saved == own or (saved.is_floating_point and own.is_floating_point and PAIRS not in (saved, own))


def half_read(error: Exception) -> CheckpointError:
    """What is raised where a file that fits cannot be read to its end, and weights of a model were read from it already."""
    return CheckpointError(
        f"{error}. Another process changed the file, or it cannot be read: weights of this model hold parts of it; load a "
        "whole one before you go on"
    )


def ties_that_differ(module: nn.Module, state: Mapping[str, Any]) -> Iterator[str]:
    """Say which names of one tensor of `module` have not the same numbers in `state`: of these a load would keep the last."""
    for places in tensor_places(user_module(module), buffers=True).values():
        names = [place.name for place in places if place.name in state]
        for name in names[1:]:
            if not _same_bits(state[name], state[names[0]]):
                yield f"{name} and {names[0]} are one tensor in the model, and differ in the file"


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a is b:
        return True
    one, other = (local_shard(tensor).contiguous().view(-1) for tensor in (a, b))
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


_MEGABYTE = 2**20

Read = Callable[[str], torch.Tensor]
"""Gives a tensor of a model by its name, whole."""


@dataclass(frozen=True)
class ExportedTensor:
    """A tensor that is to be written: its dtype and shape, and what makes it of tensors of a model."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[Read], torch.Tensor]

    @staticmethod
    def as_stored(name: str, tensor: Tensor) -> ExportedTensor:
        """Return what is written of `tensor`, which is called `name` in its checkpoint: the same."""
        return ExportedTensor(dtype_of(tensor), tensor.shape, lambda read: read(name))

    @property
    def is_wide(self) -> bool:
        """Whether these are floating numbers of 16 bits or more."""
        return self.dtype.is_floating_point and self.dtype.itemsize > 1

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class FileOptions:
    """Which files weights are written to, as `Booster.save_model` takes it.

    Attributes:
        shard: into several, with an index.
        prefix: before their names; None for none.
        size_per_shard: the most MB in one of several.
        use_safetensors: else `torch.save`.
    """

    shard: bool = False
    prefix: str | None = None
    size_per_shard: int = 1024
    use_safetensors: bool = True


class CheckpointTensors:
    """The tensors of the checkpoint in `folder`, one at a time, whole, in host memory. The header of a file is read once."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._tensors, self._reader = manifest.tensors, TensorReader(folder, manifest, files=())
        self._last: tuple[str, torch.Tensor] | None = None  # single experts are asked for one after the other

    def whole(self, name: str) -> torch.Tensor:
        """Return one tensor, put together from its chunks. Raises CheckpointError where a file holds another one."""
        if self._last is None or self._last[0] != name:
            self._last = None
            whole = torch.empty(self._tensors[name].shape, dtype=dtype_of(self._tensors[name]))
            self._reader.read({name: whole})
            self._last = name, whole
        return self._last[1]


def export(
    folder: Path, manifest: Manifest, entries: Mapping[str, ExportedTensor], target: Path, files: FileOptions
) -> None:
    """Write tensors of the checkpoint in `folder` as plain files, one tensor at a time (all of a file for `torch.save`).

    entries: what is written, by its names in the new files. target: the file, or the folder of several.
    """
    stored = CheckpointTensors(folder, manifest)

    def write_file(path: Path, names: Iterable[str]) -> None:
        own = {name: entries[name] for name in names}
        if files.use_safetensors:
            forms = {name: (entry.dtype, entry.shape) for name, entry in own.items()}
            write_tensors(path, forms, lambda name: own[name].make(stored.whole))
            return
        # A file appears whole or not at all.
        with path.open("xb") as file:
            torch.save({name: entry.make(stored.whole) for name, entry in own.items()}, file)
            file.flush()
            # The file gets its name only after the disk has it.
            os.fsync(file.fileno())

    if not files.shard:
        target.parent.mkdir(parents=True, exist_ok=True)
        replaced(target, lambda path: write_file(path, entries))
        return
    target.mkdir(parents=True, exist_ok=True)
    stem, ending = SAFETENSORS if files.use_safetensors else TORCH
    stem = stem if files.prefix is None else f"{files.prefix}.{stem}"
    shards: list[list[str]] = [[]]
    size = total = 0
    for name, entry in entries.items():
        if shards[-1] and size + entry.num_bytes > files.size_per_shard * _MEGABYTE:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size, total = size + entry.num_bytes, total + entry.num_bytes
    where: dict[str, str] = {}
    for index, names in enumerate(shards, start=1):
        name = f"{stem}-{index:05d}-of-{len(shards):05d}{ending}"
        replaced(target / name, partial(write_file, names=names))
        where |= dict.fromkeys(names, name)
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2, sort_keys=True)
    replaced(target / f"{stem}{ending}.index.json", lambda path: write_synced(path, text.encode()))


def replaced(target: Path, write: Callable[[Path], object]) -> None:
    """Have `write` make the file `target`, which appears whole or not at all."""
    unfinished = target.with_name(f".{target.name}.writing")
    unfinished.unlink(missing_ok=True)
    try:
        write(unfinished)
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)
