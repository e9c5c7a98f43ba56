"""The methods of `Booster` that save and load: a run, weights for other programs and for samplers, and single objects."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from booster.checkpoint.manifest import LARGEST_NUMBER
from booster.checkpoint.objects import Loaded, check_no_gradients_wait, named
from booster.common import arguments
from booster.common.torch_internals.tensor_internals import gather_full
from booster.facade import refusals
from booster.facade.booster_state import BoosterState
from booster.interface.model import boosted_wrapper
from booster.mixed_precision.policy import dtypes_read
from booster.model.modules import bare
from booster.model.params import is_dtensor, memory_of

if TYPE_CHECKING:
    from booster.checkpoint.serving import ExportSpec


def save(
    self: BoosterState,
    folder: str | os.PathLike[str],
    model: Any,
    optimizer: Any = None,
    criterion: Any = None,
    dataloader: Any = None,
    lr_scheduler: Any = None,
    *,
    extra: Any = None,
    step: int | None = None,
    keep_last: int | None = None,
    async_save: bool = False,
    frozen: bool = True,
) -> Path:
    """Write everything of the run as one checkpoint below `folder`, `folder/step-N`, and return its path; a collective.

    model, optimizer, criterion, dataloader, lr_scheduler: what `boost` returned, or a list or dict of such; None leaves it
        out.
    extra: what else is to be kept: numbers, strings, tensors, containers of them, objects with state_dict(); None is none.
    step: the number in its name; None counts on from the newest. A checkpoint of the same step stays until the new one
        is complete.
    keep_last: remove all but so many of the newest afterwards; None keeps all.
    async_save: return as soon as the state is copied to host memory, and write while training goes on; the next save, a
        load and the end of the process wait, and a failure surfaces there.
    frozen: False leaves out parameters of models that do not train, such as those under adapters; a load leaves those
        that the model has, which are to be the same.

    Kept are weights, optimizer states and masters by whole name and shape, loss scales and counters, schedules, the order
    and position of the data, the random states of every rank, and `extra`. Raises `booster.checkpoint.CheckpointError` on
    all ranks if any fails, with `folder` as it was; RuntimeError between backward and step, as within a group of
    `accumulate`, since gradients are not kept.
    """
    if (schedule := self._run.state_dict()) is not None:
        self._checkpoints.set_facts(schedule=schedule)
    from booster.checkpoint.parts.part import WITHOUT_FROZEN
    from booster.checkpoint.saving import collect_state, reserve, write

    root = arguments.path("folder", folder)
    step = None if step is None else arguments.count("step", step, least=0, most=LARGEST_NUMBER, also="None")
    keep_last = None if keep_last is None else arguments.count("keep_last", keep_last, also="None for all")
    arguments.flag("async_save", async_save)
    shared = self._checkpoints
    run = shared.run if arguments.flag("frozen", frozen) else {**shared.run, **WITHOUT_FROZEN}
    shared.background.wait()  # a write that goes on may still rename the folder that `reserve` looks for
    objects = shared.objects((model, optimizer, criterion, dataloader, lr_scheduler, extra))
    check_no_gradients_wait(objects)
    group = self.plugin.group
    taken = collect_state(objects, run, group)
    final, step = reserve(root, step, group)
    if not async_save:
        return write(final, taken, step=step, keep_last=keep_last, group=group, objects=objects)
    # Copies, because training goes on; another group, because collectives of two threads would meet.
    taken, writers = taken.to_host_memory(), None if group is None else shared.background.group()
    shared.background.start(lambda: write(final, taken, step=step, keep_last=keep_last, group=writers))
    return final


def wait_for_save(self: BoosterState) -> None:
    """Wait until what `save(async_save=True)` writes is complete; raises CheckpointError if it failed."""
    self._checkpoints.background.wait()


@torch.inference_mode(False)  # which tensors that are made within it would not leave: no step could write to them
@torch.no_grad()
def load(
    self: BoosterState,
    folder: str | os.PathLike[str],
    model: Any,
    optimizer: Any = None,
    criterion: Any = None,
    dataloader: Any = None,
    lr_scheduler: Any = None,
    *,
    extra: Any = None,
    strict: bool = True,
) -> Loaded:
    """Load a checkpoint of `save`, whatever layout and precision wrote it; returns its `.step`, `.extra` and `.path`.

    folder: a checkpoint, or a folder of checkpoints, of which the newest valid one is taken.
    model, optimizer, criterion, dataloader, lr_scheduler: as `save` was given them; None leaves it out.
    extra: objects with load_state_dict(), in the places where `save` was given them; None gives back what it was given.
    strict: the model's entries must be those of the checkpoint; otherwise what differs is left out and named in a WARNING.

    A collective. Every byte is verified, and names, shapes and classes compared, before anything is touched. Raises
    `booster.checkpoint.CheckpointError` on all ranks, listing all that differs, with nothing loaded.
    """
    from booster.checkpoint.loading import load as load_checkpoint

    root = arguments.path("folder", folder)
    arguments.flag("strict", strict)
    self._checkpoints.background.wait()
    objects = self._checkpoints.objects((model, optimizer, criterion, dataloader, lr_scheduler, extra))
    loaded = load_checkpoint(root, objects, strict=strict, group=self.plugin.group)
    if loaded.path is not None:
        self._run.load_state_dict(loaded.run.get("schedule"))
    return loaded


def resume_or_start(
    self: BoosterState,
    folder: str | os.PathLike[str],
    model: Any,
    optimizer: Any = None,
    criterion: Any = None,
    dataloader: Any = None,
    lr_scheduler: Any = None,
    *,
    extra: Any = None,
) -> Loaded:
    """Load the newest valid checkpoint below `folder`, or nothing where there is none yet; then `.step` is 0.

    model, optimizer, criterion, dataloader, lr_scheduler, extra: as for `load`; None leaves it out.

    From here on SIGTERM and SIGUSR1 do not end the process: `stop_requested` says that one came.

        run = b.resume_or_start(folder, model, optimizer, criterion, loader, schedule)
        for step in range(run.step, total):
            ...
            if b.stop_requested():
                b.save(folder, model, optimizer, criterion, loader, schedule, step=step + 1)
                break

    A collective. Raises as `load` does, also where all checkpoints of `folder` are damaged.
    """
    from booster.checkpoint.loading import anything_in

    root = arguments.path("folder", folder)
    given = (model, optimizer, criterion, dataloader, lr_scheduler)
    # Signals are listened to before anything is read: a load takes minutes, in which a scheduler may ask to stop.
    named(*given, extra)  # wrong objects are errors now, not later
    self._checkpoints.stop_requests.listen()
    self._checkpoints.background.wait()
    if not anything_in(root, self.plugin.group):
        return Loaded(0, extra, None)
    return self.load(folder, *given, extra=extra)


def stop_requested(self: BoosterState) -> bool:
    """Whether SIGTERM or SIGUSR1 has reached any rank since `resume_or_start`; a collective of one number."""
    return self._checkpoints.stop_requests.requested(self.plugin.group)


def save_model(
    self: BoosterState,
    model: nn.Module,
    path: str | os.PathLike[str],
    shard: bool = False,
    prefix: str | None = None,
    size_per_shard: int = 1024,
    use_safetensors: bool = True,
    *,
    weights: Literal["bf16", "fp16", "fp8", "int8"] | None = None,
    merge: bool = False,
) -> None:
    """Write the whole weights of the boosted `model` for other programs; a collective.

    path: the file; with `shard` a folder.
    shard: write files of at most `size_per_shard` MB, an index, and the model's own configuration if it has one, so that
        `from_pretrained` opens it.
    prefix: what the names of these files begin with; None is the usual one.
    size_per_shard: in MB.
    use_safetensors: False writes files of `torch.save`.
    weights: None writes them as the model stores them. The others are made of half weights where the precision computes
        with these throughout, also where shards are float32. "bf16" and "fp16" round all floating parameters. "fp8" and
        "int8" write linear layers in 8 bits, and other floating parameters in float16 where the precision computes in it,
        else in bfloat16. "fp8": e4m3 under a scale for each 128 x 128 numbers, as FineGrainedFP8Config of transformers and
        vLLM read it. "int8": a scale for each row, as compressed-tensors has it for products in int8 (W8A8). Both are for
        models of transformers, need `shard`, and leave wide what makes the logits, shared weights, and layers that 128 does
        not divide ("fp8"), which config.json names.
    merge: write adapters of `enable_lora` as part of what they adapt, under the names of the model without them.

    Weights that the optimizer keeps in float32 behind half ones are in what `save` writes, not here.
    Raises ValueError for what cannot be in 8 bits or merged, and CheckpointError for numbers that the form does not hold.
    """
    from booster.checkpoint.adapters import check_merges, merged
    from booster.checkpoint.serving import check_served, save_weights
    from booster.checkpoint.weight_files import FileOptions

    wrapper = boosted_wrapper(model, "save_model")
    arguments.flag("shard", shard)
    arguments.flag("use_safetensors", use_safetensors)
    own = bare(wrapper.module)
    check_served(own, weights, shard=shard, use_safetensors=use_safetensors)
    if arguments.flag("merge", merge):
        check_merges(own)
    file = arguments.path("path", path)
    prefix = None if prefix is None else arguments.text("prefix", prefix, also="None")
    size_per_shard = arguments.count("size_per_shard", size_per_shard, what="of MB")
    save_weights(
        wrapper,
        file,
        group=self.plugin.group,
        files=FileOptions(shard, prefix, size_per_shard, use_safetensors),
        weights=weights,
        half=self.precision.policy.param,
        wide=self.precision.half_dtype or torch.bfloat16,
        merge=merged if merge else None,
    )


@torch.inference_mode(False)
@torch.no_grad()
def load_model(self: BoosterState, model: nn.Module, path: str | os.PathLike[str], strict: bool = True) -> None:
    """Load weights into the boosted `model`: a file or folder of `save_model`, of `torch.save` or of `save_pretrained`.

    path: that file or folder.
    strict: False leaves out names that only one side has, with a WARNING.

    Weights are read from safetensors files straight into the model, but for those that masters or several names share.
    Raises CheckpointError that lists all names and shapes that differ, with nothing loaded, and where a file that fits
    cannot be read to its end says that weights hold parts of it. Masters of the optimizer follow the weights.
    """
    from booster.checkpoint.loading import load_model as load_into

    wrapper, file = boosted_wrapper(model, "load_model"), arguments.path("path", path)
    load_into(wrapper, file, strict=arguments.flag("strict", strict), group=self.plugin.group)


def save_optimizer(self: BoosterState, optimizer: Any, path: str | os.PathLike[str]) -> None:
    """Write states, masters and loss scale of the boosted `optimizer` as the checkpoint folder `path`; a collective."""
    refusals.check_boosted_optimizers(optimizer, "save_optimizer")
    _save_part(self, path, optimizer=optimizer)


def load_optimizer(self: BoosterState, optimizer: Any, path: str | os.PathLike[str]) -> None:
    """Load into `optimizer` what `save_optimizer` wrote at `path`, in any layout; raises as `load` does. A collective."""
    refusals.check_boosted_optimizers(optimizer, "load_optimizer")
    self.load(arguments.path("path", path), None, optimizer)


def save_lr_scheduler(self: BoosterState, lr_scheduler: Any, path: str | os.PathLike[str]) -> None:
    """Write the state of `lr_scheduler` as the checkpoint folder `path`; a collective."""
    refusals.check_named("lr_scheduler", lr_scheduler)
    _save_part(self, path, lr_scheduler=lr_scheduler)


def load_lr_scheduler(self: BoosterState, lr_scheduler: Any, path: str | os.PathLike[str]) -> None:
    """Load into `lr_scheduler` what `save_lr_scheduler` wrote at `path`; raises as `load` does. A collective."""
    refusals.check_named("lr_scheduler", lr_scheduler)
    self.load(arguments.path("path", path), None, lr_scheduler=lr_scheduler)


def _save_part(
    self: BoosterState, path: str | os.PathLike[str], *, optimizer: Any = None, lr_scheduler: Any = None
) -> None:
    from booster.checkpoint.saving import collect_state, write

    root, objects = arguments.path("path", path), named(None, optimizer, None, None, lr_scheduler, None)
    taken, group = collect_state(objects, {}, self.plugin.group), self.plugin.group
    write(root, taken, step=0, keep_last=None, group=group, objects=objects)


_logger = logging.getLogger(__name__)


def sync_weights(self: BoosterState, model: nn.Module, *, merge: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and value of every weight and buffer that a sampler needs, whole, to the bit as the forward reads it.

        sampler.load_state_dict(dict(b.sync_weights(model)))

    model: the boosted model.
    merge: with adapters of `enable_lora` added to what they adapt, under the names of the model without them.

    Half weights are yielded as they are, and what autocast or a plugin rounds before a product, rounded; norms, embeddings
    and modules of keep_fp32 that are read in float32, in float32. Under formats of 8 bits weights are yielded before they
    are rounded to these. Tied weights are yielded under each name. What is neither rounded nor gathered is the model's own
    memory: copy it before the next step.

    A collective where ranks hold parts of weights: each is gathered as it is asked for, so all ranks go through all of
    them. Raises RuntimeError for stages of a pipeline, which `save_model` writes.
    """
    # Here and not above: they import torch.distributed.checkpoint, which `import booster` is to leave alone.
    from booster.checkpoint.adapters import check_merges, merged
    from booster.checkpoint.serving import ends_that_differ, sources_of

    halves = self.precision.policy.param is not None
    wrapper = boosted_wrapper(model, "sync_weights")
    if getattr(wrapper.module, "is_partial", False):
        raise RuntimeError(
            "sync_weights gathers what ranks hold in parts, and stages of a pipeline hold layers that others lack; write them "
            "with b.save_model(model, folder, shard=True), which a sampler opens"
        )
    own, state = bare(wrapper.module), {k: v for k, v in wrapper.state_dict().items() if isinstance(v, torch.Tensor)}
    dtypes = dtypes_read(own, self.precision.half_dtype, weights=halves)
    sources = sources_of(own, state, unpack=False)
    if arguments.flag("merge", merge):
        check_merges(own)
        base, sources = merged(own, state)
        if apart := ends_that_differ(base, lambda one, other: _made_alike(state, sources, one, other)):
            _logger.warning(
                "%s and %s were one matrix and train apart: a sampler that ties them holds the second for both; build it with "
                "tie_word_embeddings=False",
                *apart,
            )
    return _gathered(state, dtypes, sources, halves=halves)


