"""What a plugin returns for a model that lies on several pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from booster.model.modules import PlacedModule, fast_path_off
from booster.plugin.pipeline.plan import PipelinePlan
from booster.plugin.pipeline.rehearsal import rehearse
from booster.plugin.pipeline.route import Route
from booster.plugin.pipeline.schedule import Runner, Shape, check_count
from booster.plugin.pipeline.tied_weights import TiedWeights
from booster.tensors.micro_batch import MicroBatch
from booster.tensors.trees import HALF_DTYPES, form, leaves, map_tensors


class StagePipeline(PlacedModule):
    """This rank's stages of a model. It is not called, but run over micro-batches by all ranks of the pipeline together.

    Parameters and state dict keys are those of the user's model that this rank has.

    plan: carried out by `cut`; its stages are on `device`, and sharded. group: the ranks of the pipeline, None for the whole
    world. boundary: from the shape of a tensor that crosses between stages in the model as it was planned to its shape as it
    is, for sequence parallelism. A collective over `group` where weights are tied across stages.
    """

    is_partial = True

    def __init__(
        self,
        plan: PipelinePlan,
        *,
        group: dist.ProcessGroup | None,
        device: torch.device,
        boundary: Callable[[Shape], Shape] | None = None,
    ) -> None:
        super().__init__(plan.model)
        plan.arm()
        self._plan = plan
        self._stages = tuple(plan.stages)
        self._rank = rank = plan.rank
        self._group = group
        self._device = device
        self._boundary = boundary
        self._mine = {stage.index: stage for stage in self._stages}
        self._runners: dict[bool, tuple[Any, tuple[Runner, Route]]] = {}
        self._copied: list[tuple[dict[str, Any], str, nn.Module, nn.Module]] = []  # see `_find_copied`
        self._loss_of = _Losses()
        own = self.own_parameters()
        ranks = {
            name: tuple(sorted({plan.ranks[stage] for _, stage in held}))
            for name, held in plan.holders.items()
            if len({plan.ranks[stage] for _, stage in held}) > 1
        }
        self._copies = {name: len(held) for name, held in ranks.items()}
        self._tied = TiedWeights(
            {name: param for name, param in own.items() if name in ranks}, ranks, rank=rank, group=group
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            "the model lies on several pipeline stages, and no rank can compute it alone; write "
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
        sends and receives between neighbours. Raises RuntimeError, on all ranks alike, for a forward that uses on one stage
        what lies on another.
        """
        backward = seed is not None
        check_count(self._plan.style, self._plan.pp_size, len(micro_batches))
        self._match_modes()
        with torch.set_grad_enabled(backward), nullcontext() if backward else fast_path_off():
            runner, route = self._runner(micro_batches, backward)
            ours = self._loss_of
            ours.criterion, ours.keep_outputs = criterion, return_outputs
            ours.factor = seed / len(micro_batches) if backward else None
            for stage in self._stages:
                stage.begin(route, micro_batches)
            try:
                with self._tied.summed() if backward else nullcontext():
                    runner.run()
                return ours.losses, ours.outputs
            finally:
                for stage in self._stages:
                    stage.finish()
                ours.clear()

    def share(self, loss: torch.Tensor | None, device: torch.device) -> torch.Tensor:
        """The 0-dim `loss` of the last stage, on every rank of the pipeline; a collective."""
        last = self._plan.ranks[-1]
        if self._rank != last or loss is None:
            value = torch.zeros((), dtype=torch.float32, device=device)
        else:
            value = loss.detach().float()
        source = dist.get_global_rank(self._group or dist.group.WORLD, last)  # type: ignore[arg-type]
        dist.broadcast(value, src=source, group=self._group)
        return value

    def own_parameters(self) -> dict[str, torch.Tensor]:
        """The parameters that this rank has, by their first names in the whole model.

        A tied weight whose first name is on another stage is listed by it, though `named_parameters` has another name.
        """
        own: dict[str, torch.Tensor] = {}
        for first, held in self._plan.holders.items():
            here = {
                id(param): param
                for name, stage in held
                if stage in self._mine
                for param in [self._mine[stage].module.get_parameter(name)]
            }
            if len(here) > 1:
                raise ValueError(
                    f"the weight {first} is tied across stages of one rank, {[name for name, _ in held]}, and sharding made "
                    "different tensors of it; untie it, or use a schedule with one stage on each rank"
                )
            own.update((first, param) for param in here.values())
        return own

    def num_copies(self, param: torch.Tensor) -> int:
        """On how many ranks of the pipeline `param`, one of this rank's, lies: 1 if it is not tied across ranks."""
        tied = self._tied.params
        return next((count for name, count in self._copies.items() if tied.get(name) is param), 1)

    def _runner(self, micro_batches: Sequence[MicroBatch], backward: bool) -> tuple[Runner, Route]:
        """The schedule for micro-batches of this shape, and their route; the last one of its kind is kept."""
        first = micro_batches[0]
        key = (len(micro_batches), *self._signature(first))
        if backward not in self._runners or self._runners[backward][0] != key:
            route = rehearse(self._plan.skeleton, self._plan.split, first.args, first.kwargs)
            runner = Runner(
                self._plan.style,
                self._stages,
                route,
                len(micro_batches),
                loss_of=self._loss_of,
                backward=backward,
                boundary=self._boundary,
                group=self._group,
                device=self._device,
            )
            self._runners[backward] = (key, (runner, route))
        return self._runners[backward][1]

    def _signature(self, micro_batch: MicroBatch) -> tuple[Any, ...]:
        """What shapes and dtypes between stages depend on."""
        call = (micro_batch.args, micro_batch.kwargs)
        described = tuple(
            (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else (type(leaf), repr(leaf))
            for leaf in leaves(call)
        )
        kind = self._device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return described, form(call), autocast, self.module.training

    def _match_modes(self) -> None:
        """Bring the copies of modules into the mode, training or evaluation, of the user's."""
        for place, name, module, _ in self._copied:
            if place.get(name) is not module:
                self._copied = []
                break
        if not self._copied:
            self._copied = list(self._find_copied())
        for _, _, module, copy in self._copied:
            if copy.training is not module.training:
                copy.training = module.training

    def _find_copied(self) -> Iterator[tuple[dict[str, Any], str, nn.Module, nn.Module]]:
        """Yield, for each copy of a module, where the user's stands, under which name, the user's, and the copy."""
        own = dict(self.module.named_modules())
        split = self._plan.split
        pairs = [(name, stage.module.get_submodule(name)) for stage in self._stages for name in split.ancestors()]
        for name, copy in (*pairs, *self._plan.skeleton.module.named_modules()):
            parent, _, child = name.rpartition(".")
            if name and name in own and parent in own:
                place, module = own[parent]._modules, own[name]
            else:
                place, child, module = self._modules, "module", self.module
            yield place, child, module, copy


class _Losses:
    """The loss of one micro-batch, as its backward starts from it; and what is kept of a run."""

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
