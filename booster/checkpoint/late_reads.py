"""Tensors of a checkpoint that are read last, a stretch at a time, as buckets take them over that keep them in another form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from booster.checkpoint.manifest import CheckpointError, Tensor, dtype_of
from booster.checkpoint.tensor_file import Entry, bytes_of, entries_of, entry_of, fill_from, read_box
from booster.checkpoint.tensor_layout import HeldTensor, is_boxes
from booster.common.untrusted_files import open_regular
from booster.interface.optimizer import OptimizerWrapper, update_of
from booster.model.dtensors import dtensor_around, is_dtensor, local_shard
from booster.shards.flat_shard import FlatShard
from booster.update.optimizer_state import Fill
from booster.update.state_loading import holds_nan


class _Late(NamedTuple):
    """One tensor, the state `key` of `param` or, None, its master.

    Attributes:
        held: what this rank has of it, as a stretch of a box.
        origin: where in the whole tensor that box begins.
    """

    optimizer: OptimizerWrapper
    param: torch.Tensor
    key: str | None
    held: FlatShard
    origin: tuple[int, ...]


class LateReads:
    """What is read of the tensors of a checkpoint in the end, so that nothing of it is in memory twice.

    Attributes:
        problems: why something could not be read, where it had been read before; then numbers are missing.
    """

    def __init__(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        self._folder, self._tensors = folder, tensors
        self._wanted: dict[str, _Late] = {}
        self._entries: dict[str, dict[str, Entry]] = {}
        # By parameter and dtype: states of a parameter are laid out alike, and a DTensor takes long to make.
        self._layouts: dict[Any, tuple[HeldTensor, FlatShard, tuple[int, ...]]] = {}
        self._runs: dict[str, list[tuple[int, int, Path, int]] | None] = {}  # see `_find_runs`
        self.problems: list[str] = []

    def request(
        self, name: str, param: torch.Tensor, optimizer: OptimizerWrapper, key: str | None
    ) -> HeldTensor | None:
        """Return a placeholder on the meta device for what this rank has of the tensor `name`; None if it cannot wait."""
        update, tensor = update_of(optimizer), self._tensors[name]
        if tensor.shape != tuple(param.shape) or not update.optimizer_state.can_be_filled(param):
            return None
        if (param, tensor.dtype) not in self._layouts:
            dtype, meta = dtype_of(tensor), torch.device("meta")
            flat, local = update.shards.states.empty_shard(param, dtype, meta), local_shard(param)
            like = torch.empty(local.shape, dtype=dtype, device=meta)
            origin = (0,) * param.dim()
            if is_dtensor(param):
                if not is_boxes(param):  # as those of a fused projection
                    return None
                origin = tuple(param.__create_chunk_list__()[0].offsets)  # type: ignore[attr-defined]
            held = flat or FlatShard(like.view(-1), 0, local.shape, local.stride())
            if flat is None and not held.values.numel():
                return None
            self._layouts[param, tensor.dtype] = flat or dtensor_around(like, param), held, origin
        placeholder, held, origin = self._layouts[param, tensor.dtype]
        self._wanted[name] = _Late(optimizer, param, key, held, origin)
        return placeholder

    def __contains__(self, name: object) -> bool:
        return name in self._wanted

    def drop(self, name: str) -> None:
        """Have `name` read with all else: its numbers are wanted before."""
        self._wanted.pop(name, None)

    def fills(self, param: torch.Tensor, name: str | None) -> bool:
        """Return whether the tensor `name` becomes the master of `param`, which then gives the weight."""
        late = self._wanted.get(str(name))
        return late is not None and late.key is None and late.param is param

    def fill(self, optimizer: OptimizerWrapper) -> Fill | None:
        """Return what reads the states and masters of `optimizer`; None where none of them is late."""
        names = {
            (update_of(optimizer).shards.shard_of(late.param), late.key): name
            for name, late in self._wanted.items()
            if late.optimizer is optimizer
        }

        def read(shard: torch.Tensor, key: str | None, start: int, into: torch.Tensor) -> None:
            name = names[shard, key]
            try:
                self._read(name, start, into)
            except Exception as error:  # other ranks read on, and learn of it in the end
                self.problems.append(f"{name} cannot be read any more: {error}")
                into.zero_()

        return Fill(read) if names else None

    def masters_with_nan(self) -> Iterator[str]:
        """Yield the names of parameters' masters that hold NaN; reads them, some numbers at a time."""
        for name, late in self._wanted.items():
            size = late.held.values.numel() if late.key is None else 0
            self._read(name, 0, late.held.values)  # on the meta device: whether the files hold it
            # One piece of memory for all reads: masters may take as much as is free.
            some = torch.empty(min(size, 2**19), dtype=late.held.dtype)
            if any(holds_nan(self._read(name, at, some[: size - at])) for at in range(0, size, 2**19)):
                yield name

    def _read(self, name: str, start: int, into: torch.Tensor) -> torch.Tensor:
        """Read what this rank has of a tensor, from `start` on, into 1-dim memory, and return it; into meta memory nothing."""
        dtype = self._wanted[name].held.dtype
        if name not in self._runs:
            self._runs[name] = self._find_runs(name)
        if into.is_meta:
            return into
        straight = into.is_cpu and into.dtype == dtype and into.is_contiguous()
        values = into if straight else torch.empty(into.shape, dtype=dtype)
        runs, memory, width = self._runs[name], bytes_of(values), dtype.itemsize
        for place, numel, path, begin in runs or ():
            first, stop = max(place, start), min(place + numel, start + values.numel())
            if first < stop:
                with open_regular(path) as file:
                    file.seek(begin + (first - place) * width)
                    fill_from(file, memory[(first - start) * width : (stop - start) * width], path, name)
        for entry, inside, here in self._parts(name, start, values) if runs is None else ():
            with open_regular(entry.file) as file:
                read_box(file, entry, inside, here)
        return into if straight else into.copy_(values)

    def _find_runs(self, name: str) -> list[tuple[int, int, Path, int]] | None:
        """Return elements that follow each other here and in a file, as (the first here, how many, the file, its first byte).

        None where some do not. To cut boxes for each bucket anew takes longer than to read them. Compares every header.
        """
        found, in_runs = [], True
        for entry, inside, here in self._parts(name, 0, self._wanted[name].held.values):
            there = torch.empty(entry.shape, dtype=entry.dtype, device="meta")[inside]
            in_runs &= there.is_contiguous() and here.is_contiguous()
            begin = entry.start + int(there.storage_offset()) * entry.dtype.itemsize
            found.append((int(here.storage_offset()), here.numel(), entry.file, begin))
        return found if in_runs else None

    def _parts(
        self, name: str, start: int, values: torch.Tensor
    ) -> Iterator[tuple[Entry, tuple[slice, ...], torch.Tensor]]:
        """Yield entries of files, their box, and the view of `values` that takes it: what this rank has from `start` on."""
        (*_, held, origin), tensor = self._wanted[name], self._tensors[name]
        for begin, sizes, view in FlatShard(values, held.start + start, held.shape, held.stride).boxes():
            box = [range(o + b, o + b + n) for o, b, n in zip(origin, begin, sizes, strict=True)]
            for chunk in tensor.chunks:
                both = [
                    slice(max(own.start, o), min(own.stop, o + n))
                    for own, o, n in zip(box, chunk.offsets, chunk.sizes, strict=True)
                ]
                if any(each.start >= each.stop for each in both):
                    continue
                path = self._folder / chunk.file
                if chunk.file not in self._entries:
                    self._entries[chunk.file] = entries_of(path)
                entry = entry_of(self._entries[chunk.file], path, chunk, held.dtype)
                inside = tuple(slice(e.start - o, e.stop - o) for e, o in zip(both, chunk.offsets, strict=True))
                here = tuple(slice(e.start - own.start, e.stop - own.start) for e, own in zip(both, box, strict=True))
                yield entry, inside, view[here]

    def end(self) -> bool:
        """Return whether anything was late. Raises CheckpointError for what could not be read."""
        wanted, self._wanted = bool(self._wanted), {}
        if self.problems:
            raise CheckpointError(self.problems[0])
        return wanted
