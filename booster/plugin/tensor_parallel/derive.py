"""Plans for modules whose structure is known: of timm, of transformers' GPT-2, and torch's transformer layers.

Plans for attention and feed-forward modules of transformers, by the names and widths of their linear layers.

What lies between a column-wise layer and the row-wise one after it must treat every head, or every hidden feature, by
itself. A module qualifies only if nothing in it says otherwise: no parameter of its own, no further child with parameters
but norms of one head and biases by head, and widths that meet. Everything else stays whole, which is always right.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from booster.model.modules import LinearProxy
from booster.plugin.forward_order import names_in_forward, parsed, side_of
from booster.plugin.tensor_parallel.attention import HeadParallel
from booster.plugin.tensor_parallel.styles import Colwise, EmbeddingParallel, Region, Rowwise, is_conv1d, output_dim

Plan = dict[str, ParallelStyle]


def derive_plan(model: nn.Module) -> Plan:
    """The plan of all modules in `model` that are known, by their exact names; empty if none is."""
    plan: Plan = {}
    for name, module in model.named_modules():
        for kind, derive in _KNOWN.items():
            if _is(module, kind):
                plan |= {f"{name}.{child}".strip("."): style for child, style in derive(name, module).items()}
                break
    return plan


def _timm_attention(name: str, module: Any) -> Plan:
    if not isinstance(module.norm, nn.Identity):
        raise _unsupported(name, module, "normalises over all heads")
    plan: Plan = {
        "": Region(divide=("num_heads", "attn_dim")),
        "qkv": Colwise(num_parts=3),
        "proj": Rowwise(),
    }
    plan |= {norm: Region(partial_gradients=True) for norm in ("q_norm", "k_norm")}
    if getattr(module, "gate", None) is not None:
        plan["gate"] = Colwise()
    return plan


def _timm_mlp(name: str, module: Any) -> Plan:
    if not isinstance(module.norm, nn.Identity):
        raise _unsupported(name, module, "normalises over all hidden features")
    if not isinstance(module.fc2, nn.Linear):
        raise _unsupported(name, module, "is made of convolutions")
    if _is(module, "timm.layers.mlp.SwiGLU"):
        return {"fc1_g": Colwise(), "fc1_x": Colwise(), "fc2": Rowwise()}
    return {"fc1": Colwise(num_parts=2 if _is(module, "timm.layers.mlp.GluMlp") else 1), "fc2": Rowwise()}


def _gpt2_attention(name: str, module: Any) -> Plan:
    plan: Plan = {"": Region(divide=("split_size", "num_heads")), "c_proj": Rowwise()}
    if module.is_cross_attention:
        return {**plan, "q_attn": Colwise(), "c_attn": Colwise(num_parts=2)}
    return {**plan, "c_attn": Colwise(num_parts=3)}


def _gpt2_mlp(name: str, module: Any) -> Plan:
    return {"c_fc": Colwise(), "c_proj": Rowwise()}


def _torch_encoder(name: str, module: Any) -> Plan:
    return {"": Region(assign={"use_nested_tensor": False})}


def _torch_encoder_layer(name: str, module: Any) -> Plan:
    return {
        # In evaluation the layer would hand its parameters to one kernel; 0 says that the activation is none it knows.
        "": Region(assign={"activation_relu_or_gelu": 0}),
        "self_attn": HeadParallel(),
        "self_attn.out_proj": Rowwise(),
        "linear1": Colwise(),
        "linear2": Rowwise(),
    }


def _torch_decoder_layer(name: str, module: Any) -> Plan:
    return {
        "self_attn": HeadParallel(),
        "self_attn.out_proj": Rowwise(),
        "multihead_attn": HeadParallel(),
        "multihead_attn.out_proj": Rowwise(),
        "linear1": Colwise(),
        "linear2": Rowwise(),
    }


_KNOWN: dict[str, Callable[[str, Any], Plan]] = {
    "timm.layers.attention.Attention": _timm_attention,
    "timm.layers.mlp.Mlp": _timm_mlp,
    "timm.layers.mlp.GluMlp": _timm_mlp,
    "timm.layers.mlp.SwiGLU": _timm_mlp,
    "transformers.models.gpt2.modeling_gpt2.GPT2Attention": _gpt2_attention,
    "transformers.models.gpt2.modeling_gpt2.GPT2MLP": _gpt2_mlp,
    "torch.nn.modules.transformer.TransformerEncoder": _torch_encoder,
    "torch.nn.modules.transformer.TransformerEncoderLayer": _torch_encoder_layer,
    "torch.nn.modules.transformer.TransformerDecoderLayer": _torch_decoder_layer,
}


def _is(module: nn.Module, kind: str) -> bool:
    """Whether `module` is of the class called `kind`; its package need not be installed."""
    return any(f"{cls.__module__}.{cls.__qualname__}" == kind for cls in type(module).__mro__)


def _unsupported(name: str, module: nn.Module, why: str) -> ValueError:
    return ValueError(
        f"no tensor-parallel plan is known for {name!r}: this {type(module).__name__} {why}; give a tp_plan"
    )


_QUERIES_KEYS_VALUES = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q", "k", "v"),
    ("q_lin", "k_lin", "v_lin"),
    ("query_proj", "key_proj", "value_proj"),
    ("linear_q", "linear_k", "linear_v"),
)
_BY_HEADS = ("query_key_value",)  # one layer, in which the three of one head are neighbours
_BY_PARTS = ("qkv",)  # one layer, in which all queries come first
_OUT = ("o_proj", "out_proj", "o", "out_lin", "dense", "proj", "projection", "linear_out")
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_key_value_heads", "num_kv_heads")
_HEAD_SIZES = ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim")
_HEAD_WIDTHS = ("all_head_size", "inner_dim", "attn_dim", "split_size")  # of all heads
_WIDTHS = ("embed_dim", "hidden_size", "dim", "d_model")  # perhaps of all heads, perhaps of the input
_LAST_SIZE = re.compile(r"hidden_states\.(shape\[(2|-1)\]|size\((2|-1)\))$")
_BIAS = "relative_attention_bias"  # by heads, divided as they are
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
    """Return the plan of all modules of transformers' models in `model` whose shape is known, by their exact names."""
    plan: Plan = {}
    for name, module in model.named_modules():
        if not any(cls.__module__.startswith("transformers.models.") for cls in type(module).__mro__):
            continue
        for child, style in (*_attention(module).items(), *_feed_forward(module).items()):
            plan.setdefault(f"{name}.{child}".strip("."), style)
    return plan


