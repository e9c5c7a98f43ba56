"""The interface of plugins, the plugin of a single device, and device meshes that plugins share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, Sampler

from booster.data import prepare_dataloader
from booster.launch import environment_world_size
from booster.mixed_precision.policy import DtypePolicy, cast_parameters
from booster.model.modules import materialise_on
from booster.ranks.agreement import rank_in, size_of
from booster.shards import Shards
from booster.tensors.trees import MicroBatch

if TYPE_CHECKING:
    from booster.plugin.sequence_parallel import SequenceParallel


def check_joined(plugin: str) -> None:
    """Raise RuntimeError in a launched job of several processes that has no process group yet. plugin: its class's name."""
    if not dist.is_initialized() and environment_world_size() > 1:
        raise RuntimeError(
            f"this job was launched with WORLD_SIZE={environment_world_size()}, but there is no process group, so every "
            f"process would train alone; call booster.launch_from_torch() before {plugin}()"
        )


class Pipeline(Protocol):
    """Runs a model with layers on several ranks, all of which call it with the same micro-batches.

    A Protocol, so that who runs or writes a plugin imports no schedule: `booster.plugin.pipeline`, the one implementation here,
    imports torch's.
    """

    def run(
        self,
        micro_batches: Sequence[MicroBatch],
        criterion: Callable[[Any, Any], torch.Tensor],
        *,
        seed: Any,
        return_outputs: bool = True,
    ) -> tuple[list[torch.Tensor], list[Any]]:
        """Return (losses, outputs) of `micro_batches`, detached, on the rank of the last stage, elsewhere two empty lists.

        criterion: a function of output and target.
        seed: what the gradient of the mean loss is multiplied with, a float or 0-dim tensor; None runs no backward.
        return_outputs: False keeps no outputs.
        """

    def share(self, loss: torch.Tensor | None, device: torch.device) -> torch.Tensor:
        """Return the 0-dim `loss` of the last stage, on `device`, on every rank of the pipeline; a collective."""