def _gathered(
    state: dict[str, torch.Tensor], dtypes: dict[str, torch.dtype], sources: dict[str, ExportSpec], *, halves: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    def read(name: str) -> torch.Tensor:
        return _whole(state[name], dtypes.get(name) if halves else None)

    left = Counter(memory_of(state[source.stored]) for source in sources.values())
    shared: dict[int, torch.Tensor] = {}  # what was gathered and is asked for again, as tied weights are
    for name, source in sources.items():
        held, dtype = state[source.stored], dtypes.get(source.stored)
        key = memory_of(held)
        left[key] -= 1
        if source != type(source)(source.stored, number=source.number):  # merged with adapters
            value = source.whole(read)
            yield name, value if dtype is None else value.to(dtype)
            continue
        value = shared.pop(key) if key in shared else _whole(held, dtype)
        if left[key]:
            shared[key] = value
        yield name, value if source.number is None else value[source.number]


def _made_alike(state: dict[str, torch.Tensor], sources: dict[str, ExportSpec], one: str, other: str) -> bool:
    """Whether two weights are made of the same tensors in the same way, or one of them is not there."""
    ends = [sources[name] for name in (one, other) if name in sources]
    return len(ends) < 2 or (
        ends[0].adapters == ends[1].adapters and len({memory_of(state[end.stored]) for end in ends}) == 1
    )


def _whole(held: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Rounded first, where it is, as fewer bytes travel then."""
    rounded = held if dtype is None else held.to(dtype)
    return gather_full(rounded) if is_dtensor(rounded) else rounded