def _attention(module: Any) -> Plan:
    """The plan of an attention module that holds its output layer, or of one around that and its output layer."""
    inner = next((name for name in ("self", "attention") if _projections(_child(module, name))), "")
    if hasattr(module, "set_attention_type"):  # which swaps the inner module while it runs, as BigBird does
        return {}
    holder, prefix = (_child(module, inner), f"{inner}.") if inner else (module, "")
    projections = _projections(holder)
    if not projections:
        return {}
    out = next((name for name in _OUT if _is_linear(_child(holder, name))), "")
    out = f"{prefix}{out}" if out else ("output.dense" if inner and _is_linear(_child(module, "output.dense")) else "")
    if not out:
        return {}
    q = _child(holder, projections[0])
    parts = 1 if len(projections) == 3 else 3
    width, own_out = _features(q) // parts, out.removeprefix(prefix)
    heads = next((value for name in _HEADS if isinstance(value := getattr(holder, name, None), int)), 0)
    size = next((value for name in _HEAD_SIZES if isinstance(value := getattr(holder, name, None), int)), 0)
    size = size or (width // heads if heads and not width % heads else 0)
    if not size or width % size or _inputs(_child(module, out)) != width:
        return {}
    plan: Plan = {}
    for name in projections:
        plan[f"{prefix}{name}"] = Colwise(num_parts=3 if name in _BY_PARTS else 1)
    plan[out] = Rowwise()
    for name, child in holder.named_children():
        if name in projections or name == own_out or not any(True for _ in child.parameters()):
            continue
        if isinstance(child, nn.Embedding) and child.embedding_dim == width // size:
            plan[f"{prefix}{name}"] = EmbeddingParallel(by="features", gather_output=False)
        elif _is_norm_of(child, size):
            plan[f"{prefix}{name}"] = Region(partial_gradients=True)
        else:
            return {}
    if holder._parameters or any(True for _ in _foreign(holder)):
        return {}
    used = names_in_forward(holder)
    arguments = inspect.signature(holder.forward).parameters
    if not set(projections) <= set(used) or _reads_width(holder):
        return {}
    if "position_bias" in arguments and _BIAS not in used:  # of all heads, from elsewhere
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
    """The names of the layers of queries, keys and values in `holder`; empty if it has none."""
    if holder is None:
        return ()
    for names in _QUERIES_KEYS_VALUES:
        if all(_is_linear(_child(holder, name)) for name in names):
            q, k, v = (_child(holder, name) for name in names)
            return names if _features(k) == _features(v) and not _features(q) % _features(k) else ()
    for name in (*_BY_HEADS, *_BY_PARTS):
        child = _child(holder, name)
        if _is_linear(child) and _features(child) == 3 * _inputs(child):
            return (name,)
    return ()


def _feed_forward(module: Any) -> Plan:
    for *up, down in _FEED_FORWARD:
        layers = [_child(module, name) for name in (*up, down)]
        if not all(_is_linear(layer) for layer in layers):
            continue
        hidden, holders = _inputs(layers[-1]), {_holder(module, name) for name in (*up, down)}
        if any(_features(layer) != hidden for layer in layers[:-1]) or hidden == _inputs(layers[0]):
            return {}
        if any(holder._parameters for holder in holders):
            return {}
        if len(holders) == 1 and _works_between(module, up, down):
            return {}
        return {**{name: Colwise() for name in up}, down: Rowwise()}
    return {}


def _works_between(module: nn.Module, up: list[str], down: str) -> bool:
    """Whether a child with parameters works on hidden features, as a norm or a convolution between the layers does."""
    used = names_in_forward(module)
    others = {name: child for name, child in module.named_children() if name not in (*up, down)}
    return any(
        any(param.numel() > 1 for param in child.parameters())
        and (name not in used or any(side_of(name, each, used) > 0 for each in up) and side_of(name, down, used) < 0)
        for name, child in others.items()
    )


def _reads_width(holder: Any) -> bool:
    """Whether the forward takes the width of all heads from its input: by unpacking a shape, or dividing by the heads."""
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


def _foreign(holder: Any) -> Iterator[str]:
    """What of `holder` belongs to all heads, which a part of them would not fit: buffers of the size of none."""
    heads = {getattr(holder, name, None) for name in _HEADS}
    for name, buffer in holder._buffers.items():
        if buffer is not None and buffer.dim() > 1 and any(size in heads and size > 1 for size in buffer.shape):
            yield name


def _holder(module: nn.Module, name: str) -> nn.Module:
    return module.get_submodule(name.rpartition(".")[0])


def _child(module: Any, name: str) -> Any:
    for part in name.split("."):
        module = None if module is None else module._modules.get(part)
    return module


def within_adapters(module: Any) -> Any:
    """Return the layer that low-rank adapters are around, or `module` itself."""
    return module.base_layer if hasattr(module, "lora_A") else module


def _is_linear(module: Any) -> bool:
    module = within_adapters(module)
    return type(module) is nn.Linear or isinstance(module, LinearProxy) or (module is not None and is_conv1d(module))


def _is_norm_of(module: nn.Module, size: int) -> bool:
    """Whether `module` normalises the features of one head."""
    return "norm" in type(module).__name__.lower() and all(param.shape == (size,) for param in module.parameters())


def _features(linear: Any) -> int:
    linear = within_adapters(linear)
    return int(linear.weight.shape[output_dim(linear)])


def _inputs(linear: Any) -> int:
    linear = within_adapters(linear)
    return int(linear.weight.shape[1 - output_dim(linear)])
