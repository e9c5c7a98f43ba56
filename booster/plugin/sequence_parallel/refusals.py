"""What of a model cannot run on part of a sequence, found before anything is changed."""

from __future__ import annotations

from typing import Any

from torch import nn

from booster.common.torch_internals.tensor_internals import RunningNorm

_OVER_TOKENS: dict[str, tuple[type[nn.Module], ...]] = {
    "normalises over the tokens": (RunningNorm, nn.GroupNorm),
    "reads one token after the other": (nn.RNNBase, nn.RNNCellBase),
    "pools neighbouring tokens": (
        nn.AvgPool1d,
        nn.MaxPool1d,
        nn.LPPool1d,
        nn.AdaptiveAvgPool1d,
        nn.AdaptiveMaxPool1d,
    ),
}


def check_model(model: nn.Module, *, by_heads: bool, size: int, tp_size: int) -> None:
    """Raise ValueError, with the name of the module, for what reads several tokens other than by attention that is seen.

    by_heads: heads are divided among `size` ranks, after `tp_size` ranks of tensor parallelism.
    """
    for name, module in model.named_modules():
        kind = type(module).__name__
        for reason, classes in _OVER_TOKENS.items():
            if isinstance(module, classes):
                _refuse(name, kind, reason, "leave sp_size at 1, or use a layer that works token by token")
        if isinstance(module, (nn.Conv1d, nn.ConvTranspose1d)) and module.kernel_size[0] > 1:
            _refuse(name, kind, "reads neighbouring tokens", "leave sp_size at 1, or use kernel_size=1")
        if getattr(module, "_compiled_call_impl", None) is not None or "_orig_mod" in module._modules:
            _refuse(name, kind, "is compiled, where attention cannot be seen", "boost the model as it was before")
        if isinstance(module, nn.MultiheadAttention):
            if by_heads:
                _check_heads(name, module.num_heads, size, tp_size)
            if module.bias_k is not None or module.add_zero_attn:
                _refuse(name, kind, "has add_bias_kv or add_zero_attn, keys that belong to no token", "leave them out")
        config = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation"):
            _check_config(name, kind, config, by_heads=by_heads, size=size, tp_size=tp_size)


def _check_config(name: str, kind: str, config: Any, *, by_heads: bool, size: int, tp_size: int) -> None:
    used = config._attn_implementation
    if used not in ("sdpa", "booster_sequence", None):
        _refuse(
            name, kind, f"computes attention by {used!r}, which is not seen", "load it with attn_implementation='sdpa'"
        )
    if used == "sdpa" and by_heads and isinstance(getattr(config, "num_attention_heads", None), int):
        _check_heads(name, config.num_attention_heads, size, tp_size)


def _check_heads(name: str, heads: int, size: int, tp_size: int) -> None:
    if heads % (size * tp_size):
        divided = f"sp_size={size}" + (f" times tp_size={tp_size}" if tp_size > 1 else "")
        raise ValueError(
            f"{name or 'the model'!r} has {heads} heads, which do not divide by {divided}; choose sizes that divide them, or "
            'sequence_parallelism_mode="ring_attn", which divides no heads'
        )


def _refuse(name: str, kind: str, reason: str, fix: str) -> None:
    raise ValueError(
        f"{name or 'the model'!r} is a {kind} and {reason}, while sequence parallelism gives each rank a part of the sequence: "
        f"{fix}"
    )
