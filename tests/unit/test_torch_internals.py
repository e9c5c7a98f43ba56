"""The private names of torch are there, and only one room uses them."""

import ast
import importlib
import importlib.util
import re
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import booster
from booster.common.torch_internals import fsdp_internals, optimizer_internals, tensor_internals

ROOT = Path(booster.__file__).parent
# Names of torch that begin with an underscore. `_foreach_*`, `_parameters`, `_modules` and `_buffers` are free.
PRIVATE = re.compile(
    r"torch\._C\b|_execution_engine|_GLOBAL_DEVICE_CONTEXT|_amp_foreach|\b_BatchNorm\b|\b_NormBase\b|\._values\(|\._is_view\("
    r"|\._version\b|_step_supports_amp|_need_device_dtype|_optimizer_step_(pre|post)_hooks|_global_optimizer_|_opt_called"
    r"|_register_state_dict_hook|_state_dict_hooks\b"
    r"|_StridedShard|torch\._subclasses|torch\.utils[. ].*_pytree|torch\._inductor|_torchdynamo_orig|_use_grad(?!ient)"
    r"|_training_state"
    r"|torch\._int_mm|_get_fsdp_state|_comm_ctx|_fsdp_param_groups?|_init_mp_dtypes|_unsharded_param|_current_autograd_node|_sequence_nr|\b_cdata\b|\b_call_impl|_engine_run_backward|_python_dispatch"
)


def an_optimizer(kind=torch.optim.Adam):
    return kind([nn.Parameter(torch.zeros(1))], lr=0.1, fused=True)


def scheduled():
    optimizer = an_optimizer()
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return optimizer


# How to reach every private name that needs no process group.
NAMES = {
    "torch._dynamo.eval_frame.cached_backends": lambda: (
        importlib.import_module("torch._dynamo.eval_frame").cached_backends
    ),
    "torch._C._current_graph_task_id": lambda: torch._C._current_graph_task_id,
    "torch._C._autograd._top_saved_tensors_default_hooks": lambda: torch._C._autograd._top_saved_tensors_default_hooks,
    "torch.autograd.Variable._execution_engine": lambda: torch.autograd.Variable._execution_engine,
    "torch._C._dynamo.guards.TensorGuards": lambda: tensor_internals.like_check([torch.zeros(1)])(torch.zeros(1)),
    "torch._C._current_autograd_node": lambda: torch._C._current_autograd_node,
    "Node._sequence_nr": lambda: torch.ones(1, requires_grad=True).exp().grad_fn._sequence_nr,
    "torch.autograd._get_sequence_nr": lambda: torch.autograd._get_sequence_nr,
    "torch.autograd.graph._engine_run_backward": lambda: torch.autograd.graph._engine_run_backward.__code__,
    "Tensor._make_subclass": lambda: torch.Tensor._make_subclass,
    "torch._C.DisableTorchFunction": lambda: torch._C.DisableTorchFunction,
    "torch._C._EnableTorchFunction": lambda: torch._C._EnableTorchFunction,
    "Module._compiled_call_impl": lambda: nn.Module._compiled_call_impl,
    "UntypedStorage._cdata": lambda: torch.zeros(1).untyped_storage()._cdata,
    "Module._call_impl": lambda: nn.Module._call_impl.__code__.co_varnames.index("self"),
    "torch._C._get_function_stack_at": lambda: torch._C._get_function_stack_at,
    "torch._C._len_torch_function_stack": lambda: torch._C._len_torch_function_stack,
    "torch._GLOBAL_DEVICE_CONTEXT": lambda: torch._GLOBAL_DEVICE_CONTEXT,
    "Tensor._values": lambda: torch.Tensor._values,
    "Tensor._indices": lambda: torch.Tensor._indices,
    "Tensor._is_view": lambda: torch.Tensor._is_view,
    "torch.distributed.distributed_c10d._get_default_store": lambda: dist.distributed_c10d._get_default_store,
    "torch.distributed.distributed_c10d._world": lambda: dist.distributed_c10d._world.pg_names,
    "torch.distributed.distributed_c10d._resolve_process_group": lambda: dist.distributed_c10d._resolve_process_group,
    "rendezvous._torchelastic_use_agent_store": lambda: (
        sys.modules[dist.rendezvous.__module__]._torchelastic_use_agent_store
    ),
    "torch.distributed._compute_bucket_assignment_by_size": lambda: dist._compute_bucket_assignment_by_size,
    "Tensor._version": lambda: torch.Tensor._version,
    "Optimizer._optimizer_load_state_dict_pre_hooks": lambda: (
        torch.optim.Optimizer.__init__,
        torch.optim.SGD([torch.zeros(1)])._optimizer_load_state_dict_pre_hooks,
    ),
    "torch.autograd._unsafe_preserve_version_counter": lambda: torch.autograd._unsafe_preserve_version_counter,
    "torch._amp_foreach_non_finite_check_and_unscale_": lambda: torch._amp_foreach_non_finite_check_and_unscale_,
    "torch._int_mm": lambda: torch._int_mm,
    "torch._scaled_mm": lambda: torch._scaled_mm,
    "torch._dynamo": lambda: importlib.util.find_spec("torch._dynamo").name,
    "torch._C._dispatch_has_kernel_for_dispatch_key": lambda: torch._C._dispatch_has_kernel_for_dispatch_key,
    "optimizer._global_optimizer_pre_hooks": lambda: (
        sys.modules[torch.optim.Optimizer.__module__]._global_optimizer_pre_hooks
    ),
    "optimizer._global_optimizer_post_hooks": lambda: (
        sys.modules[torch.optim.Optimizer.__module__]._global_optimizer_post_hooks
    ),
    "Optimizer._optimizer_step_pre_hooks": lambda: an_optimizer()._optimizer_step_pre_hooks,
    "Optimizer._optimizer_step_post_hooks": lambda: an_optimizer()._optimizer_step_post_hooks,
    "Adam(fused)._step_supports_amp_scaling": lambda: an_optimizer()._step_supports_amp_scaling,
    "SGD(fused)._need_device_dtype_check_for_fused": lambda: (
        an_optimizer(torch.optim.SGD)._need_device_dtype_check_for_fused
    ),
    "Optimizer.step._wrapped_by_lr_sched": lambda: scheduled().step._wrapped_by_lr_sched,
    "Optimizer.step.hooked": lambda: type(an_optimizer()).step.hooked,
    "Optimizer.step.__wrapped__": lambda: type(an_optimizer()).step.__wrapped__,
    **{f"{module}.{name}": partial(getattr, tensor_internals, name) for name, module in tensor_internals._LATE.items()},
    "torch.utils._pytree": lambda: (
        tensor_internals.pytree.tree_flatten,
        tensor_internals.pytree.tree_unflatten,
        tensor_internals.pytree.tree_leaves,
        tensor_internals.pytree.TreeSpec,
    ),
    "Adam.step unwrapped": lambda: optimizer_internals.unwrapped(torch.optim.Adam.step).__code__.co_varnames.index(
        "closure"
    ),
    "Module._state_dict_hooks": lambda: nn.Module()._state_dict_hooks,
    "DataLoader._iterator": lambda: DataLoader([0])._iterator,
    "DataLoader._index_sampler": lambda: DataLoader.__dict__["_index_sampler"].fget,
}


