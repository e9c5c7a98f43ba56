"""The pipeline engine: a model in stages trains as it does in one process, whatever it is made of."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from booster.micro_batch import divide
from booster.plugin.pipeline import plan_pipeline

DIM, HEADS, LENGTH, WORDS = 16, 2, 6, 23
CPU = torch.device("cpu")
STYLES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zbv": 2}


class Block(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attention = nn.MultiheadAttention(DIM, HEADS, dropout=dropout, batch_first=True)
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.num_calls = 0

    def forward(self, x, mask):
        self.num_calls += 1
        h = self.norm1(x)
        x = x + self.attention(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Embedding and positions before the blocks, a mask beside them, a head behind them that may be the embedding."""

    def __init__(self, num_blocks=4, tied=False, checkpointed=False, dropout=0.0):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, DIM)
        self.position = nn.Parameter(torch.randn(LENGTH, DIM) * 0.1)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, WORDS, bias=False)
        self.checkpointed = checkpointed
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens):
        length = tokens.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        x = self.embedding(tokens) + self.position[:length]
        for block in self.blocks:
            x = checkpoint(block, x, mask, use_reentrant=False) if self.checkpointed else block(x, mask)
        return self.head(self.norm(x))


def loss_of(logits, target):
    return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


def text(size=8, length=LENGTH, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(WORDS, (size, length), generator=draw), torch.randint(WORDS, (size, length), generator=draw)


def pieces(batch, num=4):
    return divide(batch, lambda size: num)


def alone(model, batch, criterion, num, context=nullcontext, seed=1.0):
    """Losses, outputs and gradients of one process over the same micro-batches."""
    model = copy.deepcopy(model)
    losses, outputs = [], []
    with context():
        for part in pieces(batch, num):
            output = model(*part.args, **part.kwargs)
            loss = criterion(output, part.target)
            (loss.float() * (seed / num)).backward()
            losses.append(loss.detach())
            outputs.append(output)
    return losses, outputs, {name: param.grad for name, param in model.named_parameters()}, model


def build(model, rank, world_size, style, split_points=None, group=None, **options):
    plan = plan_pipeline(
        model, pp_size=world_size, style=style, num_model_chunks=STYLES[style], split_points=split_points, device=CPU
    )
    plan.cut(rank)
    return plan.pipeline(group=group, device=CPU, **options)


def compare(model, batch, rank, world_size, style, criterion=loss_of, num=4, context=nullcontext, tolerance=1e-6, **options):
    """Run `model` in one process and in stages, and compare losses, and the gradients of what this rank has."""
    losses, outputs, gradients, _ = alone(model, batch, criterion, num, context, seed=8.0)
    pipeline = build(model, rank, world_size, style, **options)
    with context():
        got, out = pipeline.run(pieces(batch, num), criterion, seed=8.0)
    last = 0 if style == "zbv" else world_size - 1
    assert len(got) == len(out) == (num if rank == last else 0)
    for mine, whole in zip(got, losses, strict=False):
        torch.testing.assert_close(mine, whole.to(mine.dtype), rtol=tolerance, atol=tolerance)
    own = pipeline.own_parameters()
    for name, param in own.items():
        if gradients[name] is None:
            assert param.grad is None or not param.grad.any(), name
        else:
            torch.testing.assert_close(param.grad, gradients[name], rtol=tolerance * 10, atol=tolerance * 8, msg=name)
    return pipeline, sorted(own)


def every_style(rank, world_size):
    torch.manual_seed(0)
    for style in STYLES:
        model = GPT(num_blocks=2 * world_size)
        names = sorted(name for name, _ in model.named_parameters())
        pipeline, own = compare(model, text(), rank, world_size, style)
        everyone = [None] * world_size
        dist.all_gather_object(everyone, own)
        assert sorted(sum(everyone, [])) == names, style
        assert sorted(name for name, _ in pipeline.named_parameters()) == [f"module.{name}" for name in own]
        assert sorted(model.state_dict()) == own
    return own


def test_stages_train_as_one_process_does_under_every_schedule_on_two_ranks(ranks2):
    assert "embedding.weight" in ranks2(every_style)[0]


@pytest.mark.slow
def test_stages_train_as_one_process_does_under_every_schedule_on_four_ranks(ranks4):
    ranks4(every_style)
