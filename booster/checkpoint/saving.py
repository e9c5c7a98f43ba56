"""Saving: everything of a run into one folder that appears whole or not at all."""

from __future__ import annotations

import json
import logging
import shutil
import warnings
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from booster.checkpoint import parts
from booster.checkpoint.dcp_storage import ManifestWriter, WholeSavePlanner
from booster.checkpoint.folder import (
    Lock,
    checkpoints,
    make_folder,
    name_of,
    prune,
    publish,
    staging_folder,
    write_synced,
    writing,
)
from booster.checkpoint.loading import check_loads
from booster.checkpoint.manifest import (
    LARGEST_NUMBER,
    MANIFEST,
    STATE,
    CheckpointError,
    File,
    Manifest,
    agreed,
    check_text,
    first_failure,
    hash_of,
    is_first,
    new_hash,
)
from booster.checkpoint.objects import Objects, user_module
from booster.checkpoint.parts.part import SaveContext, Tensors, leaves_out_frozen
from booster.checkpoint.state_tree import OWN, HeldTensor, as_planned
from booster.checkpoint.tensor_file import need_safetensors
from booster.common.arguments import listed
from booster.common.installed import version_of
from booster.common.untrusted_files import json_cost
from booster.model.params import is_dtensor
from booster.ranks.agreement import gather, rank_in
from booster.shards.base import FlatShard
from booster.update.state_dict import STATE_KEY

_logger = logging.getLogger(__name__)
ROUNDING = f"/{STATE_KEY}/masters/rounding/"


@dataclass(frozen=True)
class CollectedState:
    """All that one rank puts into a checkpoint.

    Attributes:
        tensors: this rank's, by name.
        tree: of all ranks.
    """

    tensors: dict[str, HeldTensor]
    tree: dict[str, Any]

    def to_host_memory(self) -> CollectedState:
        """Return it with copies of the tensors in host memory, pinned where they come from a device; waits for them."""
        copies = {name: _host_copy(tensor) for name, tensor in self.tensors.items()}
        for device in {getattr(tensor, "device", None) for tensor in self.tensors.values()}:
            if device is not None and device.type == "cuda":
                torch.cuda.synchronize(device)
        return CollectedState(copies, self.tree)


def collect_state(objects: Objects, run: Mapping[str, Any], group: dist.ProcessGroup | None) -> CollectedState:
    """Return the state of `objects` now; the tensors are those of the running job, not copies. A collective.

    run: what is known of the run as a whole, JSON-like.
    """
    # They raise now where a package is missing, and not in the thread that writes.
    new_hash()
    need_safetensors()
    into = SaveContext(rank_in(group), frozen=not leaves_out_frozen(run))
    tree: dict[str, Any] = {} if into.rank else {"run": dict(run)}
    with agreed(group):
        for kind in parts.PARTS:
            tree |= kind(objects).collect(into)
    shared = {name: as_planned(tensor) for name, tensor in into.shared.items()}
    tensors, own = choose_writers(shared, group, buffers_of(objects))
    merged = _merged(gather(tree, group))
    return CollectedState(tensors | into.own, {**merged, OWN: own} if any(own) else merged)


def choose_writers(
    shared: Tensors, group: dist.ProcessGroup | None, buffers: Container[str], *, all_kept: bool = True
) -> tuple[Tensors, list[dict[str, str]]]:
    """Return what this rank writes of `shared`, and by rank the names of what it keeps under another name; a collective.

    Where ranks' tensors differ, the first rank that holds it writes it. Other ranks write theirs under another name, if it is
    one of `buffers`, below "extra", or a random state of stochastic rounding, which goes with the size of a rank's shard;
    without `all_kept` they do not. Any other tensor that differs, such as weights that drifted apart, is a WARNING.
    """
    if group is None:
        return shared, [{}]
    # DCP's planner takes a plain tensor that several ranks hold from any of them, which is right where they are equal to the
    # bit.
    plain = {
        name: _digest(tensor)
        for name, tensor in shared.items()
        if type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided  # type: ignore[union-attr]
    }
    rank, said = dist.get_rank(group), gather(plain, group)
    kept, own, drifted = dict(shared), [dict[str, str]() for _ in said], []
    for name in sorted({name for each in said for name in each}):
        holders = [index for index, each in enumerate(said) if name in each]
        if len({said[index][name] for index in holders}) == 1:
            continue
        may_differ = name in buffers or name == "extra" or name.startswith("extra/") or ROUNDING in name
        drifted += [] if may_differ else [name]
        for index in holders[1:]:
            if may_differ and all_kept:
                own[index][name] = f"{name}#{index}"
        if rank in holders[1:]:
            value = kept.pop(name)
            if name in own[rank]:
                kept[own[rank][name]] = value
    if drifted and rank == 0:
        _logger.warning(
            "%d tensors differ between ranks that should have the same, and those of the first rank are saved: %s. Learning "
            "rates, data of schedules, random numbers or writes that differ by rank let replicas drift apart",
            len(drifted),
            listed(drifted, 4),
        )
    return kept, own


def _digest(tensor: HeldTensor) -> str:
    """Return what differs for tensors of other numbers, or in another order; on a device without a copy to the host."""
    bits = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)  # type: ignore[union-attr]
    form = f"{tensor.dtype} {list(tensor.shape)} "
    if bits.device.type == "cpu":
        return form + hash_of(memoryview(bits.numpy()))  # type: ignore[arg-type]
    width = max(w for w in (1, 2, 4, 8) if bits.numel() % w == 0)
    # Sums of every, every second and every third number: enough for drift and permutations, and three numbers to send.
    whole = bits.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width])
    return form + str([whole[::step].sum(dtype=torch.int64).item() for step in (1, 2, 3)])


