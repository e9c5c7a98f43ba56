"""How a model is cut into pipeline stages, planned while it is whole, and what a plugin returns for it afterwards."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from booster.model.modules import PlacedModule, bare, fast_path_off
from booster.plugin.pipeline.meta_model import MetaModel, Prepare, replace_parameter
from booster.plugin.pipeline.schedule_runner import ScheduleRunner, Shape, check_count, check_style, stage_ranks
from booster.plugin.pipeline.shape_inference import StageIO, infer_shapes
from booster.plugin.pipeline.split import TiedWeights, find_split, qualified
from booster.plugin.pipeline.stage import Stage, StageForward
from booster.tensors.trees import HALF_DTYPES, MicroBatch, form, leaves, map_tensors

if TYPE_CHECKING:
    from booster.plugin.sequence_parallel import SequenceParallel


class PipelinePlan:
    """How `model`, which is whole and unsharded, is cut for `pp_size` ranks; making a plan changes nothing.

    `cut` it once, then make `StagePipeline(plan, ...)`.

    Arguments:
        style: "gpipe", "1f1b", "interleaved" or "zbv".
        num_model_chunks: stages on each rank, with "interleaved"; "zbv" has 2.
        split_points: see `find_split`.
        device: where the stages will run, if the model is elsewhere yet.
        prepare: a function of a model on the meta device that edits it, in place or not, as the dtypes of the stages will be,
            and returns it.

    Attributes:
        ranks: by stage, the pipeline rank that runs it.
        split, owners, holders: where the cuts are, and what each stage has; see `split.py`.
        meta_model: the copy that takes the place of other stages' modules.
        stages: those of this rank, after `cut`.
        rank: this pipeline rank, after `cut`.

    Raises ValueError for a model that does not divide so, cannot be copied or is compiled as a whole.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        pp_size: int,
        style: str = "1f1b",
        num_model_chunks: int = 1,
        split_points: Sequence[str] | None = None,
        device: torch.device | None = None,
        prepare: Prepare | None = None,
    ) -> None:
        if "_orig_mod" in model._modules:
            raise ValueError(
                f"the {type(bare(model)).__name__} is compiled as a whole, and a graph cannot be cut into pipeline stages; "
                "compile its blocks instead: for block in model.blocks: block.compile()"
            )
        self.model = model
        self.style, self.pp_size = style, pp_size
        self.ranks = stage_ranks(style, pp_size, check_style(style, pp_size, num_model_chunks))
        self.split = find_split(model, len(self.ranks), split_points)
        self.meta_model = MetaModel(model, self.split, device=device, prepare=prepare)
        self.owners, self.holders = self.meta_model.owners, self.meta_model.holders
        self.stages: list[Stage] = []
        self.rank = -1

    def cut(self, rank: int) -> list[nn.Module]:
        """Take out of the model, in place, what the pipeline rank `rank` does not have; returns the stages it has.

        Each is a module to call, in stage order: the model itself, or, where a rank has several, copies of the modules
        around the blocks, which share blocks and parameters with the model. Names are those of the model everywhere.
        The model may have been through tensor parallelism; data parallelism comes after, with the stages as roots.
        """
        if self.stages:
            raise RuntimeError("this pipeline plan was carried out already; make another one for another model")
        self.rank = rank
        mine = [index for index, owner in enumerate(self.ranks) if owner == rank]
        # Several stages share one set of blocks; only the modules around them exist once per stage.
        self.stages = [Stage(index, self.split, self.meta_model) for index in mine]
        # A module around the blocks has other children in each stage.
        copies = [self._copy() for _ in mine] if len(mine) > 1 else [self.model]
        originals = {name: self.model.get_submodule(name) for name in self.split.ancestors()}
        for stage, module in zip(self.stages, copies, strict=True):
            self._replace_foreign(module, {stage.index}, stage)
            if module is not self.model:
                for name, original in originals.items():
                    module.get_submodule(name)._buffers = original._buffers
                    if stage.index == 0:
                        module.get_submodule(name)._parameters = original._parameters
            stage.module = module
            module.__dict__["forward"] = StageForward(stage, module.forward)
        if len(mine) > 1:
            self._replace_foreign(self.model, set(mine), self.stages[0])
            # The model only names what the rank has; the schedule calls its stages one by one.
            self.model.__dict__["forward"] = _call_by_pipeline
        return copies

    def register_receiving(self) -> None:
        """Let the blocks of the stages that `cut` made receive activations; call it when the stages are sharded."""
        for stage in self.stages:
            for position, name in enumerate(self.split.children):
                if self.split.name_of(position) in self.owners and self.split.stage_of(position) == stage.index:
                    block = stage.module.get_submodule(qualified(self.split.container, name))
                    stage.register_receiving(position, block)
            for module in stage.module.modules() if self.style == "zbv" else ():
                if isinstance(module, FSDPModule):
                    # This schedule asks for gradients of the weights that are there before backward gathers any.
                    module.set_reshard_after_forward(False, recurse=False)

    def _copy(self) -> nn.Module:
        """Return copies of the modules around the blocks, with everything else shared."""
        shared: dict[int, Any] = {}
        around = [self.model.get_submodule(name) for name in self.split.ancestors()]
        for module in around:
            shared.update({id(child): child for child in module._modules.values() if child is not None})
            tensors = (*module._parameters.values(), *module._buffers.values())
            shared.update({id(tensor): tensor for tensor in tensors})
        for module in around:
            shared.pop(id(module), None)
        return copy.deepcopy(self.model, shared)

    def _replace_foreign(self, model: nn.Module, stages: set[int], stage: Stage) -> None:
        """Put the meta model's modules in the places of those of other stages than `stages`; blocks among them ask `stage`."""
        for name, owner in self.owners.items():
            if owner in stages:
                continue
            module = self.meta_model.module.get_submodule(name)
            parent, _, child = name.rpartition(".")
            if parent == self.split.container and child in self.split.children:
                module = copy.copy(module)  # shallow: the meta model's own forward must not ask this stage
                module.__dict__["forward"] = StageForward(stage, position=self.split.children.index(child))
            model.get_submodule(parent)._modules[child] = module
        if 0 in stages:
            return
        # Parameters of the modules around the blocks belong to the first stage.
        for ancestor in self.split.ancestors():
            module, fake = model.get_submodule(ancestor), self.meta_model.module.get_submodule(ancestor)
            for name in [name for name, param in module._parameters.items() if param is not None]:
                replace_parameter(module, name, getattr(fake, name))


