"""Saving: everything of a run into one folder that appears whole or not at all."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from booster.checkpoint.agree import agreed, exchange, first_failure, is_first
from booster.checkpoint.collect import collect, settle
from booster.checkpoint.folder import (
    checkpoints,
    make_folder,
    name_of,
    prune,
    publish,
    remove,
    staging_folder,
    write_synced,
    writing,
)
from booster.checkpoint.hashing import hash_of, new_hash
from booster.checkpoint.layout import Held, SavePlanner, refuse_made_of_tensors, storable
from booster.checkpoint.loading import rehearse
from booster.checkpoint.lock import Lock
from booster.checkpoint.manifest import (
    LARGEST_NUMBER,
    MANIFEST,
    STATE,
    CheckpointError,
    File,
    Manifest,
    check_text,
    read_manifest,
)
from booster.checkpoint.objects import Objects
from booster.checkpoint.serving import (
    Layers,
    Served,
    Source,
    ends_that_differ,
    layers_of,
    served,
    sources_of,
    together,
    write_config,
)
from booster.checkpoint.storage import ManifestWriter
from booster.checkpoint.weights import Read, Stored, Written, export
from booster.common.installed import version_of
from booster.common.untrusted_files import json_cost
from booster.interface.model import ModelWrapper
from booster.mixed_precision.policy import dtypes_read
from booster.model.dtensors import is_dtensor
from booster.model.modules import bare
from booster.shards.flat_shard import FlatShard


@dataclass(frozen=True)
class Snapshot:
    """All that one rank puts into a checkpoint: tensors by name, and the tree of all ranks."""

    tensors: dict[str, Held]
    tree: dict[str, Any]

    def copied(self) -> Snapshot:
        """Return it with copies of the tensors in host memory, pinned where they come from a device; waits for them."""
        copies = {name: _host_copy(tensor) for name, tensor in self.tensors.items()}
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return Snapshot(copies, self.tree)


def snapshot(objects: Objects, run: Mapping[str, Any], group: dist.ProcessGroup | None) -> Snapshot:
    """Return the state of `objects` now; the tensors are those of the running job. A collective."""
    new_hash()  # raises now, and not in the thread that writes, where xxhash is missing
    return Snapshot(*collect(objects, run, group))


def reserve(root: Path, step: int | None, group: dist.ProcessGroup | None) -> tuple[Path, int]:
    """Return where the checkpoint of `step` goes, and its number, counted on from the newest where None; a collective.

    Raises CheckpointError on every rank where no number follows the newest.
    """
    if step is None:
        taken = [found for found, _ in checkpoints(root)] + writing(root) if is_first(group) else []
        step = max(taken, default=-1) + 1
    step = exchange(step, group)[0]
    if step > LARGEST_NUMBER:
        raise CheckpointError(
            f"{root} has a checkpoint of step {step - 1}, which no number follows; name the step to save, or move that one away"
        )
    return root / name_of(step), step


def write(
    final: Path,
    taken: Snapshot,
    *,
    step: int,
    keep_last: int | None,
    group: dist.ProcessGroup | None,
    objects: Objects | None = None,
) -> Path:
    """Write `taken` as the checkpoint `final`; a collective over `group`. keep_last: of the numbered ones beside it.

    Before it gets its name it is opened as a load does. objects: what was saved, where that stands still: a load of it is
    rehearsed, without tensors.

    If it raises, on any rank, it raises CheckpointError on all, and what bore the name still does.
    """
    staging: Path | None = None
    lock: Lock | None = None
    try:
        with agreed(group):
            if is_first(group):
                make_folder(final.parent)
                lock = Lock(final)
                staging = staging_folder(final, lock)
        staging = Path(exchange(str(staging), group)[0])
        writer = ManifestWriter(
            staging,
            make_manifest=lambda files, stored: Manifest(step, len(taken.tree["random"]), _versions(), files, stored),
        )
        takes = 0
        with agreed(group):
            if is_first(group):
                writer.other_files, takes = _write_state(staging / STATE, taken.tree)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            dcp.save(
                taken.tensors,
                storage_writer=writer,
                planner=SavePlanner(),
                process_group=group,
                no_dist=group is None,
            )
        with agreed(group):
            if writer.manifest is not None:
                check_text(STATE, takes, writer.manifest.files)
                write_synced(staging / MANIFEST, writer.manifest.dumps())
        if taken.tree.keys() > {"random"}:  # not of weights alone, which have no tree
            with agreed(group):
                if objects is not None or is_first(group):
                    rehearse(staging, objects, 0 if group is None else dist.get_rank(group))
        with agreed(group):
            if writer.manifest is not None:
                assert lock is not None  # the coordinator is the first rank
                publish(staging, final, lock)
                if keep_last is not None:
                    prune(final.parent, keep_last, final)
    except CheckpointException as error:
        raise CheckpointError(
            f"saving {final} failed {first_failure(error)}; what was there before still is"
        ) from error
    except (OSError, RuntimeError, TypeError, ValueError, MemoryError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"saving {final} failed: {type(error).__name__}: {error}; what was there before still is"
        ) from error
    finally:
        if staging is not None and is_first(group) and staging.exists():
            shutil.rmtree(staging, ignore_errors=True)
        if lock is not None:
            lock.release()
    return final


def save_weights(
    model: ModelWrapper,
    path: Path,
    *,
    group: dist.ProcessGroup | None,
    shard: bool,
    prefix: str | None,
    size_per_shard: int,
    use_safetensors: bool,
    weights: Served | None,
    half: torch.dtype | None,
    wide: torch.dtype,
    merge: Callable[[nn.Module, Iterable[str]], tuple[nn.Module, dict[str, Source]]] | None,
) -> None:
    """Write the whole weights of `model` to `path`, see `Booster.save_model`; a collective.

    Each rank writes what it has as a checkpoint, which the first one turns into plain files tensor by tensor: nobody ever
    holds the whole model. half: in which the forward reads all weights, also those that ranks hold in float32; None where it
    reads them as they are stored. wide: see `serving.served`. merge: gives the model without adapters, and what is written of
    the tensors of these names, of the model with them; None writes them as they are.
    """
    own = bare(model.module)
    tensors = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    if weights is not None:
        read = dtypes_read(own, half, weights=True)
        tensors = {name: value.to(read.get(name, value.dtype)) for name, value in tensors.items()}
    for name, tensor in tensors.items():
        refuse_made_of_tensors(name, tensor)
    buffers = dict(own.named_buffers(remove_duplicate=False))
    written, _ = settle({name: storable(t) for name, t in tensors.items()}, group, buffers, all_kept=False)
    taken = Snapshot(written, {"random": []})
    between = write(path.with_name(f".{path.name}.whole"), taken, step=0, keep_last=None, group=group)
    said = exchange(asdict(layers_of(own)), group) if weights is not None else []
    with agreed(group):
        if is_first(group):
            try:
                manifest, quantization = read_manifest(between), None
                if merge is None:
                    described, sources = own, sources_of(own, manifest.tensors, unpack=weights is not None)
                else:
                    described, sources = merge(own, manifest.tensors)
                entries = {name: source.of(manifest.tensors) for name, source in sources.items()}
                if weights is not None:
                    layers = together((Layers(**each) for each in said), sources)
                    entries, quantization = served(entries, weights, layers, wide)
                export(
                    between,
                    manifest,
                    entries,
                    path,
                    shard=shard,
                    prefix=prefix,
                    size_per_shard=size_per_shard,
                    use_safetensors=use_safetensors,
                )
                if shard:
                    whole = Stored(between, manifest.tensors).whole
                    apart = ends_that_differ(described, partial(_same, entries, whole))
                    write_config(path, described, entries, quantization, untied=apart is not None)
            finally:
                remove(between)


def _same(entries: Mapping[str, Written], read: Read, one: str, other: str) -> bool:
    """Whether two names are written with the same numbers, or one of them is not written."""
    ends = [entries[name] for name in (one, other) if name in entries]
    return len(ends) < 2 or torch.equal(*(end.make(read).float() for end in ends))


def _host_copy(tensor: Held) -> Held:
    if isinstance(tensor, FlatShard):
        return tensor.with_values(_host_copy(tensor.values))  # type: ignore[arg-type]
    if tensor.device.type == "cpu":
        return tensor.clone()
    if is_dtensor(tensor):
        return tensor.cpu()
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


def _write_state(path: Path, tree: dict[str, Any]) -> tuple[dict[str, File], int]:
    """Write the tree; returns its file, and the bytes of memory that reading it takes."""
    data = json.dumps(tree, allow_nan=False, separators=(",", ":")).encode()
    write_synced(path, data)
    return {path.name: File(len(data), hash_of(data))}, json_cost(data)


def _versions() -> dict[str, str]:
    return {"booster": version_of("booster-amp") or "unknown", "torch": str(torch.__version__)}