def buffers_of(objects: Objects) -> set[str]:
    """The names in a checkpoint of the buffers of models and criteria."""
    return {
        f"{kind}/{name}/{key}"
        for kind, modules in (("models", objects.models), ("criteria", objects.criteria))
        for name, module in modules.items()
        for key, _ in user_module(module).named_buffers(remove_duplicate=False)
    }


def _merged(trees: list[dict[str, Any]]) -> dict[str, Any]:
    """One tree: what the first rank says, more keys where others hold other layers, and what is each rank's own."""
    of_ranks = {key: [tree.pop(key) for tree in trees] for kind in parts.PARTS for key in kind.of_ranks}
    merged = trees[0]
    for tree in trees[1:]:  # stages of a pipeline have other layers
        _add_keys(merged, tree)
    if all(extra in (merged["extra"], None) for extra in of_ranks["extras"]):  # None: a rank that gave nothing
        del of_ranks["extras"]
    return {**merged, **of_ranks}


def _add_keys(tree: Any, other: Any) -> None:
    if isinstance(tree, dict) and isinstance(other, dict):
        for key, value in other.items():
            if key in tree:
                _add_keys(tree[key], value)
            else:
                tree[key] = value
    elif isinstance(tree, list) and isinstance(other, list):
        for one, two in zip(tree, other, strict=True):
            _add_keys(one, two)


def reserve(root: Path, step: int | None, group: dist.ProcessGroup | None) -> tuple[Path, int]:
    """Return where the checkpoint of `step` goes, and its number, counted on from the newest where None; a collective.

    Raises CheckpointError on every rank where no number follows the newest.
    """
    if step is None:
        taken = [found for found, _ in checkpoints(root)] + writing(root) if is_first(group) else []
        step = max(taken, default=-1) + 1
    step = gather(step, group)[0]
    if step > LARGEST_NUMBER:
        raise CheckpointError(
            f"{root} has a checkpoint of step {step - 1}, which no number follows; name the step to save, or move that one away"
        )
    return root / name_of(step), step


def write(
    final: Path,
    taken: CollectedState,
    *,
    step: int,
    keep_last: int | None,
    group: dist.ProcessGroup | None,
    objects: Objects | None = None,
) -> Path:
    """Write `taken` as the checkpoint `final`; a collective over `group`. keep_last: of the numbered ones there.

    objects: what was saved, where it does not train on: a load of it is rehearsed, without tensors.

    It is opened as a load opens it before it gets its name, so that what no load would take never replaces what one does. If it
    raises, on any rank, it raises CheckpointError on all, and what bore the name still does.
    """
    staging: Path | None = None
    lock: Lock | None = None
    try:
        with agreed(group):
            if is_first(group):
                make_folder(final.parent)
                lock = Lock(final)
                staging = staging_folder(final, lock)
        # The name of the staging folder is random; all ranks write into that of the first.
        staging = Path(gather(str(staging), group)[0])
        versions = {"booster": version_of("booster-amp") or "unknown", "torch": str(torch.__version__)}
        writer, takes = ManifestWriter(staging), 0
        with agreed(group):
            if is_first(group):
                text = json.dumps(taken.tree, allow_nan=False, separators=(",", ":")).encode()
                write_synced(staging / STATE, text)
                writer.files[STATE] = File(len(text), hash_of(text))
                takes = json_cost(text)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            dcp.save(
                taken.tensors,
                storage_writer=writer,
                planner=WholeSavePlanner(),
                process_group=group,
                no_dist=group is None,
            )
        with agreed(group):
            if is_first(group):
                manifest = Manifest(step, len(taken.tree["random"]), versions, writer.files, writer.tensors)
                check_text(STATE, takes, manifest.files)
                write_synced(staging / MANIFEST, manifest.dumps())
        if taken.tree.keys() > {"random"}:  # not of weights alone, which have no tree
            with agreed(group):
                if objects is not None or is_first(group):
                    check_loads(staging, objects, rank_in(group))
        with agreed(group):
            if lock is not None:
                publish(staging, final, lock)
                if keep_last is not None:
                    prune(final.parent, keep_last, final)
    except CheckpointError:
        raise
    except (CheckpointException, OSError, RuntimeError, TypeError, ValueError, MemoryError) as error:
        of_rank = isinstance(error, CheckpointException)
        said = f" {first_failure(error)}" if of_rank else f": {type(error).__name__}: {error}"
        raise CheckpointError(f"saving {final} failed{said}; what was there before still is") from error
    finally:
        if staging is not None and is_first(group) and staging.exists():  # it has not got its name
            shutil.rmtree(staging, ignore_errors=True)
        if lock is not None:
            lock.release()
    return final


def _host_copy(tensor: HeldTensor) -> HeldTensor:
    if isinstance(tensor, FlatShard):
        return tensor.with_values(_host_copy(tensor.values))  # type: ignore[arg-type]
    # A view of training memory would change while the thread writes.
    if tensor.device.type == "cpu":
        return tensor.clone()
    if is_dtensor(tensor):
        return tensor.cpu()
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
