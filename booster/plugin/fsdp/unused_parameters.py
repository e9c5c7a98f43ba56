"""Parameters of a sharded model that some ranks use in a pass and others do not."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from operator import add, attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from booster.common.arguments import listed
from booster.common.torch_internals.autograd_internals import graph_task, when_backward_ends, without_function_modes
from booster.common.torch_internals.fsdp_internals import (
    FROZEN,
    HAS,
    LACKS,
    fsdp_groups,
    has_hooks,
    name_of,
    reduces,
    registered_group,
    skip_backward_end,
    unreduced,
    zero_unreduced,
)
from booster.plugin.fsdp.forward_hooks import ForwardWrites
from booster.tensors.trees import tensors

# First forward passes, in which ranks compare the order in which they gather, and a GPU is asked what they reduce.
_COMPARED = 4
_PLACE = attrgetter("place")
_FROM_255 = bytes(range(255, -1, -1))  # by a number n: 255 - n
_FROZEN = (
    "requires_grad of {names} is True on some ranks and was set so after the first steps, and is False on others, so that "
    "gradients of different parameters were added to each other. Freeze and unfreeze on all ranks alike"
)


class _Group:
    """Parameters that are gathered and reduced together.

    Attributes:
        own: torch's record of the group.
        first: the place of its first parameter among all.
        called: in a forward pass since gradients were last reduced.
        place: in the order in which groups are reduced in this pass, from 1 to 254; 0: not reduced yet.
    """

    own: Any = None
    first = 0

    def __init__(self, owner: UnusedParameters, index: int, name: str) -> None:
        self.index, self.name = index, name
        self.called, self.place = False, 0
        self._owner = owner

    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """After torch's own hook, which gathers, and puts a node at the inputs that reduces when backward reaches it."""
        if torch.is_grad_enabled():
            self.called = True
            with without_function_modes():
                simple = not kwargs and all(map(torch.is_tensor, args))
                for tensor in args if simple else tensors((args, kwargs)):
                    if tensor.grad_fn is not None and registered_group(tensor) is self.own:
                        tensor.register_hook(self._before_reduction)  # called before the node
                        return

    def _before_reduction(self, grad: torch.Tensor) -> None:
        if reduces(self.own):
            self._owner.before_group(self)

    def note_gather(self) -> None:
        """Torch is about to gather the group for what no backward pass follows."""
        self._owner.gathers.append(self.index)

    def before_gather(self, module: nn.Module, args: Any) -> None:
        if self.own is not None and graph_task() == -1:  # what is computed again within backward is gathered
            self._owner.compare_gathers(self)

    def before_backward(self, module: nn.Module, args: Any, output: Any) -> None:
        """Before torch's own hook, which has the outputs gather in backward, and the pass end in a reduction."""
        if torch.is_grad_enabled() and graph_task() == -1:
            owner, hook = self._owner, self._owner.start_pass
            if owner.passes_left and self.own is not None:
                compared = [self]  # torch gathers for the first of the outputs

                def hook(grad: torch.Tensor) -> None:
                    owner.start_pass(grad)
                    if compared:
                        owner.compare_gathers(compared.pop())

            with without_function_modes():
                for tensor in (output,) if isinstance(output, torch.Tensor) else tensors(output):
                    if tensor.grad_fn is not None:
                        tensor.register_hook(hook)