class Plugin(ABC):
    """A parallelism: where modules live, which ranks share the batch, and when gradients are synchronised.

    A plugin knows a precision only as a `DtypePolicy`; a precision knows a plugin only as a
    `booster.mixed_precision.Placement`, which every plugin is. To write one, override `place`, which ends in `cast_parameters`
    or `install_keep_fp32`, honours or refuses every field of the policy, and keeps the names of parameters; where there is more
    than one rank, also `group`, `synchronise`, `no_sync` and the data-parallel coordinates. A module around the user's own is a
    `booster.plugin.PlacedModule`. `examples/extending/plugin.py` is a whole plugin.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Plugin:
        # Here and not in __init__, which subclasses define without **kwargs: the text of Python would name no way out.
        wrong = {"precision", "mixed_precision", "fp16", "bf16", "amp"} & kwargs.keys()
        if wrong:
            raise TypeError(
                f"{cls.__name__} got {sorted(wrong)}: precision belongs to Booster alone; write "
                f"Booster(mixed_precision=..., plugin={cls.__name__}(...))"
            )
        return super().__new__(cls)

    @abstractmethod
    def place(self, module: nn.Module, policy: DtypePolicy, device: torch.device) -> nn.Module:
        """Put `module` on `device` in the dtypes of `policy` and return what is to be called; may run collectives."""

    @property
    def fixed_dtypes(self) -> str | None:
        """Return why everything placed here keeps its dtypes, in the words after "because"; None: see `switch_refusal`."""
        return None

    def switch_refusal(self, placed: nn.Module, before: DtypePolicy, after: DtypePolicy) -> str | None:
        """Return why `place_again` cannot be called so, in the words after "because"; None: it can.

        placed: what `place` made; during this call its tensors are proxies of the dtypes that they had then.
        before: the policy that it was placed under.
        after: the one that it is to have. Nothing is changed, and no collective runs.
        """
        return f"{type(self).__name__} does not say how a model that it placed gets other dtypes"

    def place_again(
        self, placed: nn.Module, before: DtypePolicy, after: DtypePolicy, device: torch.device
    ) -> nn.Module:
        """Give `placed`, which `place` made under the policy `before`, the dtypes of `after`; return what is to be called.

        device: where it is, and stays.

        Unsharded weights have the dtypes and values that `place` would get, and no module keeps itself in float32. Parameters
        of the model may be other objects afterwards, as after `place`. May run collectives.
        """
        raise NotImplementedError(f"{type(self).__name__} says in switch_refusal that it places nothing again")

    is_whole = True
    """Whether every rank holds and steps all of every parameter."""

    passes_together = False
    """Whether passes inside `no_sync` too need all ranks, so that ranks accumulate equal numbers of micro-batches."""

    stores_float32 = False
    """Whether placed parameters stay in their dtype where `policy.store` is None, as shards that serve as masters do."""

    @property
    def bucket_cap_mb(self) -> float:
        """Return of how many MiB the buckets are in which gradients are averaged, where there are any."""
        return 25

    @property
    def release_refusal(self) -> str | None:
        """Return why gradients cannot be stepped within backward here, as release_gradients asks; None: they can."""
        return f"{type(self).__name__} does not say when a gradient is complete on all ranks"

    @property
    def divides_as(self) -> str | None:
        """Return the name under which `booster.memory` knows what a rank holds here; None: it does not know."""
        return None

    def make_shards(self, optimizer: Optimizer) -> Shards:
        """Return what this rank holds and steps of the parameters of `optimizer`, which are those of a placed module."""
        return Shards(optimizer)

    def error_feedback(self, module: nn.Module) -> dict[torch.Tensor, torch.Tensor] | None:
        """Return what this rank alone keeps from step to step for the placed `module`, by parameter; None if never anything."""
        # The plugin's own tensors: checkpoints hold them, and loading one writes to them.
        return None

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raise ValueError if `optimizer` cannot step what a rank holds of its parameters. Before anything is placed."""

    def synchronise(self, module: nn.Module) -> None:
        """Give `module` the parameters and buffers that all ranks are to start from, before a precision casts them; may
        run collectives. `place` sees to it again, in the dtypes of the policy."""

    def check_device(self, device: torch.device) -> None:
        """Raise ValueError if this plugin cannot run on `device`."""

    def bind(self, device: torch.device) -> None:
        """Prepare to run on `device`; `Booster` calls it. May run collectives. Raises as `check_device`."""
        self.check_device(device)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Return the ranks that must skip a step together; None means no collective."""
        return None

    @property
    def data_parallel_group(self) -> dist.ProcessGroup | None:
        """Return the ranks that see different data."""
        return self.group

    ep_size = 1
    """To how many ranks whole experts are dealt."""

    sequence_parallel: SequenceParallel | None = None  # no property, because every backward pass asks
    """What divides sequences among ranks; None where each rank has whole ones."""

    @property
    def averaging_group(self) -> dist.ProcessGroup | None:
        """Return the ranks over which gradients are averaged: those that see different data, or other tokens of it."""
        return self.data_parallel_group

    @property
    def averaging_size(self) -> int:
        """Return over how many ranks gradients are averaged."""
        return self.data_parallel_size * (1 if self.sequence_parallel is None else self.sequence_parallel.size)

    @property
    def data_parallel_rank(self) -> int:
        """Return this rank's place among those that see different data."""
        return rank_in(self.data_parallel_group)

    @property
    def data_parallel_size(self) -> int:
        """Return how many ranks see different data."""
        return size_of(self.data_parallel_group)

    def num_micro_batches(self, batch_size: int) -> int:
        """Return how many micro-batches `execute_pipeline` makes of a batch of `batch_size` samples."""
        return 1

    def pipeline(self, module: nn.Module) -> Pipeline | None:
        """Return what runs the placed `module` if its layers are on several ranks; None if one rank can call it."""
        return None

    def no_sync(self, module: nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which forward and backward of the placed `module` leave gradients unsynchronised."""
        return nullcontext()

    def shard_sequence(self, batch: Any, **options: Any) -> Any:
        """Return this rank's part of `batch`, as `Booster.shard_sequence` does.

        options: all of that function, which checks them.
        """
        from booster.plugin.sequence_parallel import shard_batch

        if self.sequence_parallel is not None:
            return self.sequence_parallel.shard(batch, **options)
        if options["documents"] is not None:
            raise ValueError(
                f"documents are kept apart by ranks that share sequences, and under {type(self).__name__} none do; give the "
                "model a mask, or position ids that begin anew"
            )
        alone: dict[str, Any] = {"size": 1, "rank": 0, "zigzag": False, "averaging_group": self.averaging_group}
        return shard_batch(batch, **alone, **options)[0]

    def token_mean(self, losses: torch.Tensor, counted: torch.Tensor | float | None) -> torch.Tensor:
        """Return the mean of `losses` over the tokens of all ranks, as `Booster.token_mean` does; a small collective.

        counted: which tokens count, or how many do; None counts all.
        """
        from booster.plugin.sequence_parallel import token_mean

        if self.sequence_parallel is not None:
            return self.sequence_parallel.token_mean(losses, counted)
        return token_mean(losses, counted, self.averaging_group)

    def prepare_dataloader(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        shuffle: bool = False,
        seed: int = 1024,
        drop_last: bool = False,
        pin_memory: bool = False,
        num_workers: int = 0,
        distributed_sampler_cls: type[Sampler[Any]] | None = None,
        **dataloader_options: Any,
    ) -> DataLoader[Any]:
        """Make a DataLoader over this rank's share of `dataset`.

        dataset: with a length, or an `IterableDataset`, which deals to ranks by itself.
        batch_size: samples of one rank in a step.
        shuffle: draw the order of each epoch anew.
        seed: of the shuffling, the same on all ranks, and of the workers, which differ.
        drop_last: drop the tail that does not fill a batch, or does not divide among ranks; without it the sampler repeats
            samples to divide.
        pin_memory: batches in pinned host memory, from which copies to a GPU do not wait.
        num_workers: processes that read; 0 reads in this one.
        distributed_sampler_cls: the sampler that deals to several ranks; None is torch's DistributedSampler.
        dataloader_options: any other argument of `torch.utils.data.DataLoader`.
        """
        return prepare_dataloader(
            dataset,
            batch_size,
            rank=self.data_parallel_rank,
            world_size=self.data_parallel_size,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            pin_memory=pin_memory,
            num_workers=num_workers,
            distributed_sampler_cls=distributed_sampler_cls,
            **dataloader_options,
        )


class SingleDevice(Plugin):
    """No parallelism: every process trains its own model."""

    divides_as = "single"
    release_refusal = None

    def place(self, module: nn.Module, policy: DtypePolicy, device: torch.device) -> nn.Module:
        return cast_parameters(materialise_on(module, device), policy)

    def switch_refusal(self, placed: nn.Module, before: DtypePolicy, after: DtypePolicy) -> None:
        return None

    def place_again(
        self, placed: nn.Module, before: DtypePolicy, after: DtypePolicy, device: torch.device
    ) -> nn.Module:
        return self.place(placed, after, device)


# A memo: the same job and arguments give the same mesh. Of the present world only, so that an ended one is freed.
_meshes: dict[tuple[str, tuple[tuple[str, int], ...]], tuple[dist.ProcessGroup, DeviceMesh]] = {}


def shared_mesh(device_type: str, sizes: dict[str, int]) -> DeviceMesh:
    """Return the mesh over the world with dimensions of these names and sizes; a collective when it is made."""
    world = dist.group.WORLD
    if world is None:
        raise RuntimeError("a device mesh needs a process group, and there is none")
    # Meshes of a world that was destroyed and made anew cannot be used again.
    for key in [key for key, (other, _) in _meshes.items() if other is not world]:
        del _meshes[key]
    key = (device_type, tuple(sizes.items()))
    # Process groups of `init_device_mesh` are never closed, because parameters and running kernels that use them may outlive
    # the caller.
    if key not in _meshes:
        # In gloo each costs three threads and four descriptors.
        mesh = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        _meshes[key] = (world, mesh)
    return _meshes[key][1]
