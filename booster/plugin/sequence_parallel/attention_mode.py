"""What a forward pass on part of a sequence calls: attention is joined over ranks, what else reads several tokens is refused.

A torch function mode sees the functions of torch by name and operand, so nothing of the model is changed. What it cannot see is
arithmetic written by hand that reads other tokens without one of these functions. What of a model cannot run on part of a
sequence is refused before anything is changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from booster.common.torch_internals.autograd_internals import function_modes
from booster.common.torch_internals.tensor_internals import RunningNorm
from booster.plugin.sequence_parallel.all_to_all import Attention, shape_of_attention
from booster.plugin.sequence_parallel.sequence_cut import SequenceCut

_ALL = slice(None)


class CutBatch(Protocol):
    """What a mode needs of a `SequenceParallel`."""

    size: int
    group: dist.ProcessGroup
    buffers: set[int]

    @property
    def attend(self) -> Callable[..., torch.Tensor]: ...


@dataclass(eq=False)
class CutShapes:
    """Ranks that share sequences, of which there are none here: attention of fake tensors, which have shapes alone."""

    size: int
    buffers: set[int]
    group: Any = None

    @property
    def attend(self) -> Callable[..., torch.Tensor]:
        return lambda query, key, value, mask, call: shape_of_attention(query, key, value, mask, call.cut)


class SequenceMode(TorchFunctionMode):
    """While active, attention is that of whole sequences, which were cut as `cut` says; None before any was."""

    def __init__(self, owner: CutBatch, cut: SequenceCut | None) -> None:
        super().__init__()
        self.owner = owner
        self.cut = cut

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        # Inside a compiled function the mode is not asked again, so attention there would be of this rank's tokens.
        if torch.compiler.is_compiling():  # for a function that the user compiled torch then takes the eager way
            raise RuntimeError(
                "flex_attention, or another function that compiles itself, in a forward pass on part of a sequence: what it "
                "reads of other tokens cannot be seen; call F.scaled_dot_product_attention"
            )
        rule = _RULES.get(func)
        if rule is None:
            return func(*args, **(kwargs or {}))
        return rule(self, func, args, kwargs or {})

    @property
    def local_length(self) -> int:
        """Return the tokens of this rank's part; 0 before a batch was cut."""
        return 0 if self.cut is None else self.cut.local_length

    def _attention(self, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
        return self._attend(*args, **kwargs)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        cut = self.cut
        if cut is None:
            raise RuntimeError(
                f"attention in a forward pass of a model with sp_size={self.owner.size} before a batch was cut; give the model "
                "what b.shard_sequence(batch) returns"
            )
        # Cross-attention reads other sequences, of which nothing was cut: its lengths differ.
        lengths = {query.shape[-2], key.shape[-2], value.shape[-2]}
        if lengths != {cut.local_length} or query.dim() != 4:
            raise RuntimeError(
                f"attention of queries {tuple(query.shape)} to keys {tuple(key.shape)}, but shard_sequence gave this rank "
                f"{cut.local_length} of {cut.length} tokens; sequence parallelism divides self-attention of the "
                "sequences that were cut last, (batch, heads, tokens, features)"
            )
        if cut.documents is not None and query.shape[0] != cut.batch_size:
            raise RuntimeError(
                f"attention in {query.shape[0]} sequences, and shard_sequence got the documents of {cut.batch_size}; cut each "
                "micro-batch by itself"
            )
        if attn_mask is not None and is_causal:
            raise RuntimeError("is_causal=True and a mask at once: torch's attention takes one of them")
        if key.shape[1] != query.shape[1] and not enable_gqa:
            raise RuntimeError(
                f"{query.shape[1]} heads of queries and {key.shape[1]} of keys need enable_gqa=True, as torch's attention does"
            )
        if torch.is_autocast_enabled(query.device.type):  # as it would cast them, but before they are sent
            dtype = torch.get_autocast_dtype(query.device.type)
            query, key, value = (x if x.dtype == torch.float64 else x.to(dtype) for x in (query, key, value))
        call = Attention(dropout_p, is_causal, scale, cut, self.owner.group)
        return self.owner.attend(query, key, value, attn_mask, call)

    def _multi_head(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Compute `F.multi_head_attention_forward`; no mode sees the attention inside of it."""
        given = inspect.signature(func).bind(*args, **kwargs)
        # Options that were left out have to be looked at as well.
        given.apply_defaults()
        at = given.arguments
        refused = {
            "need_weights=True": at["need_weights"],
            "bias_k": at["bias_k"] is not None,
            "add_zero_attn=True": at["add_zero_attn"],
            "static_k": at["static_k"] is not None,
            "inputs without a batch": at["query"].dim() != 3,
        }
        for name, is_refused in refused.items():
            if is_refused:
                raise RuntimeError(
                    f"MultiheadAttention with {name} on part of a sequence, which needs the scores of all tokens; call it "
                    "with need_weights=False, and without bias_k, add_zero_attn or static keys"
                )
        heads = at["num_heads"]
        if at["use_separate_proj_weight"]:
            weights = (at["q_proj_weight"], at["k_proj_weight"], at["v_proj_weight"])
        else:
            weights = at["in_proj_weight"].chunk(3)
        biases = (None,) * 3 if at["in_proj_bias"] is None else at["in_proj_bias"].chunk(3)
        # A mode is not active inside of its own call; entered again, it sees the attention below.
        with self:  # time, batch, features to batch, heads, time, features of a head
            q, k, v = (
                F.linear(x, weight, bias).unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)
                for x, weight, bias in zip((at["query"], at["key"], at["value"]), weights, biases, strict=True)
            )
            mask, padding = at["attn_mask"], at["key_padding_mask"]
            is_causal = at["is_causal"] and padding is None  # then the mask is the causal one, as the hint says
            if is_causal:
                mask = None
            elif padding is not None:
                if mask is not None and mask.shape[-1] != padding.shape[-1]:
                    raise RuntimeError(
                        "an attn_mask over all keys with a key_padding_mask of this rank's; give one of them"
                    )
                if at["is_causal"] or (mask is not None and mask.shape[-2] != 1):
                    raise RuntimeError(
                        "a causal or square attn_mask with a key_padding_mask on part of a sequence; leave the padding mask "
                        "out where padding comes last, or call F.scaled_dot_product_attention with a mask over all keys"
                    )
                # The same keys for each head and each query; a mode completes the keys of other ranks.
                mask = padding[:, None, None, :]
            elif mask is not None and mask.dim() == 3:  # of batch times heads
                mask = mask.unflatten(0, (-1, heads))
            if mask is not None and mask.dtype == torch.bool:
                mask = ~mask  # here True is what is not read
            dropout = at["dropout_p"] if at["training"] else 0.0
            out = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal)
            out = F.linear(out.permute(2, 0, 1, 3).flatten(2), at["out_proj_weight"], at["out_proj_bias"])
        return out, None

    # ---------------------------------------------------------------------- what is refused

    def _product(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        length = self.local_length
        # Scores are recognised by their shape, (..., tokens, tokens): by then no name is left of what they are.
        if length > 1 and out.dim() >= 3 and out.shape[-1] == length and out.shape[-2] == length:
            operands = [x for x in args if isinstance(x, torch.Tensor)]
            # Not an outer product, as of frequencies and positions.
            if all(x.dim() >= 3 for x in operands[-2:]) and operands[:1] and operands[-2:][0].shape[-1] > 1:
                self._refuse(func, operands[0], "makes scores of attention between this rank's tokens alone")
        return out

    def _over_dim(self, func: Any, args: Any, kwargs: dict[str, Any], *, place: int = 1) -> Any:
        """place: of the dimension among `args`."""
        x = args[0] if args else kwargs.get("input")
        given = kwargs.get("dim", kwargs.get("dims", args[place] if len(args) > place else None))
        # None is all dimensions, as for the mean of a loss: right, since ranks average it.
        dims = given if isinstance(given, (tuple, list)) else (given,)
        for dim in dims:
            # A bool is `keepdim` or `unbiased`, given by place.
            if isinstance(dim, int) and not isinstance(dim, bool) and self._is_tokens(x, dim):
                self._refuse(func, x, "reads this rank's tokens as if they were all")
        return func(*args, **kwargs)

    def _convolution(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        x, weight = args[0], args[1] if len(args) > 1 else kwargs["weight"]
        sizes = zip(x.shape[-(weight.dim() - 2) :], weight.shape[2:], strict=True)
        if self.local_length > 1 and any(size == self.local_length and kernel > 1 for size, kernel in sizes):
            self._refuse(func, x, "reads this rank's tokens as if they were all")
        return func(*args, **kwargs)

    def _index(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        x, index = args
        parts = index if isinstance(index, tuple) else (index,)
        dims = _dims_of(x, parts)
        for dim, part in zip(dims, parts, strict=False) if dims is not None else ():
            # A step of 2 splits features of rotary embeddings more often than tokens.
            if isinstance(part, slice) and part.step in (None, 1):
                # A table of positions, or of a mask, cut to the length of what is taken for a whole sequence.
                fixed = isinstance(x, nn.Parameter) or id(x) in self.owner.buffers
                if fixed and part.start in (None, 0) and part.stop == self.local_length < x.shape[dim]:
                    self._refuse(func, x, "takes the first tokens of a table for this rank's; index it by position ids")
                if part != _ALL and x.dim() > 2 and self._is_tokens(x, dim) and _shifts(part, x.shape[dim]):
                    self._refuse(func, x, "shifts this rank's tokens as if they were all")
            elif isinstance(part, int) and not isinstance(part, bool) and x.dim() > 2 and self._is_tokens(x, dim):
                self._refuse(func, x, "picks one of this rank's tokens as if they were all")
        return func(*args, **kwargs)

    def _arange(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        ends = [x for x in (*args[:2], kwargs.get("end"), kwargs.get("start")) if isinstance(x, int) and x != 0]
        # A count to another number is of heads, layers or experts.
        if self.local_length > 1 and ends == [self.local_length] and kwargs.get("step", 1) == 1 and len(args) < 3:
            raise RuntimeError(
                f"forward counts positions by torch.arange({self.local_length}), but this rank has {self.local_length} of "
                f"{self.cut.length} tokens, which do not begin at 0; give the model position ids with the batch, which "  # type: ignore[union-attr]
                "b.shard_sequence cuts as it cuts the tokens"
            )
        return func(*args, **kwargs)

    def _is_tokens(self, x: Any, dim: int) -> bool:
        """Whether dimension `dim` of `x` is, by all that can be seen, this rank's tokens."""
        cut = self.cut
        if cut is None or not isinstance(x, torch.Tensor) or not cut.local_length > 1 or x.dim() not in (2, 3):
            return False
        # (batch, tokens) or (batch, tokens, features); what has heads is attention's, which has a rule of its own.
        return dim % x.dim() == 1 and x.shape[:2] == (cut.batch_size, cut.local_length)

    def _refuse(self, func: Any, x: Any, why: str) -> None:
        name = getattr(func, "__name__", str(func))
        raise RuntimeError(
            f"{name} of {tuple(x.shape)} {why}, and this rank has {self.local_length} of {self.cut.length} tokens. Under "  # type: ignore[union-attr]
            "sequence parallelism a model reads other tokens by F.scaled_dot_product_attention, or nn.MultiheadAttention with "
            "need_weights=False; do the rest outside of forward"
        )


def _dims_of(x: torch.Tensor, parts: tuple[Any, ...]) -> list[int] | None:
    """Return which dimension each of `parts` indexes; None where there are masks or tensors among them."""
    if not all(isinstance(part, (int, slice, type(Ellipsis))) or part is None for part in parts):
        return None
    taken = sum(part is not None and part is not Ellipsis for part in parts)
    dims, at = [], 0
    for part in parts:
        dims.append(at)
        at += x.dim() - taken if part is Ellipsis else int(part is not None)
    return dims


def _shifts(part: slice, length: int) -> bool:
    start, stop, _ = part.indices(length)
    return (start, stop) != (0, length)


def active_mode() -> SequenceMode | None:
    """Return the mode of the sequence-parallel forward pass that runs in this thread; None outside of any."""
    active = [mode for mode in function_modes() if isinstance(mode, SequenceMode)]
    return active[-1] if active else None


def _rules() -> dict[Any, Callable[[SequenceMode, Any, Any, dict[str, Any]], Any]]:
    def both(names: str) -> list[Any]:
        # `torch.softmax`, `x.softmax` and `F.softmax` are three functions for a mode.
        places = (torch, torch.Tensor, F)
        return [getattr(place, name) for name in names.split() for place in places if hasattr(place, name)]

    mode = SequenceMode
    rules: dict[Any, Any] = dict.fromkeys(both("matmul bmm baddbmm __matmul__ einsum"), mode._product)
    rules |= dict.fromkeys(
        both(
            "softmax log_softmax mean sum amax amin max min argmax argmin logsumexp cumsum cumprod logcumsumexp cummax std var "
            "std_mean var_mean prod flip sort median all any"
        ),
        mode._over_dim,
    )
    rules |= dict.fromkeys(both("roll"), partial(mode._over_dim, place=2))
    rules |= dict.fromkeys(both("conv1d conv2d conv3d conv_transpose1d conv_transpose2d"), mode._convolution)
    rules |= {torch.Tensor.__getitem__: mode._index, torch.arange: mode._arange}
    rules |= {F.scaled_dot_product_attention: mode._attention, F.multi_head_attention_forward: mode._multi_head}
    return rules


_RULES = _rules()


_OVER_TOKENS: dict[str, tuple[type[nn.Module], ...]] = {
    "normalises over the tokens": (RunningNorm, nn.GroupNorm),
    "reads one token after the other": (nn.RNNBase, nn.RNNCellBase),
    "pools neighbouring tokens": (nn.AvgPool1d, nn.MaxPool1d, nn.LPPool1d, nn.AdaptiveAvgPool1d, nn.AdaptiveMaxPool1d),
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
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation"):
            used = config._attn_implementation
            # None: the model is no transformers model, or one without attention.
            if used not in ("sdpa", "booster_sequence", None):
                cannot = f"computes attention by {used!r}, which is not seen"
                _refuse(name, kind, cannot, "load it with attn_implementation='sdpa'")
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
