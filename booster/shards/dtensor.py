"""Shards of DTensor parameters, as `fully_shard` and tensor parallelism make them: their local tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.optim import Optimizer

from booster.common.arguments import listed
from booster.common.torch_internals.tensor_internals import gather_full, local_tensor, local_tensors, placed_differently
from booster.model.optimizers import check_attributes, granularity_of, info_of, not_elementwise
from booster.model.params import dtensor_around
from booster.ranks.agreement import all_names, extremes, size_of
from booster.shards.base import Entries, ShardedStateView, Shards, ShardStates, State
from booster.shards.replicated import ReplicaCheck, trained
from booster.tensors.trees import HALF_DTYPES

_GRAD = attrgetter("grad")
_SECOND = itemgetter(1)
# Relative, of float32 and half gradients: the same sums in another order at most.
_TOLERANCE = {False: 1e-3, True: 5e-2}
_NOT_FINITE = "not finite"
_COMPARISONS = 3  # steps in which gradients of whole parameters are compared among the ranks that divide layers
PARTIAL = (
    "the gradient of {names}, which each rank of tensor parallelism has whole, differs among these ranks: each has the terms "
    "of its heads or features alone, so that ranks would drift apart. In tp_plan give a module that reads what a "
    "column-wise layer returns, as a norm of every head, 'replicated_with_grad_allreduce', and one with an output that each "
    "rank reads for its own heads, as keys that all heads share, 'replicated_with_output_grad_allreduce'"
)


class DTensorShards(Shards):
    """The local tensors of DTensor parameters; plain parameters are their own shards.

    Elementwise optimizers step local tensors: fused kernels have no DTensor rule for some optimizers, and groups may mix
    plain and DTensor parameters. Those that need whole tensors step the DTensors, with torch's error where unsupported.

    Arguments:
        group: the ranks that step together.
        num_stages: into how many pipeline stages they are divided.
        num_holders: on how many stages a parameter is.
        layer_ranks: the ranks of tensor parallelism, which divide layers among them; None: no rank does.
        replica_group: the ranks that hold the same shard of each parameter; None: no others do.

    Raises ValueError for an optimizer that is known as neither.
    """

    sharded = True

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        group: dist.ProcessGroup | None,
        num_stages: int = 1,
        num_holders: Callable[[torch.Tensor], int] = lambda param: 1,
        layer_ranks: dist.ProcessGroup | None = None,
        replica_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(optimizer)
        self._group, self._layer_ranks, self._same = group, layer_ranks, replica_group
        self.replica_check = None if group is None else ReplicaCheck()
        self._comparisons_left = 0 if layer_ranks is None else _COMPARISONS
        self._steps_shards = check_steps_shards(optimizer)
        self._ranks_of_stage = size_of(group) // num_stages
        self._num_holders = num_holders
        self._num_replicas: dict[torch.Tensor, int] = {}
        self._inside = False
        self._shard_states()

    @contextmanager
    def local(self) -> Iterator[None]:
        if self._inside:
            yield
            return
        lists: list[list[Any]] = list(map(itemgetter("params"), self.optimizer.param_groups))
        before = list(map(list, lists))
        add_up_terms(chain.from_iterable(lists))
        given: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = []
        # Optimizers that need whole tensors step the DTensors themselves.
        if self._steps_shards:
            for params in lists:
                self._lay_out(params, given)
        addresses = list(map(torch.Tensor.data_ptr, map(_SECOND, given)))
        self._inside = True
        try:
            yield
        finally:
            self._inside = False
            for params, own in zip(lists, before, strict=True):
                params[:] = own
            for param, shard, grad in given:
                if shard.grad is not grad:
                    param.grad = None if shard.grad is None else dtensor_around(shard.grad, param)
                shard.grad = None
            for shard, address in zip(map(_SECOND, given), addresses, strict=True):
                if shard.data_ptr() != address:  # by `shard.data = ...`
                    self._copy_replaced_data(shard)

    @torch.no_grad()
    def _copy_replaced_data(self, shard: torch.Tensor) -> None:
        own = local_tensor(self.by_shard[shard]).detach()
        own.copy_(shard)
        shard.data = own

    def replicated_params(self) -> list[tuple[dist.ProcessGroup, list[torch.Tensor]]]:
        trained_params = trained(self.optimizer)
        params = [param for param in trained_params if "ep" not in _dims(param)]
        kinds = (
            (self._same, params),
            (self._layer_ranks, list(filter(_is_whole, trained_params))),
            *_copies(trained_params),
        )
        first = [] if self._group is None else [(self._group, list[torch.Tensor]())]
        return first + [(ranks, own) for ranks, own in kinds if ranks is not None]

    def check_gradients(self) -> None:
        if self._comparisons_left:
            self._compare_unsharded()

    def _compare_unsharded(self) -> None:
        """Raise RuntimeError, on all ranks, if gradients of parameters that no rank divides differ among those that divide
        layers."""
        differing = all_names(self._differing(), self._group)
        if _NOT_FINITE in differing:
            return  # of a step that is skipped, most likely
        # A plan that is wrong shows in the first passes; a comparison in each would cost a collective.
        self._comparisons_left -= 1
        if differing:
            raise RuntimeError(PARTIAL.format(names=listed(differing, 5)))

    def _differing(self) -> tuple[str, ...]:
        whole = [param for param in self.held_params() if "tp" not in _dims(param)]
        if not whole or self._layer_ranks is None:
            return ()
        apart = differing([param.grad for param in whole], whole, self._layer_ranks)
        if apart is None:
            return (_NOT_FINITE,)
        return tuple(self.name_of(param) for param, differs in zip(whole, apart, strict=True) if differs)

    def _lay_out(self, params: list[Any], given: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]) -> None:
        """Put shards in the places of DTensors in `params`, each with its gradient, and add them to `given`."""
        places = [index for index, param in enumerate(params) if isinstance(param, DTensor)]
        divided = [params[index] for index in places]
        graphless = [param for param in divided if param.grad is not None and not param.grad.requires_grad]
        grads = dict(zip(map(id, graphless), local_tensors(list(map(_GRAD, graphless))), strict=True))
        for index, param, local in zip(places, divided, local_tensors(divided), strict=True):
            shard: Any = self.by_param.get(param)
            is_current = shard is not None and shard.data_ptr() == local.data_ptr() and shard.shape == local.shape
            if not is_current or shard.requires_grad != param.requires_grad:
                shard = self.shard_of(param)
            grad = grads.get(id(param))
            shard.grad = _own_gradient(param) if grad is None and param.grad is not None else grad
            params[index] = shard
            given.append((param, shard, shard.grad))

    @contextmanager
    def local_shards(self, params: Sequence[torch.Tensor]) -> Iterator[Sequence[torch.Tensor]]:
        add_up_terms(params)
        shards, given = list(params), list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]()
        if self._steps_shards:
            self._lay_out(shards, given)
        try:
            yield shards
        finally:
            for _, shard, _ in given:
                shard.grad = None

    def shard_of(self, param: torch.Tensor) -> torch.Tensor:
        if not (self._steps_shards and isinstance(param, DTensor)):
            return param
        local = local_tensor(param)
        shard = self.by_param.get(param)
        if shard is None:
            shard = self.by_param[param] = nn.Parameter(local.detach(), requires_grad=param.requires_grad)
            self.by_shard[shard] = param
        elif shard.data_ptr() != local.data_ptr() or shard.shape != local.shape:
            shard.data = local.detach()
        if shard.requires_grad != param.requires_grad:
            shard.requires_grad_(param.requires_grad)
        return shard

    def param_of(self, shard: torch.Tensor) -> torch.Tensor:
        return self.by_shard.get(shard, shard)

    def num_replicas(self, shards: Sequence[torch.Tensor]) -> list[int]:
        for shard in set(shards).difference(self._num_replicas):
            param = self.by_shard.get(shard, shard)
            parts = 1
            if isinstance(param, DTensor):
                for size, placement in zip(param.device_mesh.shape, param.placements, strict=True):
                    # A dimension of the mesh that does not shard the parameter replicates it.
                    parts *= 1 if isinstance(placement, Replicate) else size
            self._num_replicas[shard] = self._ranks_of_stage * self._num_holders(param) // parts
        return list(map(self._num_replicas.__getitem__, shards))

    def local_slice(self, value: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
        placed = self.distribute(value, param)
        return placed.to_local() if self._steps_shards and isinstance(placed, DTensor) else placed

    def needs_collective(self, value: torch.Tensor, param: torch.Tensor) -> bool:
        if not isinstance(value, DTensor):
            return False
        if not isinstance(param, DTensor):
            return True
        check_own(value, param)
        return (value.device_mesh, value.placements) != (param.device_mesh, param.placements)

    def distribute(self, value: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
        if not isinstance(param, DTensor):
            return gather_full(value) if isinstance(value, DTensor) else value
        mesh, placements = param.device_mesh, param.placements
        check_own(value, param)
        if isinstance(value, DTensor) and (value.device_mesh, value.placements) != (mesh, placements):
            value = gather_full(value)
        if not isinstance(value, DTensor):
            # Every rank has the whole: no communication.
            value = distribute_tensor(value.to(param.device), mesh, placements, src_data_rank=None)
        return value

    # ------------------------------------------------------------------ checkpoints

    @property
    def states(self) -> DTensorStates:
        return DTensorStates(self)

    def _shard_states(self) -> None:
        """Divide what the optimizer knows of whole parameters, from steps that it made before they were placed."""
        state, states = self.optimizer.state, self.states
        for param in self.held_params():
            if isinstance(param, DTensor) and param in state:
                own = {key: _at_least_as_wide(value, param) for key, value in state.pop(param).items()}
                state[self.shard_of(param)] = {key: states.shard_entry(value, param) for key, value in own.items()}


class DTensorStates(ShardStates):
    """Of local tensors of DTensors: whole entries are DTensors as the parameter is."""

    def view_state(self, state: Mapping[Any, State]) -> Mapping[Any, State]:
        def shown(param: torch.Tensor, shard: torch.Tensor, own: State) -> State:
            return {key: self._full_entry(value, param) for key, value in own.items()}

        return ShardedStateView(state, self.by_param, self.by_shard, shown)

    def full(self, entries: Entries, params: Mapping[Any, torch.Tensor]) -> Entries:
        return {
            key: {name: self._full_entry(value, params[key]) for name, value in own.items()}
            for key, own in entries.items()
        }

    def local(self, entries: Entries, params: Mapping[Any, torch.Tensor]) -> Entries:
        return {
            key: {name: self.shard_entry(value, params.get(key)) for name, value in own.items()}
            for key, own in entries.items()
        }

    def full_masters(self, masters: dict[torch.Tensor, torch.Tensor]) -> dict[torch.Tensor, torch.Tensor]:
        params = {shard: self.by_shard.get(shard, shard) for shard in masters}
        return {params[shard]: self._full_entry(value, params[shard]) for shard, value in masters.items()}

    def move_states_from(self, before: Any, replaced: Mapping[torch.Tensor, torch.Tensor]) -> None:
        state = self.shards.optimizer.state
        for param, shard in before.states.by_param.items() if isinstance(before.states, DTensorStates) else ():
            if shard in state:
                state[self.shards.shard_of(replaced.get(param, param))] = state.pop(shard)

    def _full_entry(self, value: Any, param: torch.Tensor) -> Any:
        shard = self.by_param.get(param)
        if shard is None or not isinstance(value, torch.Tensor) or isinstance(value, DTensor) or value.dim() == 0:
            return value
        if value.shape != shard.shape:
            return value
        # A view into a bucket of states would drag the bucket along, and torch.save refuses a DTensor of one.
        return dtensor_around(value.clone() if value.storage_offset() else value, param)

    def shard_entry(self, value: Any, param: torch.Tensor | None) -> Any:
        if param is None or not isinstance(value, torch.Tensor) or value.shape != param.shape or value.dim() == 0:
            return value
        return self.shards.local_slice(value, param)


def check_steps_shards(optimizer: Optimizer) -> bool:
    """Return whether `optimizer` is stepped on local tensors, or on DTensors; raise ValueError if it can be on neither."""
    kind, name = granularity_of(optimizer), type(optimizer).__name__
    if kind == "whole":
        otherwise = "use a plugin that keeps parameters whole, such as TorchDDPPlugin"
        raise ValueError(not_elementwise(optimizer, "would be stepped on shards of the parameters", otherwise))
    if kind == "per tensor" and not info_of(optimizer).takes_dtensors:
        raise ValueError(
            f"{name} looks at whole tensors, and torch cannot run its step on the DTensors of sharded parameters; use "
            "LowLevelZeroPlugin(), which deals whole tensors to the ranks, or TorchDDPPlugin()"
        )
    params = (param for group in optimizer.param_groups for param in group["params"])
    check_attributes(optimizer, params, "would be stepped on shards of the parameters")
    return kind == "elementwise"


def check_own(value: Any, param: DTensor) -> None:
    """Raise ValueError if `value` is a shard that another rank saved: it does not say so when it is loaded."""
    if not isinstance(value, DTensor) or value.device_mesh != param.device_mesh:
        return
    saved, own = value.device_mesh.get_coordinate(), param.device_mesh.get_coordinate()
    if saved != own:
        raise ValueError(
            f"this state holds the part of a tensor of shape {tuple(value.shape)} of the rank at {saved} of the device "
            f"mesh, and this rank is at {own}: it was saved on another rank. Save on every rank, in a file each, or make "
            "tensors whole with full_tensor() before saving on one"
        )


def _dims(param: Any) -> tuple[str, ...]:
    return (param.device_mesh.mesh_dim_names or ()) if isinstance(param, DTensor) else ()


def _copies(params: Iterable[Any]) -> list[tuple[dist.ProcessGroup, list[torch.Tensor]]]:
    """Return those of `params` that are dealt out as whole experts, with the ranks that hold the same: not those of others."""
    dealt = [param for param in params if "ep" in _dims(param) and "replicate" in _dims(param)]
    ranks = [param.device_mesh["replicate"].get_group() for param in dealt[:1]]
    return [(each, dealt) for each in ranks if each.size() > 1]


def _is_whole(param: Any) -> bool:
    """Return whether ranks that divide layers hold the same of `param`."""
    names = _dims(param)
    return "tp" not in names or isinstance(param.placements[names.index("tp")], Replicate)


@torch.no_grad()
def differing(
    grads: Sequence[torch.Tensor | None], params: Sequence[torch.Tensor], ranks: dist.ProcessGroup
) -> list[bool] | None:
    """Return of each of `grads` whether it differs among `ranks` by more than sums in another order do; a collective.

    None where one is not finite. params: of the gradients, or what has their size and dtype.
    """
    missing = torch.tensor([-1.0, 0.0], dtype=torch.float64)
    digests = torch.stack([missing if grad is None else _digest(grad).cpu() for grad in grads])
    digests = digests.where(digests.isfinite(), torch.inf)  # a maximum may lose a NaN
    least, most = (each.cpu() for each in extremes(digests, ranks))
    if not (most.isfinite().all() and least.isfinite().all()):
        return None
    norms = most[:, 0].clamp(min=0.0)
    wide = torch.tensor([_TOLERANCE[param.dtype in HALF_DTYPES] for param in params], dtype=torch.float64)
    counts = torch.tensor([float(max(param.numel(), 1)) for param in params], dtype=torch.float64).sqrt()
    # Small tensors get a share of the largest norm.
    allowed = wide[:, None] * torch.stack([norms, norms * counts], dim=1) + 1e-6 * norms.max()
    return ((most - least) > allowed).any(dim=1).tolist()


def _digest(grad: torch.Tensor) -> torch.Tensor:
    """Return norm and sum of what this rank has of `grad`, float64."""
    own = (local_tensor(grad) if isinstance(grad, DTensor) else grad).double()
    own = own.coalesce().values() if own.is_sparse else own
    return torch.stack([own.norm(), own.sum()])


def add_up_terms(params: Iterable[Any]) -> None:
    """Add up gradients of which ranks hold the terms, as those of sequence-parallel norms; those of other `params` stay.

    A collective of the ranks that share the terms, if there are any.
    """
    terms: dict[tuple[Any, torch.dtype, torch.device], list[Any]] = {}
    held = []
    for param in params:
        if isinstance(param, DTensor) and param.grad is not None:
            held.append(param)
    unlike: list[Any] = placed_differently(held)
    for param in unlike:
        grad = param.grad
        plain = grad.device_mesh.ndim == 1 and not grad.requires_grad  # a graph goes through no collective of c10d
        if plain and grad.placements[0] == Partial() and param.placements[0] == Replicate():
            terms.setdefault((grad.device_mesh, grad.dtype, grad.device), []).append(param)
        else:
            param.grad = grad.redistribute(param.device_mesh, param.placements)
    for (mesh, dtype, _), several in terms.items():
        local = [param.grad.to_local() for param in several]
        # Float32, so that a sum of half gradients is rounded once; in one tensor, so that it is one all-reduce.
        wide = torch.float32 if dtype in HALF_DTYPES else dtype
        total = torch.cat([each.flatten().to(wide) for each in local])
        dist.all_reduce(total, group=mesh.get_group())
        sums = total.to(dtype).split([each.numel() for each in local])
        for param, each in zip(several, sums, strict=True):
            param.grad = dtensor_around(each.view(param.to_local().shape), param)


def _own_gradient(param: Any) -> torch.Tensor | None:
    grad = param.grad
    if grad is None or not grad.requires_grad:
        return None if grad is None else local_tensor(grad)
    return grad.to_local()  # part of a graph, as a penalty on gradients wants them


def _at_least_as_wide(value: Any, param: torch.Tensor) -> Any:
    """Return `value`, widened where its parameter was placed in a wider dtype, as a shard that is a master is."""
    if not isinstance(value, torch.Tensor) or value.shape != param.shape or not value.is_floating_point():
        return value
    return value.to(param.dtype) if value.dtype.itemsize < param.dtype.itemsize else value