def _call_by_pipeline(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("the model is on several pipeline stages; run it by b.execute_pipeline(...)")


class StagePipeline(PlacedModule):
    """This rank's stages of a model. All ranks of the pipeline run it over micro-batches together; it cannot be called.

    Parameters and state dict keys are those of the user's model that this rank has.

    plan: carried out by `cut`; its stages are on `device`, and sharded. group: the ranks of the pipeline, None for the whole
    world. boundary: maps the shape of a tensor that crosses between stages in the model as planned to its actual shape, for
    sequence parallelism. sequences: what cuts batches where ranks share sequences. A collective over `group` where weights are
    tied across stages.
    """

    is_partial = True

    def __init__(
        self,
        plan: PipelinePlan,
        *,
        group: dist.ProcessGroup | None,
        device: torch.device,
        boundary: Callable[[Shape], Shape] | None = None,
        sequences: SequenceParallel | None = None,
    ) -> None:
        super().__init__(plan.model)
        plan.register_receiving()
        self._plan = plan
        self._stages = tuple(plan.stages)
        self._rank = rank = plan.rank
        self._group = group
        self._device = device
        self._boundary = boundary
        self._sequences = sequences
        for stage in self._stages if sequences is not None else ():
            stage.began = partial(setattr, sequences, "micro_batch")
        self._mine = {stage.index: stage for stage in self._stages}
        self._runners: dict[bool, tuple[Any, ScheduleRunner, StageIO]] = {}  # by whether they run backward
        self._copies: list[tuple[dict[str, Any], str, nn.Module, nn.Module]] = []  # see `_find_copies`
        self._loss_of = _Losses()
        holders = {name: {plan.ranks[stage] for _, stage in held} for name, held in plan.holders.items()}
        ranks = {name: tuple(sorted(held)) for name, held in holders.items() if len(held) > 1}
        tied = {name: param for name, param in self.own_parameters().items() if name in ranks}
        self._tied = TiedWeights(tied, ranks, rank=rank, group=group)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            "the model is on several pipeline stages, and no rank can compute it alone; write "
            "b.execute_pipeline(data_iter, model, criterion, optimizer), with optimizer=None to evaluate"
        )

    def run(
        self,
        micro_batches: Sequence[MicroBatch],
        criterion: Callable[[Any, Any], torch.Tensor],
        *,
        seed: Any,
        return_outputs: bool = True,
    ) -> tuple[list[torch.Tensor], list[Any]]:
        """Run as `booster.plugin.Pipeline` says, on micro-batches of one shape.

        criterion: (output, target) -> loss of one element. Enter the precision's context around it: boundaries between
        stages have the dtypes of that. Side effects: gradients accumulate; one forward of each stage for each micro-batch;
        sends and receives between neighbours. Raises RuntimeError, on all ranks, for a forward that uses on one stage
        what another stage has.
        """
        backward = seed is not None
        check_count(self._plan.style, self._plan.pp_size, len(micro_batches))
        # Bring the copies of modules into the mode, training or evaluation, of the user's modules
        if not self._copies or any(place.get(name) is not module for place, name, module, _ in self._copies):
            # A copy was made in the mode of then; dropout must follow the user's `train()` and `eval()`.
            self._copies = list(self._find_copies())
        for _, _, module, twin in self._copies:
            if twin.training is not module.training:
                twin.training = module.training
        # Torch's fused inference path reads weights past the modules, which on this rank may be fakes.
        with torch.set_grad_enabled(backward), nullcontext() if backward else fast_path_off():
            runner, io = self._runner(micro_batches, backward)
            ours = self._loss_of
            ours.criterion, ours.keep_outputs = criterion, return_outputs
            # Scaled once, in the last stage: the mean over micro-batches, times what the caller starts backward with.
            ours.factor = seed / len(micro_batches) if backward else None
            for stage in self._stages:
                stage.prepare(io, micro_batches)
            try:
                with self._tied.summed() if backward else nullcontext():
                    runner.run()
                return ours.losses, ours.outputs
            finally:
                for stage in self._stages:
                    stage.finish()
                ours.clear()

    def share(self, loss: torch.Tensor | None, device: torch.device) -> torch.Tensor:
        """Return the 0-dim `loss` of the last stage on every rank of the pipeline; a collective."""
        last = self._plan.ranks[-1]
        if self._rank != last or loss is None:
            value = torch.zeros((), dtype=torch.float32, device=device)
        else:
            value = loss.detach().float()
        source = dist.get_global_rank(self._group or dist.group.WORLD, last)  # type: ignore[arg-type]
        dist.broadcast(value, src=source, group=self._group)
        return value

    def own_parameters(self) -> dict[str, torch.Tensor]:
        """Return the parameters that this rank has, by their first names in the whole model."""
        own: dict[str, torch.Tensor] = {}
        for first, held in self._plan.holders.items():
            distinct = {
                id(param): param
                for name, stage in held
                if stage in self._mine
                for param in [self._mine[stage].module.get_parameter(name)]
            }
            if len(distinct) > 1:
                raise ValueError(
                    f"the weight {first} is tied across stages of one rank, {[name for name, _ in held]}, and sharding made "
                    "different tensors of it; untie it, or use a schedule with one stage on each rank"
                )
            # A tied weight is listed by its first name also if that is on another stage, where `named_parameters` has another
            # name.
            own.update((first, param) for param in distinct.values())
        return own

    @property
    def names_elsewhere(self) -> dict[str, str]:
        """Names that tied weights have on stages of other ranks, each with a name that this rank has of the same weight."""
        names: dict[str, str] = {}
        for held in self._plan.holders.values():
            own = [name for name, stage in held if stage in self._mine]
            names.update((name, own[0]) for name, _ in held if own and name not in own)
        return names

    def num_copies(self, param: torch.Tensor) -> int:
        """Return how many ranks of the pipeline hold `param`, one of this rank's: 1 if it is not tied across ranks."""
        return next((len(self._tied.ranks[name]) for name, own in self._tied.params.items() if own is param), 1)

    def _runner(self, micro_batches: Sequence[MicroBatch], backward: bool) -> tuple[ScheduleRunner, StageIO]:
        """Return the schedule for micro-batches of this shape, and what they send; the last one of its kind is kept."""
        first = micro_batches[0]
        key = (len(micro_batches), *self._signature(first))
        if backward not in self._runners or self._runners[backward][0] != key:
            with nullcontext() if self._sequences is None else self._sequences.joined():
                io = infer_shapes(self._plan.meta_model, self._plan.split, first.args, first.kwargs)
            runner = ScheduleRunner(
                self._plan.style,
                self._stages,
                io,
                len(micro_batches),
                loss_of=self._loss_of,
                backward=backward,
                boundary=self._boundary,
                group=self._group,
                device=self._device,
            )
            self._runners[backward] = (key, runner, io)
        return self._runners[backward][1:]

    def _signature(self, micro_batch: MicroBatch) -> tuple[Any, ...]:
        """Return what shapes and dtypes between stages depend on."""
        call = (micro_batch.args, micro_batch.kwargs)
        described = tuple(
            (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else (type(leaf), repr(leaf))
            for leaf in leaves(call)
        )
        kind = self._device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        cut = None if self._sequences is None else self._sequences.cut  # masks are of all its tokens
        lengths = cut and (cut.length, cut.key_mask is None)
        return described, form(call), autocast, self.module.training, lengths

    def _find_copies(self) -> Iterator[tuple[dict[str, Any], str, nn.Module, nn.Module]]:
        """Yield for each copy of a module: the dict that holds the user's, its name in there, the user's, and the copy."""
        own = dict(self.module.named_modules())
        split = self._plan.split
        pairs = [(name, stage.module.get_submodule(name)) for stage in self._stages for name in split.ancestors()]
        for name, twin in (*pairs, *self._plan.meta_model.module.named_modules()):
            parent, _, child = name.rpartition(".")
            if name and name in own and parent in own:
                place, module = own[parent]._modules, own[name]
            else:
                place, child, module = self._modules, "module", self.module
            yield place, child, module, twin


class _Losses:
    """Computes the loss that the backward of a micro-batch starts from, and keeps losses and outputs of a run."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.criterion: Callable[[Any, Any], torch.Tensor] = _no_criterion
        self.factor: Any = None
        self.keep_outputs = False
        self.losses: list[torch.Tensor] = []
        self.outputs: list[Any] = []

    def __call__(self, output: Any, target: Any) -> torch.Tensor:
        loss = self.criterion(output, target)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or loss.is_complex():
            shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ValueError(
                f"the loss must be a real tensor of one element, got {shape}; reduce it first, e.g. loss.mean()"
            )
        # Summed and scaled in float32: float16 would overflow with a loss scale.
        loss = (loss.float() if loss.dtype in HALF_DTYPES else loss).reshape(())
        self.losses.append(loss.detach())
        if self.keep_outputs:
            self.outputs.append(map_tensors(torch.Tensor.detach, output))
        if self.factor is None:
            return loss
        if not loss.requires_grad:
            raise RuntimeError(
                "the loss does not require gradients: it was computed under no_grad, or from detached tensors"
            )
        return loss * self.factor


def _no_criterion(output: Any, target: Any) -> torch.Tensor:
    raise RuntimeError("a pipeline stage was computed outside Pipeline.run")


class LayersLoaded:
    """A load_state_dict pre-hook: of the state of a whole model a pipeline rank takes its own layers.

    own: keys of this rank's state dict. whole: those of the whole model's. Raises ValueError for a state that has keys of
    other ranks and none of this one: there, `strict=False` would load nothing.
    """

    def __init__(self, own: Iterable[str], whole: Iterable[str]) -> None:
        self._own = frozenset(own)
        self._elsewhere = frozenset(whole) - self._own

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        foreign = [prefix + key for key in self._elsewhere if prefix + key in state_dict]
        if foreign and self._own and not any(prefix + key in state_dict for key in self._own):
            raise ValueError(
                f"this state was saved on another rank of the pipeline: it has {sorted(foreign)[:3]}, which lie there, and "
                f"none of this rank's weights, such as {sorted(self._own)[0]!r}. Save on every rank, in a file each, and load "
                "on the same rank, or load the state of the whole model"
            )
        for key in foreign:
            del state_dict[key]
