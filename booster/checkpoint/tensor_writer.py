"""Writes what ranks hold of tensors into one safetensors file for each rank, and every box of a tensor once.

Ranks tell each other which boxes they hold. One that several hold, as replicas do, is written by the one of them that has least
to write so far, so that all ranks write at once. No rank holds a copy of what it writes: bytes are hashed and written block by
block, from where they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from booster.checkpoint.folder import sync_folder
from booster.checkpoint.manifest import SAFETENSORS_DTYPES, CheckpointError, Chunk, File, Tensor, num_bytes
from booster.checkpoint.state_tree import HeldBoxes, HeldTensor
from booster.checkpoint.tensor_file import write_tensors
from booster.ranks.agreement import gather, rank_in


class _Box(NamedTuple):
    """A box that a rank holds, in values that JSON has.

    Attributes:
        name: of the whole tensor.
        dtype: as "bfloat16".
        shape: of the whole.
        offsets: where the box begins in it.
        sizes: the shape of the box.
    """

    name: str
    dtype: str
    shape: list[int]
    offsets: list[int]
    sizes: list[int]

    @property
    def key(self) -> str:
        """What the box is called in its file."""
        is_whole = self.sizes == self.shape and not any(self.offsets)
        return self.name if is_whole else f"{self.name}@{','.join(map(str, self.offsets))}"


def write_held(
    staging: Path, tensors: Mapping[str, HeldTensor], group: dist.ProcessGroup | None
) -> tuple[dict[str, File], dict[str, Tensor]]:
    """Write what all ranks hold of `tensors` into `staging`, synced; return the files, and where each tensor is. A collective.

    Raises CheckpointError on every rank if any of them fails, with the first that did, and why.
    """
    origins, boxes, views = HeldBoxes(), [], dict[str, torch.Tensor]()
    for name, tensor in tensors.items():
        for offsets, view in origins.of(tensor):
            dtype = str(tensor.dtype).removeprefix("torch.")
            boxes.append(_Box(name, dtype, [*tensor.shape], [*offsets], [*view.shape]))
            views[boxes[-1].key] = view
    stored = _dealt(gather(boxes, group))
    file, files, problem = tensor_file(rank_in(group)), dict[str, File](), None
    own = [chunk.key for tensor in stored.values() for chunk in tensor.chunks if chunk.file == file]
    try:
        for key in own:
            if views[key].dtype not in SAFETENSORS_DTYPES:
                raise TypeError(f"{key} has dtype {views[key].dtype}, which safetensors does not know")
        if own:
            forms = {key: (views[key].dtype, tuple(views[key].shape)) for key in own}
            files[file] = write_tensors(staging / file, forms, views.__getitem__)
        sync_folder(staging)  # on a network file system each host syncs the names that it made
    except Exception as error:
        problem = error  # raised once the others know
    said = gather(
        [None if problem is None else f"{type(problem).__name__}: {problem}", [*map(asdict, files.values())]], group
    )
    for rank, (text, _) in enumerate(said):
        if text is not None:
            raise CheckpointError(f"on rank {rank}: {text}") from problem
    return {tensor_file(rank): File(**each) for rank, (_, of_rank) in enumerate(said) for each in of_rank}, stored


def _dealt(said: list[list[_Box]]) -> dict[str, Tensor]:
    """Return where all tensors go, given the boxes that each rank holds: each box into the file of one of its holders."""
    holders: dict[str, list[int]] = {}
    boxes: dict[str, _Box] = {}
    for rank, of_rank in enumerate(said):
        for box in (_Box(*each) for each in of_rank):
            holders.setdefault(box.key, []).append(rank)
            boxes[box.key] = box
    to_write = [0] * len(said)  # bytes of each rank
    chunks: dict[str, list[Chunk]] = {}
    for key, ranks in holders.items():
        box, rank = boxes[key], min(ranks, key=to_write.__getitem__)
        to_write[rank] += num_bytes(getattr(torch, box.dtype), box.sizes) or 1
        chunk = Chunk(tensor_file(rank), key, tuple(box.offsets), tuple(box.sizes))
        chunks.setdefault(box.name, []).append(chunk)
    return {
        box.name: Tensor(box.dtype, tuple(box.shape), tuple(sorted(chunks[box.name], key=lambda chunk: chunk.file)))
        for box in boxes.values()
    }


def tensor_file(rank: int) -> str:
    """Return the name of the file that `rank` writes tensors to."""
    return f"tensors-{rank:05d}.safetensors"
