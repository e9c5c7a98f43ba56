"""How the parameters of one group are cut into flat buckets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

# Elements. Whatever shares its bucket, an element meets the same lane of a vector unit, never the scalar code for what is left
# over at the end, which rounds differently: the cut then changes no bit.
ALIGNMENT = 64
SMALLEST_BUCKET = 2**18  # elements, 2 MiB of scratch; below, a step is calls for the most part
SMALLEST_SPARING_BUCKET = (
    2**14
)  # elements, where memory is to be saved, and of a compiled step, which makes fewer calls
LARGEST_CPU_BUCKET = 2**19  # elements; above, scratch no longer stays in a core's cache, and the update takes longer

LARGEST_COMPILED_CPU_BUCKET = (
    2**20
)  # elements; a compiled update has no float32 scratch, and each of its calls costs more


@dataclass(frozen=True, eq=False)
class Piece:
    """A stretch of a parameter: its elements `start` to `stop`, in memory order, which lie at `offset` of a bucket."""

    param: torch.Tensor
    start: int
    stop: int
    offset: int

    @property
    def size(self) -> int:
        return self.stop - self.start


def bucket_size(
    num_elements: int, device: torch.device, compiled: bool = False, packed: bool = False, released: bool = False
) -> int:
    """Return the size of a bucket: 1/8 of all elements, a multiple of 64, and no smaller than calls are worth.

    packed: whether states are; a compiled step does without scratch for them.
    """
    packed = packed and not compiled
    # States are widened into scratch too; a release steps while gradients and activations are there.
    share = (32 if packed else 8) * (2 if released else 1)
    smallest = SMALLEST_BUCKET if share == 8 and not compiled else SMALLEST_SPARING_BUCKET
    # Those of a release are half as large, as gradients and activations are there too.
    size = max(num_elements // share // ALIGNMENT * ALIGNMENT, smallest)
    largest = LARGEST_COMPILED_CPU_BUCKET if compiled else LARGEST_CPU_BUCKET
    return min(size, largest) if device.type == "cpu" else size


def cut(params: Iterable[torch.Tensor], size: int) -> list[list[Piece]]:
    """Lay `params` one after another, each from a multiple of 64, and cut at every multiple of `size`."""
    buckets: list[list[Piece]] = []
    filled = size
    for param in params:
        start = 0
        while start < param.numel():
            if filled == size:
                buckets.append([])
                filled = 0
            stop = min(param.numel(), start + size - filled)
            buckets[-1].append(Piece(param, start, stop, filled))
            filled = aligned(filled + stop - start)
            start = stop
    return buckets


def cut_apart(params: Iterable[torch.Tensor], size: int) -> list[list[Piece]]:
    """As `cut`, with buckets that hold pieces of one larger parameter, or several whole ones."""
    known = list(params)
    small = pack([param for param in known if param.numel() < size], size)
    # The gradient of a parameter then does not wait for that of a neighbour which has the other part of its bucket.
    return [pieces for param in known if param.numel() >= size for pieces in cut([param], size)] + small


def pack(params: Iterable[torch.Tensor], size: int) -> list[list[Piece]]:
    """Put whole `params` into buckets of at most `size` elements; a larger one has a bucket to itself."""
    buckets: list[list[Piece]] = []
    filled = 0
    for param in params:
        if not buckets or filled + param.numel() > size:
            buckets.append([])
            filled = 0
        buckets[-1].append(Piece(param, 0, param.numel(), filled))
        filled = aligned(filled + param.numel())
    return buckets


def renumber(pieces: Sequence[Piece]) -> list[Piece]:
    """Return the same pieces, lying one after another from 0."""
    offsets = starts([piece.size for piece in pieces])
    return [Piece(p.param, p.start, p.stop, offset) for p, offset in zip(pieces, offsets, strict=True)]


def aligned(num_elements: int) -> int:
    """Return the next multiple of 64."""
    return -(-num_elements // ALIGNMENT) * ALIGNMENT


def starts(sizes: Iterable[int]) -> list[int]:
    """Return where stretches of these sizes begin in a bucket."""
    offset, offsets = 0, []
    for size in sizes:
        offsets.append(offset)
        offset = -(-(offset + size) // ALIGNMENT) * ALIGNMENT  # as `aligned`, without a call for each
    return offsets


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return all elements of a dense tensor in memory order, as a 1-dim view."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    return tensor.as_strided((tensor.numel(),), (1,))


def flat_like(tensor: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Return the elements of `tensor` in the memory order of `param`, which has its shape; a view where the orders agree."""
    if tensor.stride() == param.stride() or (tensor.is_contiguous() and param.is_contiguous()):
        return flat(tensor)
    ordered = torch.empty_strided(param.shape, param.stride(), dtype=tensor.dtype, device=tensor.device)
    return flat(ordered.copy_(tensor))


def shaped_like(values: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Return the inverse of `flat_like`: 1-dim `values` in the shape and memory order of `param`, as a view."""
    return values.as_strided(param.shape, param.stride()) if not param.is_contiguous() else values.view(param.shape)


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements of `tensor` fill one stretch of memory without gaps or overlaps."""
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length == 1:
            continue
        if stride != expected:
            return False
        expected *= length
    return True


def has_same_layout(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether `tensor` has the memory order and strides of `other`, which has its shape."""
    if tensor.stride() == other.stride():
        return True
    strides = zip(tensor.stride(), other.stride(), other.shape, strict=True)
    return all(mine == theirs or length == 1 for mine, theirs, length in strides)


def split_by_device(params: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return `params` by device, each in order."""
    devices: dict[torch.device, list[torch.Tensor]] = {}
    for param in params:
        devices.setdefault(param.device, []).append(param)
    return list(devices.values())