@pytest.mark.parametrize("name", NAMES)
def test_torch_has_the_name(name):
    NAMES[name]()


def test_fully_shard_keeps_what_is_asked_of_it(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        model = fully_shard(nn.Linear(2, 2))
        (state,) = fsdp_internals.fsdp_states([model])
        assert not fsdp_internals.has_run(state)
        model(torch.ones(1, 2)).sum().backward()
        assert fsdp_internals.has_run(state)
        (group,) = fsdp_internals.fsdp_groups([model])
        assert fsdp_internals.init_dtypes([group]) is None
        records = list(fsdp_internals.fsdp_params([model]))
        assert len(records) == 2
        assert all(fsdp_internals.gathered(record) is not None for record in records)
        for record in records:
            assert fsdp_internals.unreduced_grad(record) is None
            fsdp_internals.set_unreduced_grad(record, None)
        assert not fsdp_internals.is_gathered(group)
        for record in records:
            assert fsdp_internals.shard_of_full(record, torch.ones(2, 2)).shape == (2, 2)
            assert fsdp_internals.dtype_in_gather(record) == torch.float32
        assert sorted(fsdp_internals.padded_length(record) for record in records) == [2, 4]
        gather = fsdp_internals.gather_of(group)
        model.set_custom_all_gather(gather := type(gather)())
        assert fsdp_internals.gather_of(group) is gather
    finally:
        torch.distributed.destroy_process_group()


def spelled(node):
    """ "torch.a._b" for a dotted name that begins with torch or with what this library calls its modules; else ""."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in ("torch", "nn", "F", "dist", "dcp", "fx"):
        return ""
    return ".".join([node.id, *reversed(names)])


def private_uses(source):
    """The private names of torch in `source`: of its modules, imported from them, or in a string that names one of them."""
    tree = ast.parse(source)
    described = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
    found = set()
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Attribute):
            names = [spelled(node)]
        elif isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] == "torch":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("torch.")]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in described:
            names = re.findall(r"\btorch(?:\.\w+)+", node.value)
        found |= {name for name in names if re.search(r"\._(?!_|foreach_)", name)}
    return found


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch._scaled_mm(a, b)",
        "import sys\n'torch._dynamo' in sys.modules",
        "from torch.distributed import _functional_collectives",
        "def f():\n    import torch._inductor",
        "torch.optim.optimizer._use_grad_for_differentiable",
        "nn.modules.module._global_forward_hooks",
    ],
)
def test_a_private_name_is_noticed_however_it_is_reached(source):
    assert private_uses(source)


@pytest.mark.parametrize(
    "source",
    ['"""Unlike torch._scaled_mm."""', "torch._foreach_mul_(a, b)", "torch.__version__", "self._x = torch.ones(1)"],
)
def test_what_is_no_private_name_of_torch_is_free(source):
    assert not private_uses(source)


def test_private_names_stand_in_one_room():
    reached = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted(ROOT.rglob("*.py"))
        if path.parent.name != "torch_internals"
        for name in private_uses(path.read_text())
    }
    assert reached == set()
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sorted(ROOT.rglob("*.py"))
        if path.parent.name != "torch_internals"
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if PRIVATE.search(line) and not line.lstrip().startswith("#")
    ]
    assert found == []