class UnusedParameters:
    """Makes all ranks reduce gradients of the same parameters of `model`, which goes through `fully_shard`.

    `fully_shard` lays the gradients that a rank has end to end and adds these over ranks. If ranks took other branches, it
    would add gradients of different parameters. So a rank brings zeros where it has none, and when backward ends ranks agree,
    in one small collective, which parameters had a gradient on any; what no rank used gets none. In the first passes they
    agree before each group instead, in a collective each. They go back to that whenever a rank reduces groups in another order
    than in its pass before, or has a hook of `register_post_accumulate_grad_hook` that would see the zeros. In the first
    passes ranks compare what they gather too, and in all later ones what they gather without gradients, as in evaluation: one
    more collective at the end of such a pass, for which a GPU waits. Raises RuntimeError on all ranks if they gather or reduce
    different groups; after the first passes, on a GPU, ranks that lack a gradient alone read the answer and raise.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, device: torch.device, written: ForwardWrites) -> None:
        self._written, self._passes = written, 0
        self._model = weakref.ref(model)
        self._names = weakref.WeakKeyDictionary({module: name for name, module in model.named_modules()})
        self._ranks = [mesh.get_group(dim) for dim in range(mesh.ndim) if mesh.size(dim) > 1]
        self._shards = mesh.get_group(mesh.ndim - 1) if mesh.size(mesh.ndim - 1) > 1 else None
        self.gathers: list[int] = []  # of this forward pass, those without gradients, by index
        self._device = device
        self._groups: list[weakref.ref[_Group]] = []  # hooks of their modules hold them, and they hold this
        self._num_params = 0
        self._under_way = False
        # Whether ranks agree before each group is reduced, and the number of passes for which this one still asks for that.
        self._each, self._wary = True, _COMPARED
        self._order = bytearray()  # the places of groups in the pass before
        self._trained = bytearray()  # of each parameter, whether ranks may bring a gradient of it
        self._forget()
        self.passes_left = _COMPARED if self._ranks else 0
        self._compare_hooks: list[Any] = []  # of those first passes

    def before_sharding(self, modules: Sequence[nn.Module]) -> _Group:
        """Register what runs before the output hooks of `fully_shard`, which will be applied to `modules` together.

        Returns the group for `after_sharding`.
        """
        names = [repr(self._names[module]) if self._names[module] else "the model" for module in modules]
        group = _Group(self, len(self._groups), listed(names, 3))
        for module in modules:
            module.register_forward_hook(torch.compiler.disable(group.before_backward))
            if module is self._model():
                module.register_forward_hook(torch.compiler.disable(self._after_forward), always_call=True)
        return group

    def after_sharding(self, modules: Sequence[nn.Module], group: _Group) -> None:
        """Register the rest once `fully_shard` was applied to `modules`. group: what `before_sharding` returned for them."""
        if own := fsdp_groups(modules[:1]):
            (group.own,), group.first = own, self._num_params
            self._num_params += len(group.own.fsdp_params)
            self._trained.extend(bytes(len(group.own.fsdp_params)))
            self._groups.append(weakref.ref(group))
            self._forget()  # of this number of parameters: a stage that detaches what it sends has no backward pass
        for module in modules:
            if own:
                hook = torch.compiler.disable(group.before_forward)
                module.register_forward_pre_hook(hook, with_kwargs=True)
                if self.passes_left:
                    hook = torch.compiler.disable(group.before_gather)
                    self._compare_hooks.append(module.register_forward_pre_hook(hook, prepend=True))

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        self._under_way = False  # if a backward pass raised
        gathers, self.gathers = self.gathers, []
        if output is None:  # this one raised
            for each in self._alive():
                each.called = False
            return
        self._passes += 1
        if self._passes & (self._passes - 1) == 0:  # a power of two
            self._written.before_end(self._passes)
        if self.passes_left:
            self.compare_gathers(None)
            self.passes_left -= 1
            if not self.passes_left:
                for hook in self._compare_hooks:
                    hook.remove()
        elif gathers and self._shards is not None:
            places = bytearray(len(self._groups))
            for number, index in enumerate(gathers):
                places[index] = number % 254 + 1
            with torch.no_grad(), without_function_modes():
                flags = torch.frombuffer(places + places.translate(_FROM_255), dtype=torch.uint8).to(self._device)
                dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._shards)
                self._check(flags.tolist())

    def start_pass(self, grad: torch.Tensor) -> None:
        """A backward pass has come to outputs of a module that was sharded."""
        if not self._under_way:
            self._under_way = True
            self._forget()  # a pass that raised
            when_backward_ends(self._before_end)  # before torch's own callback, which is queued later

    def _forget(self) -> None:
        self._num_reduced, self._hooked = 0, False
        self._states, self._left_out = bytearray(self._num_params), bytearray(self._num_params)  # states of `unreduced`
        self._zeros: list[
            tuple[int, Any, bool]
        ] = []  # what brings zeros, and whether it had no gradient before this pass
        for group in self._alive():
            group.place = 0

    def before_group(self, group: _Group) -> None:
        """Torch is about to reduce `group`, as backward has come to its inputs."""
        (self._agree if self._each else self._fill)((group,), last=False)

    def _before_end(self) -> None:
        """Torch is about to reduce groups with inputs that need no gradient, and those that were not reached."""
        self._under_way = False
        groups = self._alive()
        if groups and reduces(groups[0].own):
            self.before_reduction()
        else:
            for group in groups:
                skip_backward_end(group.own)

    def before_reduction(self) -> None:
        """Prepare what is left to be reduced: all, where that is done outside of backward."""
        groups = self._alive()
        if self._each or graph_task() == -1:
            self._agree(groups, last=True)
        else:
            self._fill(groups, last=True)
            when_backward_ends(self._after_end)  # after torch's own callback, which reduces the rest
        for group in groups:
            group.called = False

    def _alive(self) -> list[_Group]:
        return list(filter(None, map(weakref.ref.__call__, self._groups)))

    def compare_gathers(self, group: _Group | None) -> None:
        """Compare among ranks which group is gathered next; None: the forward pass ends."""
        count = len(self._groups)
        local = bytearray(count) + bytearray([255]) * count
        if group is not None:
            local[group.index], local[count + group.index] = 1, 0
        with torch.no_grad(), without_function_modes():
            flags = torch.frombuffer(local, dtype=torch.uint8).to(self._device)
            for ranks in self._ranks:
                dist.all_reduce(flags, dist.ReduceOp.MAX, group=ranks)
            self._check(flags.tolist())

    def _collect(self, groups: Sequence[_Group], local: bytearray, last: bool) -> Iterator[tuple[int, Any, bool]]:
        """Note what is about to be reduced; yield each parameter that may have to bring zeros: its place, record, `apart`."""
        for group in groups:
            states, apart = unreduced(group.own)
            # The `last` call leaves out groups that were reduced, or had no call, and have no gradients. A group that was
            # reduced when backward came to a second call of one of its modules, and has gradients since, is reduced again.
            if last and HAS not in states and (group.place or not group.called):
                continue
            if not group.place:
                # One byte of a message, of which 0 means not reduced and 255 - place must differ from it.
                group.place = self._num_reduced % 254 + 1
                self._num_reduced += 1
            # Neither, of a group that only joins others: of its call a pass that raised may be all that is left.
            # Each group sends a and 255 - a: the two maxima add up to more than 255 exactly if ranks sent different a.
            local[group.index], local[len(self._groups) + group.index] = (not last or HAS in states), 0
            self._hooked = self._hooked or has_hooks(group.own)
            for place, state in enumerate(states, group.first):
                self._states[place] = max(self._states[place], state)
                self._trained[place] |= state >= LACKS
                if FROZEN <= state < HAS and (self._each or self._trained[place]):
                    yield place, group.own.fsdp_params[place - group.first], apart
                elif state < HAS:
                    self._left_out[place] = 1

    def _agree(self, groups: Sequence[_Group], *, last: bool) -> None:
        """Agree on gradients of `groups`, which are about to be reduced; zeros where only other ranks have one."""
        count = len(self._groups)
        with torch.no_grad(), without_function_modes():
            local = bytearray(count) + bytearray([255]) * count
            lacking = list(self._collect(groups, local, last))
            anywhere = self._exchange(local, wait=bool(lacking), last=last)
            for place, param, apart in lacking:
                if anywhere[place] == HAS:
                    zero_unreduced(param, apart)

    def _fill(self, groups: Sequence[_Group], *, last: bool) -> None:
        """Let `groups`, which are about to be reduced, bring zeros where this rank has no gradient."""
        with torch.no_grad(), without_function_modes():
            # So do parameters that were frozen since, as other ranks may train them still.
            for place, param, apart in self._collect(groups, bytearray(2 * len(self._groups)), last):
                self._zeros.append((place, param, param.sharded_param.grad is None))
                zero_unreduced(param, apart)

    def _after_end(self) -> None:
        """All is reduced: compare in which order, and drop gradients that are zeros of all ranks."""
        local = bytearray(map(_PLACE, self._alive()))
        zeros, left_out = self._zeros, self._left_out
        with torch.no_grad(), without_function_modes():
            anywhere = self._exchange(local + local.translate(_FROM_255), left_out, wait=bool(zeros), last=True)
            for place, param, is_new in zeros:
                self._trained[place] = anywhere[place] > FROZEN  # if all have frozen it, all come here
                if is_new and anywhere[place] < HAS:
                    param.sharded_param.grad = None

    def _exchange(self, local: Sequence[int], left_out: Sequence[int] = (), *, wait: bool, last: bool) -> Sequence[int]:
        """Return of each parameter the most that any rank has found; what this rank has found, where not `wait`.

        RuntimeError where ranks reduce different groups.
        """
        count, own = len(self._groups), self._states
        # The last exchange of this pass.
        if last:
            order = bytearray(map(_PLACE, self._alive()))
            varies = self._hooked or order != (self._order or order)
            self._order, self._wary = order, _COMPARED if varies else max(self._wary - 1, 0)
            self._forget()
        if not self._ranks:
            return own
        message = bytearray([self._wary > 0, *local, *own, *left_out])
        flags = torch.frombuffer(message, dtype=torch.uint8).to(self._device)
        for ranks in self._ranks:
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=ranks)
        all_wait = self._each or self._device.type == "cpu"
        if not (wait or all_wait):
            return own
        is_wary, *anywhere = flags.tolist()
        self._check(anywhere)
        states, left = anywhere[2 * count :][: len(own)], anywhere[2 * count + len(own) :]
        if last and all_wait:
            self._each = bool(is_wary)
            self._trained = bytearray(map(max, self._trained, map(FROZEN.__lt__, states)))
        if any(left):
            names = [self._name(place) for place, is_left in enumerate(left) if is_left and states[place] > FROZEN]
            if names:
                raise RuntimeError(_FROZEN.format(names=listed(names, 5)))
        return states

    def _name(self, place: int) -> str:
        group = next(group for group in reversed(self._alive()) if group.first <= place)
        return name_of(group.own.fsdp_params[place - group.first])

    def _check(self, anywhere: list[int]) -> None:
        count = len(self._groups)
        if max(map(add, anywhere[:count], anywhere[count : 2 * count]), default=0) <= 255:
            return
        names = [group.name for group in self._alive() if anywhere[group.index] + anywhere[count + group.index] > 255]
        raise RuntimeError(
            f"ranks take different ways through the model: some go through {listed(names, 5)} now and others do not, but each "
            "of these is gathered and reduced by itself, so that weights and gradients of different modules would be taken for "
            "each other. Pass a wrap_policy that does not name what some ranks leave out, so that it travels with the module "
            "around it, or use LowLevelZeroPlugin(stage=2), which needs no option"
        )
