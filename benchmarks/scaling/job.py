"""The small jobs by which the formulas of scaling are checked: a decoder, and the cases that train it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.scaling.decoder import PRECISIONS, Model, hybrid
from benchmarks.scaling.plan import Plan, ddp, fsdp, zero
from booster.mixed_precision import BF16MixedPrecision, BF16NaiveMixedPrecision, MixedPrecision
from booster.plugin import HybridParallelPlugin, LowLevelZeroPlugin, Plugin, TorchDDPPlugin, TorchFSDPPlugin

# Sizes divide evenly by 64 elements on 4 ranks, so that nothing is padded.
SMALL = Model(hidden=256, layers=4, heads=4, kv_heads=2, ffn=512, vocabulary=256, sequence=8)
LONG = replace(SMALL, vocabulary=1024, sequence=512)  # activations outweigh weights
MICRO_BATCH = 2


class Attention(nn.Module):
    """Causal, by a fused kernel; with dropout by hand and in full, as in Korthikanti et al."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.width, self.dropout = model.hidden // model.heads, model.dropout
        self.query = nn.Linear(model.hidden, model.hidden, bias=False)
        self.key, self.value = (nn.Linear(model.hidden, model.kv_width, bias=False) for _ in range(2))
        self.out = nn.Linear(model.hidden, model.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.width)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        if self.dropout:
            mixed = dropout((q @ k.transpose(-1, -2)).softmax(-1)) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return self.out(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.gate = nn.Linear(model.hidden, model.ffn, bias=False) if model.gated else None
        self.up = nn.Linear(model.hidden, model.ffn, bias=False)
        self.down = nn.Linear(model.ffn, model.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.attention, self.ffn = Attention(model), FeedForward(model)
        # RMSNorm has no fused kernel on CPU, and would keep more than its input.
        self.norm1, self.norm2 = (nn.LayerNorm(model.hidden, bias=False) for _ in range(2))
        self.drop: Callable[[torch.Tensor], torch.Tensor] = dropout if model.dropout else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.drop(self.ffn(self.norm2(x)))


def dropout(x: torch.Tensor) -> torch.Tensor:
    """With a mask of one byte an element, on every device."""
    return torch.native_dropout(x, 0.1, True)[0]


class Decoder(nn.Module):
    """A decoder with the parameters of `Model`, with Llama's matrices."""

    def __init__(self, model: Model, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(model.vocabulary, model.hidden)
        self.layers = nn.ModuleList(Layer(model) for _ in range(model.layers))
        self.norm = nn.LayerNorm(model.hidden, bias=False)
        self.head = nn.Linear(model.hidden, model.vocabulary, bias=False)
        self.checkpointed = checkpointed

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return self.head(self.norm(x))


TP_PLAN = {
    "embedding": "embedding_rowwise",
    "layers.*.attention.query": "colwise",
    "layers.*.attention.key": "colwise",
    "layers.*.attention.value": "colwise",
    "layers.*.attention.out": "rowwise",
    "layers.*.ffn.gate": "colwise",
    "layers.*.ffn.up": "colwise",
    "layers.*.ffn.down": "rowwise",
    "head": "colwise_gather_output",
}


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class Case:
    """A plan, a precision of `PRECISIONS`, and the plugin and its options that carry the plan out.

    accumulates: gradients of micro-batches are reduced once.
    """

    name: str
    plan: Plan
    precision: str
    plugin: Callable[..., Plugin]
    options: dict[str, Any] = field(default_factory=dict)
    num_micro_batches: int = 1
    checkpointed: bool = False
    accumulates: bool = True
    model: Model = SMALL

    @property
    def tokens(self) -> int:
        """Of one step, on one data-parallel rank."""
        return self.num_micro_batches * MICRO_BATCH * self.model.sequence


def make_precision(name: str, **options: Any) -> MixedPrecision:
    """One of `PRECISIONS` in bfloat16, whose bytes are those of float16."""
    if name == "fp32":
        return MixedPrecision()
    if name == "autocast":
        return BF16MixedPrecision(**options)
    forms: dict[str, Any] = {"naive, fp32 masters": "fp32", "naive, split": "split", "naive, no masters": "none"}
    return BF16NaiveMixedPrecision(master_weights=forms[name], **options)


def run_step(booster: Any, model: Any, optimizer: Any, criterion: Any, inputs: torch.Tensor, case: Case) -> None:
    """One optimizer step over all micro-batches, without clearing gradients."""
    if isinstance(booster.plugin, HybridParallelPlugin):
        booster.execute_pipeline(iter([(inputs, inputs)]), model, criterion, optimizer)
    else:
        num = case.num_micro_batches if case.accumulates else 1
        with booster.accumulate(model, optimizer, num_micro_batches=num) if num > 1 else nullcontext():
            for part in inputs.split(MICRO_BATCH):
                booster.backward(criterion(model(part), part), optimizer)
    optimizer.step()


# ---- cases


def cases(n: int) -> list[Case]:
    """Cases for `n` ranks, 2 or 4."""
    zero1, zero2, scattered = {"stage": 1}, {"stage": 2}, {"reduce_scatter": True}
    found = [Case("DDP", ddp(n), precision, TorchDDPPlugin) for precision in PRECISIONS]
    found += [Case("ZeRO-1", zero(n, 1), precision, LowLevelZeroPlugin, zero1) for precision in PRECISIONS]
    found += [Case("ZeRO-2", zero(n, 2), precision, LowLevelZeroPlugin, zero2) for precision in PRECISIONS]
    found += [
        Case("ZeRO-1, reduce_scatter", zero(n, 1, reduce_scatter=True), precision, LowLevelZeroPlugin, scattered)
        for precision in PRECISIONS
    ]
    found += [Case("FSDP", fsdp(n), precision, TorchFSDPPlugin) for precision in PRECISIONS]
    kept, half = {"reshard_after_forward": False}, "naive, fp32 masters"
    found += [
        Case("FSDP, kept", fsdp(n, reshard=False), half, TorchFSDPPlugin, kept),
        Case("DDP, 2 micro-batches", ddp(n), half, TorchDDPPlugin, {}, 2),
        Case("ZeRO-2, 2 micro-batches", zero(n, 2), half, LowLevelZeroPlugin, zero2, 2),
        Case("ZeRO-2, small buckets", zero(n, 2), "fp32", LowLevelZeroPlugin, {**zero2, "bucket_cap_mb": 0.5}),
        Case("ZeRO-2, small buckets", zero(n, 2), half, LowLevelZeroPlugin, {**zero2, "bucket_cap_mb": 0.5}),
        Case("FSDP, 2 micro-batches", fsdp(n), half, TorchFSDPPlugin, {}, 2),
        Case("ZeRO-2, reduced twice", zero(n, 2), half, LowLevelZeroPlugin, zero2, 2, accumulates=False),
        Case("FSDP, reduced twice", fsdp(n), half, TorchFSDPPlugin, {}, 2, accumulates=False),
        Case("FSDP, checkpointed", fsdp(n), half, TorchFSDPPlugin, checkpointed=True),
        Case("hybrid dp, stage 0", hybrid(n), half, *hybrid_plugin(1, 1)),
        Case("hybrid dp, stage 1", hybrid(n, zero_stage=1), half, *hybrid_plugin(1, 1, zero_stage=1)),
    ]
    found += [Case("TP 2", hybrid(n, tp=2), precision, *hybrid_plugin(2, 1)) for precision in PRECISIONS]
    parallel: dict[str, Any] = {"tp": 2, "sequence_parallel": True}
    sp = {"sequence_parallelism": True}
    interleaved = {"pp_style": "interleaved", "num_model_chunks": 2}
    found += [
        Case("TP 2, checkpointed", hybrid(n, tp=2), half, *hybrid_plugin(2, 1), checkpointed=True),
        Case("TP 2, SP", hybrid(n, **parallel), half, *hybrid_plugin(2, 1, **sp)),
        Case("TP 2, SP", hybrid(n, **parallel), "autocast", *hybrid_plugin(2, 1, **sp)),
    ]
    found += [
        Case("TP 2, 2 micro-batches", hybrid(n, tp=2), half, *hybrid_plugin(2, 1), 2),
        Case("TP 2, SP, 2 micro-batches", hybrid(n, **parallel), half, *hybrid_plugin(2, 1, **sp), 2),
        Case("PP 2, 1F1B", hybrid(n, pp=2), half, *hybrid_plugin(1, 2), 4),
        Case("PP 2, 1F1B", hybrid(n, pp=2), "autocast", *hybrid_plugin(1, 2), 4),
        Case("PP 2, GPipe", hybrid(n, pp=2), half, *hybrid_plugin(1, 2, pp_style="gpipe"), 4),
        Case("PP 2, interleaved", hybrid(n, pp=2, chunks=2), half, *hybrid_plugin(1, 2, **interleaved), 4),
    ]
    found += long_cases(n)
    if n == 4:
        copies = {"replicate_size": 2}
        found += [
            Case("HSDP 2 x 2", fsdp(4, replicas=2), half, TorchFSDPPlugin, copies),
            Case("HSDP 2 x 2", fsdp(4, replicas=2), "naive, split", TorchFSDPPlugin, copies),
            Case("HSDP 2 x 2, reduced twice", fsdp(4, replicas=2), half, TorchFSDPPlugin, copies, 2, accumulates=False),
            Case("TP 2 x dp 2, stage 2", hybrid(4, tp=2, zero_stage=2), half, *hybrid_plugin(2, 1, zero_stage=2)),
            Case(
                "TP 2 SP x dp 2, stage 1",
                hybrid(4, zero_stage=1, **parallel),
                half,
                *hybrid_plugin(2, 1, zero_stage=1, **sp),
            ),
            Case("PP 2 x dp 2, stage 1", hybrid(4, pp=2, zero_stage=1), half, *hybrid_plugin(1, 2, zero_stage=1), 4),
            Case("PP 2 x TP 2", hybrid(4, tp=2, pp=2), half, *hybrid_plugin(2, 2), 4),
            Case("PP 2 x TP 2, SP", hybrid(4, pp=2, **parallel), half, *hybrid_plugin(2, 2, **sp), 4),
        ]
    return found


def long_cases(n: int) -> list[Case]:
    """Cases whose highest point is when backward begins."""
    half, small = "naive, fp32 masters", {"stage": 2, "bucket_cap_mb": 0.5}
    sp = {"sequence_parallelism": True}
    return [
        Case("long, DDP", ddp(n), "autocast", TorchDDPPlugin, model=LONG),
        Case("long, ZeRO-2", zero(n, 2), "fp32", LowLevelZeroPlugin, small, model=LONG),
        Case("long, ZeRO-2", zero(n, 2), half, LowLevelZeroPlugin, small, model=LONG),
        Case("long, FSDP", fsdp(n), "fp32", TorchFSDPPlugin, model=LONG),
        Case("long, FSDP", fsdp(n), "autocast", TorchFSDPPlugin, model=LONG),
        Case("long, FSDP", fsdp(n), half, TorchFSDPPlugin, model=LONG),
        Case("long, FSDP, checkpointed", fsdp(n), half, TorchFSDPPlugin, checkpointed=True, model=LONG),
        Case("long, TP 2, SP", hybrid(n, tp=2, sequence_parallel=True), half, *hybrid_plugin(2, 1, **sp), model=LONG),
        Case("long, PP 2, 1F1B", hybrid(n, pp=2), half, *hybrid_plugin(1, 2), 4, model=LONG),
    ]


def hybrid_plugin(tp: int, pp: int, **options: Any) -> tuple[Callable[..., Plugin], dict[str, Any]]:
    given = {"tp_size": tp, "pp_size": pp, "microbatch_size": MICRO_BATCH, **options}
    return HybridParallelPlugin, {**given, **({"tp_plan": TP_PLAN} if tp > 1 else {})}
