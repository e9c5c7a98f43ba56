"""Cutting a model: a plan made while it is whole, and carried out when its parameters are where they belong."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from booster.model.modules import bare
from booster.plugin.pipeline.schedule import check_style, stage_ranks
from booster.plugin.pipeline.skeleton import Prepare, Skeleton, replace_parameter
from booster.plugin.pipeline.split import find_split, holders, owners, qualified
from booster.plugin.pipeline.stage import InStage, Stage


class PipelinePlan:
    """How one model is cut. Make it with `plan_pipeline`, then `cut` once, then `StagePipeline(plan, ...)`."""

    def __init__(
        self,
        model: nn.Module,
        *,
        pp_size: int,
        style: str,
        num_model_chunks: int,
        split_points: Sequence[str] | None,
        device: torch.device | None,
        prepare: Prepare | None,
    ) -> None:
        self.model = model
        self.style = style
        self.pp_size = pp_size
        self.ranks = stage_ranks(style, pp_size, num_model_chunks)
        self.split = find_split(model, len(self.ranks), split_points)
        self.owners = owners(model, self.split)
        self.holders = holders(model, self.split)
        self.skeleton = Skeleton(model, self.split, device=device, prepare=prepare)
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
        if not mine:
            raise ValueError(f"rank={rank} has no stage; ranks of this pipeline are 0 to {self.pp_size - 1}")
        self.stages = [Stage(index, self.split, self.skeleton) for index in mine]
        copies = [self._copy() for _ in mine] if len(mine) > 1 else [self.model]
        originals = {name: self.model.get_submodule(name) for name in self.split.ancestors()}
        for stage, module in zip(self.stages, copies, strict=True):
            self._keep(module, {stage.index}, stage)
            if module is not self.model:
                for name, original in originals.items():
                    module.get_submodule(name)._buffers = original._buffers
                    if stage.index == 0:
                        module.get_submodule(name)._parameters = original._parameters
            stage.module = module
            module.__dict__["forward"] = InStage(stage, module.forward)
        if len(mine) > 1:
            self._keep(self.model, set(mine), self.stages[0])
            # It names what the rank has; its stages are called one by one.
            self.model.__dict__["forward"] = _call_by_pipeline
        return copies

    def arm(self) -> None:
        """Let the stages that `cut` made take what they receive; call it when they are sharded."""
        if not self.stages:
            raise RuntimeError("call cut(rank) before Pipeline(plan, ...)")
        container = self.split.container
        for stage in self.stages:
            for position, name in enumerate(self.split.children):
                full = self.split.name_of(position)
                if full in self.owners and self.split.stage_of(position) == stage.index:
                    stage.arm(position, stage.module.get_submodule(qualified(container, name)))
            for module in stage.module.modules() if self.style == "zbv" else ():
                if isinstance(module, FSDPModule):
                    # Gradients of weights are asked for by the parameters that are there before backward gathers any.
                    module.set_reshard_after_forward(False, recurse=False)

    def _copy(self) -> nn.Module:
        """The modules around the blocks anew, with everything else shared."""
        shared: dict[int, Any] = {}
        for ancestor in self.split.ancestors():
            module = self.model.get_submodule(ancestor)
            for child in module._modules.values():
                if child is not None:
                    shared[id(child)] = child
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                shared[id(tensor)] = tensor
        for ancestor in self.split.ancestors():
            shared.pop(id(self.model.get_submodule(ancestor)), None)
        return copy.deepcopy(self.model, shared)

    def _keep(self, model: nn.Module, stages: set[int], stage: Stage) -> None:
        """Put the skeleton's modules in the places of those that belong to none of `stages`; for `stage`, see `_foreign`."""
        for name, owner in self.owners.items():
            if owner not in stages:
                parent, _, child = name.rpartition(".")
                model.get_submodule(parent)._modules[child] = self._foreign(name, stage)
        if 0 in stages:
            return
        for ancestor in self.split.ancestors():
            module, hollow = model.get_submodule(ancestor), self.skeleton.module.get_submodule(ancestor)
            for name in [name for name, param in module._parameters.items() if param is not None]:
                replace_parameter(module, name, getattr(hollow, name))

    def _foreign(self, name: str, stage: Stage) -> nn.Module:
        """The stand-in for the module `name`: its skeleton, and for blocks one that knows of `stage`."""
        module = self.skeleton.module.get_submodule(name)
        parent, _, child = name.rpartition(".")
        if parent == self.split.container and child in self.split.children:
            module = copy.copy(module)
            module.__dict__["forward"] = InStage(stage, position=self.split.children.index(child))
        return module


def plan_pipeline(
    model: nn.Module,
    *,
    pp_size: int,
    style: str = "1f1b",
    num_model_chunks: int = 1,
    split_points: Sequence[str] | None = None,
    device: torch.device | None = None,
    prepare: Prepare | None = None,
) -> PipelinePlan:
    """Plan how `model`, which is whole and unsharded, is cut for `pp_size` ranks; changes nothing.

    style: "gpipe", "1f1b", "interleaved" or "zbv". num_model_chunks: stages on each rank, with "interleaved"; "zbv" has 2.
    split_points: see `find_split`. device: where the stages will run, if the model is elsewhere yet. prepare: a function of
    a model on the meta device that edits it, in place or not, as the dtypes of the stages will be, and returns it.

    Raises ValueError for a model that does not divide so, cannot be copied or is compiled as a whole.
    """
    if "_orig_mod" in model._modules:
        raise ValueError(
            f"the {type(bare(model)).__name__} is compiled as a whole, and a graph cannot be cut into pipeline stages; compile "
            "its blocks instead: for block in model.blocks: block.compile()"
        )
    chunks = check_style(style, pp_size, num_model_chunks)
    return PipelinePlan(
        model,
        pp_size=pp_size,
        style=style,
        num_model_chunks=chunks,
        split_points=split_points,
        device=device,
        prepare=prepare,
    )


def _call_by_pipeline(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("the model lies on several pipeline stages; run it by b.execute_pipeline(...)")
