"""Plans for modules whose structure is known: of timm, of transformers' GPT-2, and torch's transformer layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from booster.plugin.tensor_parallel.attention import HeadParallel
from booster.plugin.tensor_parallel.styles import Colwise, Region, Rowwise

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
