"""Plans for models without one: for modules of known classes, for modules of transformers of a known shape, and for sequences.

Known classes are those of timm, of transformers' GPT-2 and torch's transformer layers. Elsewhere in transformers, attention
and feed-forward modules are recognised by the names and widths of their linear layers. What is computed between a column-wise
layer and the row-wise one after it must treat every head, or every hidden feature, by itself. So a module qualifies only if
nothing in it says otherwise: it has no parameters itself, no further child with parameters but norms of one head and biases by
head, and widths that meet. Everything else stays unsharded, which is always right. By sequence parallelism every rank keeps a
shard of the sequence only between the branches of its blocks.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from booster.common.torch_internals.tensor_internals import RunningNorm
from booster.model.modules import LinearProxy, names_in_forward, parsed, side_of
from booster.plugin.tensor_parallel.linear_styles import Colwise, Rowwise, is_conv1d, output_dim
from booster.plugin.tensor_parallel.module_styles import EmbeddingParallel, HeadParallel, Region

Plan = dict[str, ParallelStyle]

# ---------------------------------------------------------------------- by class


def derive_plan(model: nn.Module) -> Plan:
    """Return the plan of all modules of known classes in `model`, by their exact names; empty if there is none."""
    plan: Plan = {}
    for name, module in model.named_modules():
        # Classes by name, because their packages need not be installed.
        classes = {f"{cls.__module__}.{cls.__qualname__}" for cls in type(module).__mro__}
        derive = next((derive for kind, derive in _KNOWN.items() if kind in classes), None)
        if derive is not None:
            plan |= {f"{name}.{child}".strip("."): style for child, style in derive(name, module).items()}
    return plan


def _timm_attention(name: str, module: Any) -> Plan:
    if not isinstance(module.norm, nn.Identity):
        raise _unsupported(name, module, "normalises over all heads")
    plan: Plan = {
        "": Region(divide=("num_heads", "attn_dim")),
        "qkv": Colwise(num_parts=3),
        "proj": Rowwise(),
        "q_norm": Region(partial_gradients=True),
        "k_norm": Region(partial_gradients=True),
    }
    return plan if getattr(module, "gate", None) is None else {**plan, "gate": Colwise()}


def _timm_mlp(name: str, module: Any, *up: str, num_parts: int = 1) -> Plan:
    if not isinstance(module.norm, nn.Identity):
        raise _unsupported(name, module, "normalises over all hidden features")
    if not isinstance(module.fc2, nn.Linear):
        raise _unsupported(name, module, "is made of convolutions")
    return {**{layer: Colwise(num_parts=num_parts) for layer in up}, "fc2": Rowwise()}


def _gpt2_attention(name: str, module: Any) -> Plan:
    plan: Plan = {"": Region(divide=("split_size", "num_heads")), "c_proj": Rowwise()}
    if module.is_cross_attention:
        return {**plan, "q_attn": Colwise(), "c_attn": Colwise(num_parts=2)}
    return {**plan, "c_attn": Colwise(num_parts=3)}


def _torch_layer(*attentions: str) -> Plan:
    plan: Plan = {}
    for attention in attentions:
        plan |= {attention: HeadParallel(), f"{attention}.out_proj": Rowwise()}
    return {**plan, "linear1": Colwise(), "linear2": Rowwise()}


_KNOWN: dict[str, Callable[[str, Any], Plan]] = {
    "timm.layers.attention.Attention": _timm_attention,
    "timm.layers.mlp.Mlp": lambda name, module: _timm_mlp(name, module, "fc1"),
    "timm.layers.mlp.GluMlp": lambda name, module: _timm_mlp(name, module, "fc1", num_parts=2),
    "timm.layers.mlp.SwiGLU": lambda name, module: _timm_mlp(name, module, "fc1_g", "fc1_x"),
    "transformers.models.gpt2.modeling_gpt2.GPT2Attention": _gpt2_attention,
    "transformers.models.gpt2.modeling_gpt2.GPT2MLP": lambda name, module: {"c_fc": Colwise(), "c_proj": Rowwise()},
    "torch.nn.modules.transformer.TransformerEncoder": lambda name, module: {
        "": Region(assign={"use_nested_tensor": False})
    },
    "torch.nn.modules.transformer.TransformerEncoderLayer": lambda name, module: {
        # In evaluation the layer would pass its parameters to one kernel; 0 says that its activation is unknown to that.
        "": Region(assign={"activation_relu_or_gelu": 0}),
        **_torch_layer("self_attn"),
    },
    "torch.nn.modules.transformer.TransformerDecoderLayer": lambda name, module: _torch_layer(
        "self_attn", "multihead_attn"
    ),
}


def _unsupported(name: str, module: nn.Module, why: str) -> ValueError:
    return ValueError(
        f"no tensor-parallel plan is known for {name!r}: this {type(module).__name__} {why}; give a tp_plan"
    )


# ---------------------------------------------------------------------- by shape

_QUERIES_KEYS_VALUES = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q", "k", "v"),
    ("q_lin", "k_lin", "v_lin"),
    ("query_proj", "key_proj", "value_proj"),
    ("linear_q", "linear_k", "linear_v"),
)
_BY_HEADS = ("query_key_value",)  # one layer, in which query, key and value of one head are neighbours
_BY_PARTS = ("qkv",)  # one layer, in which all queries come first
_OUT = ("o_proj", "out_proj", "o", "out_lin", "dense", "proj", "projection", "linear_out")
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_key_value_heads", "num_kv_heads")
_HEAD_SIZES = ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim")
_HEAD_WIDTHS = ("all_head_size", "inner_dim", "attn_dim", "split_size")  # of all heads
_WIDTHS = ("embed_dim", "hidden_size", "dim", "d_model")  # of all heads in some models, of the input in others
_LAST_SIZE = re.compile(r"hidden_states\.(shape\[(2|-1)\]|size\((2|-1)\))$")
_BIAS = "relative_attention_bias"  # by heads, and sharded as they are
_FEED_FORWARD = (
    ("wi_0", "wi_1", "wo"),
    ("gate_proj", "up_proj", "down_proj"),
    ("w1", "w3", "w2"),
    ("fc1", "fc2"),
    ("fc_in", "fc_out"),
    ("c_fc", "c_proj"),
    ("dense_h_to_4h", "dense_4h_to_h"),
    ("lin1", "lin2"),
    ("linear1", "linear2"),
    ("linear_fc1", "linear_fc2"),
    ("dense1", "dense2"),
    ("wi", "wo"),
    ("up_proj", "down_proj"),
    ("ffn", "ffn_output"),
    ("intermediate_dense", "output_dense"),
    ("intermediate.dense", "output.dense"),
)


def derive_by_shape(model: nn.Module) -> Plan:
    """Return the plan of all modules of transformers in `model` that have a known shape, by their exact names."""
    plan: Plan = {}
    for name, module in model.named_modules():
        if not any(cls.__module__.startswith("transformers.models.") for cls in type(module).__mro__):
            continue
        for child, style in (*_attention(module).items(), *_feed_forward(module).items()):
            plan.setdefault(f"{name}.{child}".strip("."), style)
    return plan


def _attention(module: Any) -> Plan:
    """Return the plan of an attention module with its output layer, or of a module around these two."""
    inner = next((name for name in ("self", "attention") if _projections(_child(module, name))), "")
    if hasattr(module, "set_attention_type"):  # BigBird's, which replaces the inner module while it runs
        return {}
    holder, prefix = (_child(module, inner), f"{inner}.") if inner else (module, "")
    projections = _projections(holder)
    if not projections:
        return {}
    out = next((name for name in _OUT if _is_linear(_child(holder, name))), "")
    out = f"{prefix}{out}" if out else ("output.dense" if inner and _is_linear(_child(module, "output.dense")) else "")
    if not out:
        return {}
    width = _features(_child(holder, projections[0])) // (1 if len(projections) == 3 else 3)

    def number(names: tuple[str, ...]) -> int:
        return next((value for name in names if isinstance(value := getattr(holder, name, None), int)), 0)

    heads, size = number(_HEADS), number(_HEAD_SIZES)
    size = size or (width // heads if heads and not width % heads else 0)
    if not size or width % size or _features(_child(module, out), of_input=True) != width:
        return {}
    plan: Plan = {f"{prefix}{name}": Colwise(num_parts=3 if name in _BY_PARTS else 1) for name in projections}
    plan[out] = Rowwise()
    for name, child in holder.named_children():
        if name in projections or f"{prefix}{name}" == out or next(child.parameters(), None) is None:
            continue
        if isinstance(child, nn.Embedding) and child.embedding_dim == width // size:
            plan[f"{prefix}{name}"] = EmbeddingParallel(by="features", gather_output=False)
        elif "norm" in type(child).__name__.lower() and all(param.shape == (size,) for param in child.parameters()):
            plan[f"{prefix}{name}"] = Region(partial_gradients=True)
        else:
            return {}
    used = names_in_forward(holder)
    arguments = inspect.signature(holder.forward).parameters
    if holder._parameters or _has_buffer_of_heads(holder) or not set(projections) <= set(used) or _reads_width(holder):
        return {}
    if "position_bias" in arguments and _BIAS not in used:  # a bias of all heads, computed elsewhere
        return {}
    divide = [name for name in _HEADS if name in used and isinstance(getattr(holder, name, None), int)]
    after = used[max(used.index(name) for name in projections) :]
    divide += [name for name in _WIDTHS if name in after and getattr(holder, name, None) == width]
    divide += [name for name in _HEAD_WIDTHS if name in used and getattr(holder, name, None) == width]
    by_heads = tuple(name for name in ("alibi",) if name in arguments)
    shared = tuple(name for name in ("position_embeddings",) if name in arguments)
    if divide or by_heads or shared:
        plan[prefix.rstrip(".")] = Region(divide=tuple(divide), by_heads=by_heads, shared=shared)
    return plan


def _projections(holder: Any) -> tuple[str, ...]:
    """Return the names of the layers of queries, keys and values in `holder`; empty if it has none."""
    for names in _QUERIES_KEYS_VALUES:
        if all(_is_linear(_child(holder, name)) for name in names):
            q, k, v = (_features(_child(holder, name)) for name in names)
            return names if k == v and not q % k else ()
    for name in (*_BY_HEADS, *_BY_PARTS):
        child = _child(holder, name)
        if _is_linear(child) and _features(child) == 3 * _features(child, of_input=True):
            return (name,)
    return ()


def _feed_forward(module: Any) -> Plan:
    for *up, down in _FEED_FORWARD:
        layers = [_child(module, name) for name in (*up, down)]
        if not all(map(_is_linear, layers)):
            continue
        hidden, inputs = (_features(layers[at], of_input=True) for at in (-1, 0))
        holders = {module.get_submodule(name.rpartition(".")[0]) for name in (*up, down)}
        if (
            any(_features(layer) != hidden for layer in layers[:-1])
            or hidden == inputs
            or any(holder._parameters for holder in holders)
            or (len(holders) == 1 and _works_between(module, up, down))
        ):
            return {}
        return {**{name: Colwise() for name in up}, down: Rowwise()}
    return {}


def _works_between(module: nn.Module, up: list[str], down: str) -> bool:
    """Return whether a child with parameters works on hidden features, as a norm or a convolution between the layers does."""
    used = names_in_forward(module)
    return any(
        any(param.numel() > 1 for param in child.parameters())
        and (name not in used or any(side_of(name, each, used) > 0 for each in up) and side_of(name, down, used) < 0)
        for name, child in module.named_children()
        if name not in (*up, down)
    )


def _reads_width(holder: Any) -> bool:
    """Return whether the forward reads the width of all heads from its input: it unpacks a shape, or divides by the heads."""
    nodes = [node for statement in parsed(type(holder).forward) for node in ast.walk(statement)]
    loaded = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
            names = [each.id for each in node.targets[0].elts if isinstance(each, ast.Name)]
            if len(names) >= 3 and ast.unparse(node.value).endswith((".size()", ".shape")) and names[-1] in loaded:
                return True
        if isinstance(node, (ast.Subscript, ast.Call)) and _LAST_SIZE.search(ast.unparse(node)):
            return True
        divides = isinstance(node, ast.BinOp) and isinstance(node.op, (ast.FloorDiv, ast.Div))
        if divides and isinstance(node.right, ast.Attribute) and node.right.attr in _HEADS:  # type: ignore[attr-defined]
            return True
    return False


def _has_buffer_of_heads(holder: Any) -> bool:
    """Return whether a buffer has a dimension of all heads, which would not fit some of them."""
    heads = {getattr(holder, name, None) for name in _HEADS}
    buffers = [buffer for buffer in holder._buffers.values() if buffer is not None and buffer.dim() > 1]
    return any(size in heads and size > 1 for buffer in buffers for size in buffer.shape)


def _child(module: Any, name: str) -> Any:
    for part in name.split("."):
        module = None if module is None else module._modules.get(part)
    return module


def within_adapters(module: Any) -> Any:
    """Return the layer inside low-rank adapters, or `module` itself."""
    return module.base_layer if hasattr(module, "lora_A") else module


def _is_linear(module: Any) -> bool:
    module = within_adapters(module)
    return type(module) is nn.Linear or isinstance(module, LinearProxy) or (module is not None and is_conv1d(module))


def _features(linear: Any, *, of_input: bool = False) -> int:
    """Return the number of output features of a linear layer, or of input features."""
    linear = within_adapters(linear)
    dim = output_dim(linear)
    return int(linear.weight.shape[1 - dim if of_input else dim])


_MIX_TOKENS = (RunningNorm, nn.GroupNorm)


def with_sequence_parallelism(model: nn.Module, plan: dict[str, ParallelStyle]) -> dict[str, ParallelStyle]:
    """Return `plan`, of exact names, with activations sharded along the sequence between the branches of a block.

    The first block of each stack shards them, the last gathers them. A branch is a child of a block that holds modules of the
    plan; its input is gathered, and the output of its row-wise layers is reduce-scattered.
    """
    stacks: dict[str, set[str]] = {}
    for name, style in plan.items():
        block = _block_of(model, name)
        if block is not None:
            stacks.setdefault(block.rpartition(".")[0], set()).add(block)
        elif isinstance(style, (Rowwise, HeadParallel)) or (isinstance(style, Colwise) and not style.gather_output):
            raise _refusal(f"{name!r} is in no block of a ModuleList or Sequential")
    if not stacks:
        # Raises ValueError where that cannot be.
        raise _refusal("tp_plan names no module in a ModuleList or Sequential")
    # Everything else in a block works token by token, on its shard of the sequence.
    sharded = dict(plan)
    for stack, blocks in stacks.items():
        names = [f"{stack}.{child}".lstrip(".") for child, _ in model.get_submodule(stack).named_children()]
        left_out = [name for name in names if name not in blocks]
        if left_out:
            raise _refusal(f"tp_plan names nothing in {left_out[0]!r}")
        # Only torch's own attention has the time first; everything known elsewhere has the batch first.
        attention = getattr(model.get_submodule(names[0]), "self_attn", None)
        dim = 0 if isinstance(attention, nn.MultiheadAttention) and not attention.batch_first else 1
        for name in names:
            _shard_block(model, name, sharded, dim)
            into, out = "split" if name == names[0] else None, "gather" if name == names[-1] else None
            sharded[name] = _region(sharded.get(name), into=into, out=out, sequence_dim=dim)
    return sharded


def _refusal(why: str) -> ValueError:
    return ValueError(f"sequence_parallelism=True: {why}; use sequence_parallelism=False")


def _shard_block(model: nn.Module, block: str, plan: dict[str, ParallelStyle], dim: int) -> None:
    given = dict(plan)  # `plan` changes below
    for child, module in model.get_submodule(block).named_children():
        branch = f"{block}.{child}"
        inside = [name for name in given if name.startswith(f"{branch}.")]
        if branch in given and not isinstance(given[branch], Region):
            plan[branch] = _alone(branch, given[branch], dim)
            for name in inside:  # the projection of a MultiheadAttention
                plan[name] = _in_branch(name, given[name], dim)
            continue
        if inside:
            rows = [name for name in inside if isinstance(given[name], Rowwise)]
            if len(rows) != 1:
                raise ValueError(
                    f"sequence_parallelism=True needs one row-wise module in {branch!r}, to divide its output; tp_plan "
                    f"names {rows or 'none'}. Otherwise use sequence_parallelism=False"
                )
        else:
            mixing = [each for each in module.modules() if isinstance(each, _MIX_TOKENS)]
            heavy = [f"{branch}.{param_name}" for param_name, param in module.named_parameters() if param.dim() > 1]
            if mixing:
                raise _refusal(f"{branch!r} is a {type(mixing[0]).__name__}, which mixes tokens")
            if heavy:
                raise ValueError(
                    f"sequence_parallelism=True: tp_plan does not divide {heavy[0]!r}; name its module, or use "
                    "sequence_parallelism=False"
                )
        for name, each in module.named_modules(prefix=branch):
            if inside and name in given:
                plan[name] = _in_branch(name, given[name], dim)
            elif each._parameters:  # it sees some of the tokens on each rank, so its gradients are summed
                plan[name] = Region(partial_gradients=True)
        if inside:
            plan[branch] = _region(given.get(branch), into="gather", sequence_dim=dim)


def _alone(name: str, style: ParallelStyle, dim: int) -> ParallelStyle:
    """Return the style of a module that is itself a child of the block, and so gathers or scatters by itself."""
    if isinstance(style, HeadParallel):
        return HeadParallel(sequence_dim=dim, whole_memory=name.endswith("multihead_attn"))
    if isinstance(style, Colwise) and not style.gather_output:
        return Colwise(num_parts=style.num_parts, sequence_dim=dim)
    return _in_branch(name, style, dim)


def _in_branch(name: str, style: ParallelStyle, dim: int) -> ParallelStyle:
    if isinstance(style, Colwise) and not style.gather_output:
        return Colwise(num_parts=style.num_parts, shared_input=True)
    if isinstance(style, Rowwise) and not style.split_input:
        return Rowwise(sequence_dim=dim)
    if isinstance(style, Region) and style.into is None and style.out is None:
        return _region(style)
    raise _refusal(f"the style of {name!r}, {type(style).__name__}, cannot be used in it")


def _region(style: ParallelStyle | None, **options: Any) -> Region:
    """Return the region of a module with a shard of the sequence; what `style` says of attributes and arguments stays."""
    own = style if isinstance(style, Region) else Region()
    kept = {name: getattr(own, name) for name in ("divide", "assign", "by_heads", "shared")}
    return Region(partial_gradients=True, **kept, **options)


def _block_of(model: nn.Module, name: str) -> str | None:
    """Return the outermost element, of a stack of modules of one class, that is or holds the module `name`."""
    for match in re.finditer(r"\.\d+(?=\.|$)", f".{name}"):
        block = name[: match.end() - 1]
        stack = model.get_submodule(block.rpartition(".")[0])
        if isinstance(stack, (nn.ModuleList, nn.Sequential)) and len({type(child) for child in stack}) == 1:
            return block
    return None
