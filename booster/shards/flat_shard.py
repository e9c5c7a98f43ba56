"""A tensor of which each rank has a stretch of elements, as `torch.distributed.checkpoint` takes it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch


class FlatShard:
    """This rank's slice of a tensor: elements from `start` on, in memory order; other ranks have the others.

    `torch.distributed.checkpoint` saves boxes of a whole tensor. A slice of a tensor of n dimensions is at most 2n - 1 boxes,
    each a view of `values`.

    Attributes:
        values: this rank's elements, 1-dim.
        start: place of the first one in the whole tensor, in memory order.
        shape, stride: of the whole tensor, which is dense.
    """

    def __init__(self, values: torch.Tensor, start: int, shape: Sequence[int], stride: Sequence[int]) -> None:
        self.values = values.detach()
        self.start = start
        self.shape = torch.Size(shape)
        self.stride = tuple(stride)

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        return self.values.device

    def size(self) -> torch.Size:
        """Return the shape of the whole."""
        return self.shape

    def dim(self) -> int:
        """Return the number of dimensions of the whole."""
        return len(self.shape)

    def with_values(self, values: torch.Tensor) -> FlatShard:
        """Return the same stretch with other values."""
        return FlatShard(values, self.start, self.shape, self.stride)

    def boxes(self) -> Iterator[tuple[torch.Size, torch.Size, torch.Tensor]]:
        """Yield (offsets, sizes, view of `values`) of boxes of the whole that make up the stretch, in memory order."""
        # Dimensions of length 1 may have any stride.
        order = sorted(range(self.dim()), key=lambda dim: (self.shape[dim] != 1, -self.stride[dim]))
        back = sorted(range(self.dim()), key=order.__getitem__)
        done = 0
        for offsets, sizes in _boxes([self.shape[dim] for dim in order], self.start, self.start + self.values.numel()):
            numel = math.prod(sizes)
            view = self.values[done : done + numel].view(sizes).permute(back)
            done += numel
            yield torch.Size(offsets[dim] for dim in back), torch.Size(sizes[dim] for dim in back), view

    def box_at(self, offsets: Sequence[int] | None) -> torch.Tensor:
        """Return the view of the box that begins at `offsets` of the whole."""
        return next(view for begin, _, view in self.boxes() if begin == offsets)

    # ------------------------------------------------------------------ what torch.distributed.checkpoint asks for

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                MetadataIndex(fqn, offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(ChunkStorageMetadata(offsets, sizes), properties, self.shape),
            )
            for offsets, sizes, _ in self.boxes()
        ]

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(offsets, sizes) for offsets, sizes, _ in self.boxes()]


def _boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield (offsets, sizes) of boxes that make up elements `start` to `stop` of a contiguous tensor, in order."""
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    inner = math.prod(shape[1:])
    first, last = -(-start // inner), stop // inner  # whole rows
    if start % inner:
        row = start // inner
        for offsets, sizes in _boxes(shape[1:], start % inner, min(stop - row * inner, inner)):
            yield (row, *offsets), (1, *sizes)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    if stop % inner and last >= first:
        for offsets, sizes in _boxes(shape[1:], 0, stop % inner):
            yield (last, *offsets), (1, *sizes)
