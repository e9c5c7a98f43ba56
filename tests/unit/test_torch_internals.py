"""The private names of torch are there, and only one file uses them."""

import ast
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import booster
from booster.common import torch_internals

ROOT = Path(booster.__file__).parent
# Names of torch that begin with an underscore. `_foreach_*`, `_parameters`, `_modules` and `_buffers` are free.
PRIVATE = re.compile(
    r"torch\._C\b|_execution_engine|_GLOBAL_DEVICE_CONTEXT|_amp_foreach|\b_BatchNorm\b|\b_NormBase\b|\._values\(|\._is_view\("
    r"|\._version\b|_step_supports_amp|_need_device_dtype|_optimizer_step_(pre|post)_hooks|_global_optimizer_|_opt_called"
    r"|_register_state_dict_hook|_state_dict_hooks\b"
    r"|_StridedShard|torch\._subclasses|torch\.utils[. ].*_pytree|torch\._inductor|_torchdynamo_orig|_use_grad|_training_state"
    r"|torch\._int_mm|_get_fsdp_state|_comm_ctx|_fsdp_param_groups?|_init_mp_dtypes|_unsharded_param|_current_autograd_node|_sequence_nr|\b_cdata\b|\b_call_impl|_engine_run_backward|_python_dispatch"
)


@pytest.mark.parametrize("name", torch_internals.NAMES)
def test_torch_has_the_name(name):
    torch_internals.NAMES[name]()


def test_fully_shard_keeps_what_is_asked_of_it(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        model = fully_shard(nn.Linear(2, 2))
        (state,) = torch_internals.fsdp_states([model])
        assert not torch_internals.has_run(state)
        model(torch.ones(1, 2)).sum().backward()
        assert torch_internals.has_run(state)
        (group,) = torch_internals.fsdp_groups([model])
        assert torch_internals.settle_dtypes([group]) is None
        records = list(torch_internals.fsdp_params([model]))
        assert len(records) == 2
        assert all(torch_internals.gathered(record) is not None for record in records)
        for record in records:
            assert torch_internals.held_back(record) is None
            torch_internals.hold_back(record, None)
        assert not torch_internals.is_gathered(group)
        for record in records:
            assert torch_internals.own_piece(record, torch.ones(2, 2)).shape == (2, 2)
            assert torch_internals.dtype_in_gather(record) == torch.float32
        assert sorted(torch_internals.padded_length(record) for record in records) == [2, 4]
        gather = torch_internals.gather_of(group)
        torch_internals.set_gather(model, gather := type(gather)())
        assert torch_internals.gather_of(group) is gather
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
        if path.name != "torch_internals.py"
        for name in private_uses(path.read_text())
    }
    assert reached == set()
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sorted(ROOT.rglob("*.py"))
        if path.name != "torch_internals.py"
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if PRIVATE.search(line) and not line.lstrip().startswith("#")
    ]
    assert found == []
