"""A plan of how a model is cut into stages, made while it is whole, and carried out once its parameters are placed."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from booster.model.modules import bare
from booster.plugin.pipeline.meta_model import MetaModel, Prepare, replace_parameter
from booster.plugin.pipeline.schedule_runner import check_style, stage_ranks
from booster.plugin.pipeline.split import Split, find_split, holders, owners, qualified
from booster.plugin.pipeline.stage import Stage, StageForward


class PipelinePlan:
    """How one model is cut. Make it with `plan_pipeline`, then `cut` once, then `StagePipeline(plan, ...)`.

    Attributes:
        ranks: by stage, the pipeline rank that runs it.
        split, owners, holders: where the cuts are, and what each stage has; see `split.py`.
        meta_model: the copy that takes the place of other stages' modules.
        stages: those of this rank, after `cut`.
        rank: this pipeline rank, after `cut`.
    """

    def __init__(
        self, model: nn.Module, split: Split, meta_model: MetaModel, *, style: str, pp_size: int, ranks: tuple[int, ...]
    ) -> None:
        self.model = model
        self.split = split
        self.meta_model = meta_model
        self.style, self.pp_size, self.ranks = style, pp_size, ranks
        self.owners = owners(model, split)
        self.holders = holders(model, split)
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
        if not self.stages:
            raise RuntimeError("call cut(rank) before Pipeline(plan, ...)")
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
    ranks = stage_ranks(style, pp_size, check_style(style, pp_size, num_model_chunks))
    split = find_split(model, len(ranks), split_points)
    meta_model = MetaModel(model, split, device=device, prepare=prepare)
    return PipelinePlan(model, split, meta_model, style=style, pp_size=pp_size, ranks=ranks)


def _call_by_pipeline(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("the model is on several pipeline stages; run it by b.execute_pipeline(...)")
