"""The pipeline engine: a model in stages trains as it does in one process, whatever it is made of."""

import copy
import importlib
import importlib.util
import warnings
from collections import Counter
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from counts import count
from matrix import PRECISIONS
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import booster
from booster import Booster
from booster.common.torch_internals.pipeline_internals import computes_weights_apart
from booster.mixed_precision import BF16MixedPrecision
from booster.mixed_precision.half_products.product_choice import HalfProducts
from booster.model.params import local_shard
from booster.plugin import HybridParallelPlugin, SingleDevice
from booster.plugin.pipeline import PipelinePlan, StagePipeline
from booster.tensors.trees import divide

DIM, HEADS, LENGTH, WORDS = 16, 2, 6, 23
CPU = torch.device("cpu")
STYLES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zbv": 2}
# One schedule of one chunk a stage and one of two each time, where a test has little to do with schedules.
some_styles = pytest.mark.parametrize(
    "styles", [["1f1b", "zbv"], pytest.param(["gpipe", "interleaved"], marks=pytest.mark.slow)], ids=" ".join
)


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
    """Embedding and positions before the blocks, a mask that they read, a head behind them that may be the embedding."""

    def __init__(self, num_blocks=4, tied=False, checkpointed=False, dropout=0.0):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, DIM)
        self.position = nn.Parameter(torch.randn(LENGTH, DIM) * 0.1)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, WORDS, bias=False)
        self.checkpointed, self.dropout = checkpointed, dropout
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens):
        length = tokens.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        x = F.dropout(self.embedding(tokens) + self.position[:length], self.dropout, self.training)
        for block in self.blocks:
            x = checkpoint(block, x, mask, use_reentrant=False) if self.checkpointed else block(x, mask)
        return self.head(F.dropout(self.norm(x), self.dropout, self.training))


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
            torch.autograd.backward(loss.float() * (seed / num))
            losses.append(loss.detach())
            outputs.append(output)
    return losses, outputs, {name: param.grad for name, param in model.named_parameters()}, model


def build(model, rank, world_size, style, split_points=None, group=None, **options):
    plan = PipelinePlan(
        model, pp_size=world_size, style=style, num_model_chunks=STYLES[style], split_points=split_points, device=CPU
    )
    plan.cut(rank)
    return StagePipeline(plan, group=group, device=CPU, **options)


def compare(
    model, batch, rank, world_size, style, criterion=loss_of, num=4, context=nullcontext, tolerance=1e-6, **options
):
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


def every_style(rank, world_size, styles):
    torch.manual_seed(0)
    for style in styles:
        model = GPT(num_blocks=world_size * STYLES[style])
        names = sorted(name for name, _ in model.named_parameters())
        pipeline, own = compare(model, text(), rank, world_size, style)
        everyone = [None] * world_size
        dist.all_gather_object(everyone, own)
        assert sorted(sum(everyone, [])) == names, style
        assert sorted(name for name, _ in pipeline.named_parameters()) == [f"module.{name}" for name in own]
        assert sorted(model.state_dict()) == own
    return own


def test_stages_train_as_one_process_does_under_every_schedule_on_two_ranks(ranks2):
    assert "embedding.weight" in ranks2(every_style, list(STYLES))[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "styles", [["1f1b", "interleaved"], pytest.param(["gpipe", "zbv"], marks=pytest.mark.slow)], ids=" ".join
)
def test_stages_train_as_one_process_does_under_every_schedule_on_four_ranks(ranks4, styles):
    ranks4(every_style, styles)


# ---------------------------------------------------------------------------------------------- kinds of model


class Chain(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Embedding(WORDS, DIM),
            *(nn.TransformerEncoderLayer(DIM, HEADS, 2 * DIM, dropout=0.0, batch_first=True) for _ in range(3)),
            nn.LayerNorm(DIM),
            nn.Linear(DIM, WORDS),
        )


class Encoder(nn.Module):
    """torch's own encoder, with its loop over layers in forward, and a padding mask."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, DIM)
        layer = nn.TransformerEncoderLayer(DIM, HEADS, 2 * DIM, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, norm=nn.LayerNorm(DIM))
        self.head = nn.Linear(DIM, WORDS)

    def forward(self, tokens):
        return self.head(self.encoder(self.embedding(tokens), src_key_padding_mask=tokens == 0))


class Translator(nn.Module):
    """Every decoder block gets the encoder's memory, which comes from before the cut."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, DIM)
        self.encoder = nn.TransformerEncoderLayer(DIM, HEADS, 2 * DIM, dropout=0.0, batch_first=True)
        layer = nn.TransformerDecoderLayer(DIM, HEADS, 2 * DIM, dropout=0.0, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, 6)
        self.head = nn.Linear(DIM, WORDS)

    def forward(self, tokens):
        memory = self.encoder(self.embedding(tokens))
        return self.head(self.decoder(self.embedding(tokens.flip(1)), memory))


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x, scale=1.0):
        return x + torch.tanh(self.linear(x)) * scale, x.detach().mean()


class Tuples(nn.Module):
    """Blocks that return a tuple and are called by keyword."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(4, DIM)
        self.layers = nn.ModuleList(Pair() for _ in range(4))
        self.head = nn.Linear(DIM, WORDS)

    def forward(self, *, features, labels=None):
        x = self.stem(features)
        for layer in self.layers:
            x = layer(x=x, scale=0.5)[0]
        return {"logits": self.head(x), "features": features}


class Convolutions(nn.Module):
    """BatchNorm in every block, and values of the statistics that only the stage itself may write."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4, affine=False)
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(4))
        )
        self.head = nn.Linear(4, WORDS)

    def forward(self, images):
        return self.head(self.layers(self.norm(self.stem(images))).mean((2, 3)))


class Writing(Block):
    """Writes to what it is given and to float buffers, whole and in part, and hands one to a function with an activation."""

    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros(DIM))
        self.register_buffer("both", torch.zeros(2, DIM))
        self.register_buffer("factor", torch.linspace(0.5, 1.5, DIM))

    def forward(self, x, mask):
        x = x.mul_(0.9)
        if self.training:
            with torch.no_grad():
                mean = x.float().mean((0, 1)).to(self.average.dtype)
                self.average.lerp_(mean, 0.1)
                self.both[0] += 0.1 * mean
        return super().forward(torch.mul(x, self.factor), mask) + 0.1 * (self.average + self.both[0])


def writing(num_blocks=4):
    model = GPT(num_blocks=num_blocks)
    model.blocks = nn.ModuleList(Writing() for _ in model.blocks)
    return model


def classes(logits, target):
    return F.cross_entropy(logits.float(), target)


KINDS = {
    "chain": Chain,
    "encoder": Encoder,
    "translator": Translator,
    "checkpointed": lambda: GPT(checkpointed=True),
    "uneven": lambda: GPT(num_blocks=7),
    "tuples": Tuples,
    "writing": writing,
}
FORWARDS = [
    (kind, style)
    for style in ("gpipe", "interleaved", "zbv")
    for kind in KINDS
    if style == "gpipe" or kind != "chain"  # which has too few layers to cut each stage in two
]


def own_kind(rank, world_size, kind, style):
    torch.manual_seed(0)
    model = KINDS[kind]()
    if kind != "tuples":
        compare(model, text(), rank, world_size, style)
        return
    features = torch.randn(8, 5, 4)
    batch = {"features": features, "labels": torch.randint(WORDS, (8, 5))}

    def by_keyword(output, target):
        return loss_of(output["logits"], target["labels"]) + output["features"].mean()

    compare(model, batch, rank, world_size, style, by_keyword)


def is_slow(kind, style):
    """Each kind is tried once each time, the schedules by turns."""
    return style != ("gpipe", "interleaved", "zbv")[list(KINDS).index(kind) % 3]


@pytest.mark.parametrize(
    ("kind", "style"), [pytest.param(*case, marks=pytest.mark.slow if is_slow(*case) else ()) for case in FORWARDS]
)
def test_a_forward_of_the_users_own_runs_on_every_stage(ranks2, kind, style):
    ranks2(own_kind, kind, style)


class Flat(Block):
    """Returns a view of what it computed, as OPT's layers do."""

    def forward(self, x, mask):
        return super().forward(x, mask).flatten(0, 1).view_as(x)


def views(rank, world_size, styles):
    torch.manual_seed(0)
    for style in styles:
        model = GPT(num_blocks=world_size * STYLES[style])
        model.blocks = nn.ModuleList(Flat() for _ in model.blocks)
        compare(model, text(), rank, world_size, style, lambda logits, target: loss_of(logits, target)[None].view(()))


@some_styles
def test_blocks_and_losses_that_are_views_cross_stages_in_every_schedule(ranks2, styles):
    ranks2(views, styles)


def statistics(rank, world_size):
    torch.manual_seed(0)
    model = Convolutions()
    batch = torch.randn(8, 3, 5, 5), torch.randint(WORDS, (8,))
    *_, reference = alone(model, batch, classes, 4)
    pipeline, _ = compare(model, batch, rank, world_size, "1f1b", classes)
    state = pipeline.module.state_dict()
    assert ("norm.running_mean" in state) == (rank == 0)
    for name, value in state.items():
        torch.testing.assert_close(value, reference.state_dict()[name], msg=name)
    return sorted(state)


def test_running_statistics_belong_to_one_stage_and_see_each_micro_batch_once(ranks2):
    first, second = ranks2(statistics)
    assert not set(first) & set(second)
    assert sorted(first + second) == sorted(Convolutions().state_dict())


def writing_in_half(rank, world_size, precision):
    states, losses = [], []
    for plugin in (SingleDevice(), HybridParallelPlugin(1, 2, num_micro_batches=2)):
        torch.manual_seed(0)
        b, model = Booster("cpu", PRECISIONS[precision](), plugin), writing()
        model, optimizer, criterion, *_ = b.boost(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_of)
        for step in range(2):
            if len(states):
                losses.append(b.execute_pipeline(iter([text(seed=step)]), model, criterion, optimizer)["loss"])
            else:
                with b.accumulate(model, optimizer, 2):
                    passes = [criterion(model(*part.args), part.target) for part in pieces(text(seed=step), 2)]
                    for loss in passes:
                        b.backward(loss, optimizer)
                losses.append(torch.stack(passes).detach().mean())
            optimizer.step()
            optimizer.zero_grad()
        states.append(model.state_dict())
    torch.testing.assert_close(torch.stack(losses[2:]), torch.stack(losses[:2]), rtol=1e-5, atol=1e-6)
    for name, value in states[1].items():
        torch.testing.assert_close(value, states[0][name], msg=name)
    assert any(name.endswith("average") and value.any() for name, value in states[1].items())


@pytest.mark.parametrize("precision", ["bf16_naive", "fp16_naive", "fp16_apex O2"])
def test_blocks_write_float_buffers_where_weights_are_in_half(ranks2, precision):
    ranks2(writing_in_half, precision)


def tied(rank, world_size):
    for style in STYLES:
        torch.manual_seed(0)
        model = GPT(num_blocks=world_size * STYLES[style], tied=True)
        pipeline, own = compare(model, text(), rank, world_size, style)
        weight = pipeline.own_parameters().get("embedding.weight")
        across = style != "zbv"  # there, the rank of the first stage has the last one too
        assert (weight is not None) == (rank in ((0, world_size - 1) if across else (0,)))
        if weight is not None:
            assert pipeline.num_copies(weight) == (2 if across else 1)
        others = [param for name, param in pipeline.own_parameters().items() if name != "embedding.weight"]
        assert {pipeline.num_copies(param) for param in others} == {1}
        # A second run adds to the gradients, and sums its own alone.
        before = {name: param.grad.clone() for name, param in pipeline.own_parameters().items()}
        pipeline.run(pieces(text()), loss_of, seed=8.0)
        for name, param in pipeline.own_parameters().items():
            torch.testing.assert_close(param.grad, 2 * before[name], msg=name)


def test_gradients_of_tied_weights_are_summed_over_their_stages(ranks2):
    ranks2(tied)


def packages(*names):
    """Packages, also where torchvision's compiled operators do not load."""
    path = Path(__file__).parents[2] / "examples" / "vit" / "torchvision_ops.py"
    spec = importlib.util.spec_from_file_location("torchvision_ops", path)
    module = importlib.util.module_from_spec(spec)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        spec.loader.exec_module(module)
        with suppress(ModuleNotFoundError):
            module.import_torchvision()
        return [importlib.import_module(name) for name in names]


def library_models(rank, world_size):
    timm, transformers = packages("timm", "transformers")
    torch.manual_seed(0)
    vit = timm.models.vision_transformer.VisionTransformer(
        img_size=8, patch_size=4, embed_dim=DIM, depth=4, num_heads=HEADS, num_classes=WORDS
    )
    images = torch.randn(8, 3, 8, 8), torch.randint(WORDS, (8,))
    compare(vit, images, rank, world_size, "1f1b", classes)
    sizes = {"vocab_size": WORDS, "num_hidden_layers": 4, "hidden_size": DIM, "num_attention_heads": HEADS}
    llama = transformers.LlamaConfig(**sizes, intermediate_size=2 * DIM, num_key_value_heads=1)
    gpt2 = transformers.GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    bert = transformers.BertConfig(
        **sizes, intermediate_size=2 * DIM, hidden_dropout_prob=0, attention_probs_dropout_prob=0
    )
    ids, _ = text()
    batch = {"input_ids": ids, "attention_mask": (torch.arange(LENGTH) < 5).expand(8, -1).long(), "labels": ids}

    def own_loss(output, target):
        return output.loss

    for config in (llama, gpt2, bert):
        for attention in ("sdpa", "eager"):
            config._attn_implementation = attention
            model = {
                "llama": transformers.LlamaForCausalLM,
                "gpt2": transformers.GPT2LMHeadModel,
                "bert": transformers.BertForMaskedLM,
            }[config.model_type](config)
            compare(model, batch, rank, world_size, "1f1b", own_loss)
    model = transformers.LlamaForCausalLM(llama)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # its newer name is not in every version
        model.gradient_checkpointing_enable()
    compare(model, batch, rank, world_size, "interleaved", own_loss)
    compare(transformers.GPT2LMHeadModel(gpt2), batch, rank, world_size, "zbv", own_loss)


@pytest.mark.slow
def test_models_of_timm_and_transformers_need_no_change(ranks2, timm, transformers):
    ranks2(library_models)


class Early(nn.Module):
    """A norm and projections to and from narrow embeddings, registered before the blocks, of which two are used after them."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, DIM // 2)
        self.project_out, self.project_in = nn.Linear(DIM, DIM // 2), nn.Linear(DIM // 2, DIM)
        self.norm = nn.LayerNorm(DIM)
        self.blocks = nn.ModuleList(Pair() for _ in range(2))
        self.head = nn.Linear(DIM // 2, WORDS, bias=False)

    def forward(self, tokens):
        x = self.project_in(self.embedding(tokens))
        for block in self.blocks:
            x, _ = block(x)
        return self.head(self.project_out(self.norm(x)))


def early(rank, world_size):
    torch.manual_seed(0)
    return compare(Early(), text(), rank, world_size, "1f1b")[1]


def test_what_is_registered_before_the_blocks_and_used_after_them_is_on_the_last_stage(ranks2):
    first, last = ranks2(early)
    parts = [{name.partition(".")[0] for name in own} for own in (first, last)]
    assert parts == [{"embedding", "project_in", "blocks"}, {"blocks", "norm", "project_out", "head"}]


# ---------------------------------------------------------------------------------------------- precision


def bf16():
    return torch.autocast("cpu", torch.bfloat16)


def bf16_and_attention():
    stack = ExitStack()
    stack.enter_context(bf16())
    products = HalfProducts(torch.bfloat16, sdpa_fp32=True)
    products.choose("native")
    stack.enter_context(products.forward_context("cpu"))
    return stack


class Recorder(nn.Module):
    """A block that says which dtype it gets."""

    def __init__(self, dtypes):
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.dtypes = dtypes

    def __deepcopy__(self, memo):
        clone = Recorder([])  # copies do not report
        clone.linear = copy.deepcopy(self.linear, memo)
        return clone

    def forward(self, x):
        self.dtypes.append(x.dtype)
        return self.linear(x)


# half weights or not, recomputed or not, under which context
WAYS = {
    "autocast": (False, False, bf16),
    "attention in float32": (False, False, bf16_and_attention),
    "half weights": (True, False, nullcontext),
    "recomputed": (False, True, bf16_and_attention),
}


def precision_of(rank, world_size, style, way):
    half, checkpointed, context = WAYS[way]
    torch.manual_seed(0)
    model = GPT(num_blocks=world_size * STYLES[style], checkpointed=checkpointed)
    compare(model.bfloat16() if half else model, text(), rank, world_size, style, context=context)


def dtypes_that_cross(rank, world_size):
    torch.manual_seed(0)
    compare(GPT(num_blocks=2).half(), text(), rank, world_size, "1f1b")
    dtypes = []
    model = nn.Sequential(*(Recorder(dtypes) for _ in range(4)))
    batch = torch.randn(8, DIM), torch.randn(8, DIM)
    compare(model, batch, rank, world_size, "1f1b", F.mse_loss, context=bf16)
    first = torch.float32 if rank == 0 else torch.bfloat16
    assert dtypes == [first, torch.bfloat16] * 4
    with bf16():  # the weight is not cast, so a stage that guessed the dtype of the context would be wrong
        compare(nn.Sequential(*(Block16() for _ in range(4))), batch, rank, world_size, "1f1b", F.mse_loss)


class Block16(nn.Module):
    """Ends in float32 under autocast, as a residual stream does."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)

    def forward(self, x):
        return x + self.norm(x).float()


@pytest.mark.crossed
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("way", WAYS)
def test_activations_cross_in_the_dtype_that_the_precision_makes(ranks2, way, style):
    ranks2(precision_of, style, way)


def test_a_stage_gets_the_dtype_that_the_stage_before_it_makes(ranks2):
    ranks2(dtypes_that_cross)


def parts_of_backward(rank, world_size):
    """By context: how often the schedule asked for gradients of inputs, of weights and of both."""
    found = []
    for context, checkpointed in ((nullcontext, False), (bf16_and_attention, False), (bf16_and_attention, True)):
        torch.manual_seed(0)
        pipeline = build(GPT(checkpointed=checkpointed), rank, world_size, "zbv")
        asked = Counter()
        with context():
            pipeline.run(pieces(text()), loss_of, seed=1.0)
            for chunk in pipeline._runners[True][1]._schedule._stages:
                run = chunk.backward_maybe_with_nosync

                def count(kind, *args, run=run, asked=asked, **kwargs):
                    asked[kind] += 1
                    return run(kind, *args, **kwargs)

                chunk.backward_maybe_with_nosync = count
            pipeline.run(pieces(text()), loss_of, seed=1.0)
        found.append(dict(asked))
    return found


@pytest.mark.skipif(
    not computes_weights_apart(), reason="of torch 2.13: before, they are computed with those of inputs"
)
def test_a_precision_that_intercepts_functions_keeps_the_weights_part_of_backward_apart(ranks2):
    for plain, *under_modes in ranks2(parts_of_backward):
        assert plain["weight"] > 0
        assert under_modes == [plain, plain]


class Twice(Block):
    def __init__(self):
        super().__init__()
        self.again = nn.Linear(DIM, DIM)

    def forward(self, x, mask):
        return super().forward(self.again(F.gelu(self.again(x))), mask)


def a_layer_used_twice(rank, world_size, styles):
    for style in styles:
        torch.manual_seed(0)
        model = GPT()
        model.blocks = nn.ModuleList(Twice() for _ in range(world_size * STYLES[style]))
        compare(model, text(), rank, world_size, style)


@some_styles
def test_a_layer_that_its_block_uses_twice_gets_its_gradient_once_under_every_schedule(ranks2, styles):
    ranks2(a_layer_used_twice, styles)


class Detaching(Block):
    """Returns what comes from weights alone, and what a detached input makes, next to what comes from its input."""

    def __init__(self):
        super().__init__()
        self.side = nn.Linear(DIM, DIM)

    def forward(self, x, mask, side, norm):
        return super().forward(x, mask) + side * norm, self.side(x.detach()), self.up.weight.square().mean()


class Sides(GPT):
    def __init__(self, detached, **options):
        super().__init__(**options)
        self.detached = detached
        self.blocks = nn.ModuleList(Detaching() for _ in self.blocks)

    def forward(self, tokens):
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        x = self.embedding(tokens)
        side, norm = x.detach(), x.new_ones(())
        for number, block in enumerate(self.blocks):
            x, side, norm = block(x.detach() if number == self.detached else x, mask, side, norm)
        return self.head(x + side) + norm


def ways_past_the_input(rank, world_size, styles):
    for style in styles:
        for detached in (None, 1, 2):
            torch.manual_seed(0)
            model = Sides(detached, num_blocks=world_size * STYLES[style])
            compare(model, text(), rank, world_size, style)


@some_styles
def test_weights_that_no_way_from_a_stage_s_input_leads_through_get_gradients(ranks2, styles):
    ranks2(ways_past_the_input, styles)


class Cut(GPT):
    def forward(self, tokens):
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        x = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            x = block(x.detach() if number == 2 else x, mask)
        return self.head(x)


def detached_and_sharded(rank, world_size):
    torch.manual_seed(0)
    model = Cut(num_blocks=4)
    reference = copy.deepcopy(model)
    b = Booster("cpu", "fp32", HybridParallelPlugin(tp_size=1, pp_size=2, zero_stage=1, num_micro_batches=2))
    model, optimizer, *_ = b.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    b.execute_pipeline(iter([text()]), model, loss_of, optimizer)
    optimizer.step()
    loss_of(reference(text()[0]), text()[1]).backward()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value.full_tensor(), reference.state_dict()[name], msg=name)


def test_a_sharded_stage_may_detach_all_that_it_sends(ranks4):
    ranks4(detached_and_sharded)


def overflow(rank, world_size):
    """The scale is applied once, in float32, and reported losses do not have it."""
    torch.manual_seed(0)
    model = GPT(num_blocks=2).bfloat16()
    losses, _, gradients, _ = alone(model, text(), loss_of, 2)
    pipeline = build(model, rank, world_size, "gpipe")
    got, _ = pipeline.run(pieces(text(), 2), lambda out, y: loss_of(out, y).bfloat16(), seed=torch.tensor(2.0**16))
    for mine, whole in zip(got, losses, strict=False):
        torch.testing.assert_close(mine, whole.bfloat16().float())
        assert mine.dtype == torch.float32
    for name, param in pipeline.own_parameters().items():
        torch.testing.assert_close(
            param.grad.float() / 2.0**16, gradients[name].float(), rtol=0.05, atol=1e-3, msg=name
        )


class Multiplied(TorchDispatchMode):
    """The dtypes of matrix products, in forward and in backward passes."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in ("mm", "addmm", "bmm", "baddbmm"):
            self.seen["forward" if torch.is_grad_enabled() else "backward", args[-1].dtype] += 1
        return func(*args, **(kwargs or {}))


def products_of_kept(rank, world_size, style):
    precision = BF16MixedPrecision(keep_fp32=nn.Linear)
    plugin = HybridParallelPlugin(1, 2, pp_style=style, num_microbatches=4, num_model_chunks=STYLES[style])
    b = Booster("cpu", precision, plugin, half_products="native")
    torch.manual_seed(0)
    net = nn.ModuleList(nn.Sequential(nn.Linear(DIM, DIM), nn.GELU()) for _ in range(4))
    model, optimizer, criterion, *_ = b.boost(Rows(net), torch.optim.SGD(net.parameters(), lr=0.1), F.mse_loss)
    batch = torch.randn(8, DIM), torch.randn(8, DIM)
    with Multiplied() as multiplied:
        b.execute_pipeline(iter([batch]), model, criterion, optimizer)
    return dict(multiplied.seen)


class Rows(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.blocks = blocks

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("style", STYLES)
def test_what_is_kept_in_float32_is_multiplied_in_float32_backward_too(ranks2, style):
    for seen in ranks2(products_of_kept, style):
        assert {dtype for _, dtype in seen} == {torch.float32}, seen
        assert {when for when, _ in seen} == {"forward", "backward"}


def test_a_loss_scale_is_applied_once_and_not_reported(ranks2):
    ranks2(overflow)


# ---------------------------------------------------------------------------------------------- running


def calls_of_a_run(rank, world_size):
    """By the number of foreign blocks and of micro-batches: all calls of a warm run, and those that the library makes."""
    found = {}
    for num_blocks in (2, 7):
        # The last rank has one block whatever their number is.
        pipeline = build(GPT(num_blocks + 1), rank, world_size, "1f1b", split_points=[f"blocks.{num_blocks}"])
        for num in (2, 6):

            def run(pipeline=pipeline, num=num):
                pipeline.run(pieces(text(12), num), loss_of, seed=1.0)

            for _ in range(2):
                run()
            found[num_blocks, num] = count(run), count(run, inside=str(Path(booster.__file__).parent))
    return found


# Of one more micro-batch what the library does on the first and on the last stage; of one more block of an earlier stage, for
# each micro-batch, what it does (`elsewhere`, which looks up what it returns), and all, with nn.Module's way to it; and all for
# the block and the seven modules in it once a run, to compare their modes with those of the user's. On torch 2.11 the library
# does what later ones do of themselves with gradients that are received and sent.
MOST_CALLS = {
    "first": 86 if torch.__version__ >= "2.12" else 90,
    "last": 250 if torch.__version__ >= "2.12" else 256,
    "foreign block": 3,
    "foreign block, all": 6,
    "foreign block, once": 24,
}


def test_a_micro_batch_costs_the_engine_few_calls_and_a_block_of_another_stage_next_to_none(ranks2):
    first, last = ranks2(calls_of_a_run)
    of_block = [(last[7, 6][part] - last[2, 6][part] - last[7, 2][part] + last[2, 2][part]) / 20 for part in (0, 1)]
    found = {
        "first": (first[2, 6][1] - first[2, 2][1]) / 4,
        "last": (last[2, 6][1] - last[2, 2][1]) / 4,
        "foreign block": of_block[1],
        "foreign block, all": of_block[0],
        "foreign block, once": (last[7, 2][0] - last[2, 2][0]) / 5 - 2 * of_block[0],
    }
    assert all(found[name] <= most for name, most in MOST_CALLS.items()), found


def shapes(rank, world_size, styles):
    for style in styles:
        torch.manual_seed(0)
        model = GPT(num_blocks=world_size * STYLES[style], dropout=0.3)
        whole = copy.deepcopy(model)
        pipeline = build(model, rank, world_size, style)
        blocks = [block for block in model.blocks if any(True for _ in block.parameters())]
        assert len(blocks) == STYLES[style]
        model.eval(), whole.eval()
        last = 0 if style == "zbv" else world_size - 1
        calls = 0
        for size, length in ((8, LENGTH), (4, LENGTH), (8, 3), (8, LENGTH)):
            batch = text(size, length, seed=size + length)
            losses, outputs = pipeline.run(pieces(batch), loss_of, seed=None)
            expected = [whole(*part.args) for part in pieces(batch)]
            if rank == last:
                torch.testing.assert_close(outputs, expected)
                torch.testing.assert_close(
                    losses, [loss_of(out, part.target) for out, part in zip(expected, pieces(batch), strict=True)]
                )
                assert not any(out.requires_grad for out in (*outputs, *losses))
            else:
                assert (losses, outputs) == ([], [])
            calls += 4
            assert [block.num_calls for block in blocks] == [calls] * len(blocks)
        assert all(param.grad is None for param in model.parameters())
        model.train()
        state = torch.get_rng_state() if rank else None
        pipeline.run(pieces(text()), loss_of, seed=1.0, return_outputs=False)
        assert [block.num_calls for block in blocks] == [calls + 4] * len(blocks)
        assert all(param.grad is not None for param in model.parameters())
        assert state is None or not torch.equal(state, torch.get_rng_state()), "dropout of own blocks is at work"
        model.eval()
        again, _ = pipeline.run(pieces(batch), loss_of, seed=None)
        model.train()
        assert all(torch.equal(a, b) for a, b in zip(again, losses, strict=True))


@some_styles
def test_evaluation_and_changing_shapes_run_each_block_once_for_a_micro_batch(ranks2, styles):
    ranks2(shapes, styles)


def randomness(rank, world_size):
    """Blocks that are elsewhere, and finding out shapes, draw nothing."""
    torch.manual_seed(0)
    model = GPT()
    for block in model.blocks[:2]:
        block.attention.dropout = 0.5
    model.embedding = nn.Sequential(model.embedding, nn.Dropout(0.5))
    pipeline = build(model, rank, world_size, "1f1b")
    state = torch.get_rng_state()
    pipeline.run(pieces(text()), loss_of, seed=1.0)
    assert torch.equal(state, torch.get_rng_state()) == (rank == 1)


def test_what_is_on_other_stages_draws_no_random_numbers(ranks2):
    ranks2(randomness)


def frozen(rank, world_size, styles):
    for style in styles:
        torch.manual_seed(0)
        model = GPT(checkpointed=style == "1f1b")
        for part in (model.embedding, *model.blocks[:3]):
            part.requires_grad_(False)
        model.position.requires_grad_(False)
        compare(model, text(), rank, world_size, style)


@some_styles
def test_stages_may_be_frozen(ranks2, styles):
    ranks2(frozen, styles)


def one_rank(rank, world_size):
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    for style in ("gpipe", "1f1b", "interleaved", "zbv"):
        torch.manual_seed(0)
        compare(GPT(), text(), 0, 1, style, group=alone)
    model = GPT(tied=True)
    compare(model, text(), 0, 1, "1f1b", group=alone)
    assert model.head.weight is model.embedding.weight


@pytest.mark.slow
def test_a_pipeline_of_one_rank_runs_too(ranks2):
    ranks2(one_rank)


def padded(rank, world_size):
    """torch's encoder has its own way in evaluation, on nested tensors, which do not cross."""
    torch.manual_seed(0)
    model = Encoder().eval()
    batch = text()
    with torch.no_grad():
        whole = copy.deepcopy(model)(batch[0])
    pipeline = build(model, rank, world_size, "1f1b")
    _, outputs = pipeline.run(pieces(batch), loss_of, seed=None)
    assert torch.backends.mha.get_fastpath_enabled()
    if outputs:
        valid = batch[0] != 0
        torch.testing.assert_close(torch.cat(outputs)[valid], whole[valid], rtol=1e-5, atol=1e-6)


def test_padded_batches_are_evaluated_too(ranks2):
    ranks2(padded)


def shared_loss(rank, world_size):
    for style in ("1f1b", "zbv"):
        torch.manual_seed(0)
        pipeline = build(GPT(), rank, world_size, style)
        losses, _ = pipeline.run(pieces(text()), loss_of, seed=None)
        loss = torch.stack(losses).mean() if losses else None
        shared = pipeline.share(loss, CPU)
        assert loss is None or torch.equal(loss, shared)
        everyone = [None] * world_size
        dist.all_gather_object(everyone, float(shared))
        assert everyone[0] == everyone[1] > 0


def test_every_rank_can_learn_the_loss(ranks2):
    ranks2(shared_loss)


# ---------------------------------------------------------------------------------------------- with other parallelisms


POLICIES = {"float32": (None, True), "bfloat16": (torch.bfloat16, False)}  # dtype, and whether blocks are resharded


def sharded(rank, world_size, mesh_shape, style, policy):
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("pp", "dp"))
    stages, (stage, shard) = mesh_shape[0], mesh.get_coordinate()
    group = mesh["pp"].get_group()
    dtype, resharding = POLICIES[policy]
    is_tied = dtype is None and style == "1f1b"
    torch.manual_seed(0)
    model = GPT(num_blocks=stages * STYLES[style], tied=is_tied)
    reference = copy.deepcopy(model)
    tolerance = 1e-6 if dtype is None else 2e-2
    plan = PipelinePlan(
        model,
        pp_size=stages,
        style=style,
        num_model_chunks=STYLES[style],
        prepare=None if dtype is None else lambda copy: copy.bfloat16(),
    )
    options = {
        "mesh": mesh["dp"],
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False),
        "reshard_after_forward": resharding,
    }
    for root in plan.cut(stage):
        for block in root.blocks:
            if any(True for _ in block.parameters()):
                fully_shard(block, **options)
        fully_shard(root, **options)
    pipeline = StagePipeline(plan, group=group, device=CPU)
    held = {id(param) for param in pipeline.own_parameters().values()}
    assert {id(param) for param in pipeline.module.parameters()} == held  # the model names what its stages have
    if dtype is not None:
        reference = reference.bfloat16()
    expected = {}
    for peer in range(mesh_shape[1]):
        _, _, gradients, _ = alone(reference, text(seed=peer), loss_of, 4)
        for name, grad in gradients.items():
            expected[name] = expected.get(name, 0) + grad.float() / mesh_shape[1]
    for times in (1, 2):  # gradients accumulate
        pipeline.run(pieces(text(seed=shard)), loss_of, seed=1.0)
        for name, param in pipeline.own_parameters().items():
            torch.testing.assert_close(
                param.grad.full_tensor(),
                times * expected[name],
                rtol=tolerance * 10,
                atol=tolerance,
                msg=f"{name} {times} {dtype}",
            )
    with torch.no_grad():
        whole = torch.stack([loss_of(reference(part.args[0]), part.target) for part in pieces(text(seed=shard))])
    losses, _ = pipeline.run(pieces(text(seed=shard)), loss_of, seed=None)
    if losses:
        torch.testing.assert_close(torch.stack(losses), whole, rtol=tolerance, atol=tolerance)


def one_each_time(*quick):
    """All schedules with all policies, of which these with one each time."""
    return [
        pytest.param(style, policy, marks=[] if (style, policy) in quick else [pytest.mark.slow])
        for style in STYLES
        for policy in POLICIES
    ]


@pytest.mark.slow
@pytest.mark.slow_cases("1f1b", "float32")
@pytest.mark.parametrize(("style", "policy"), one_each_time(("1f1b", "float32"), ("interleaved", "bfloat16")))
def test_stages_may_be_sharded_over_the_data_parallel_ranks(ranks4, style, policy):
    ranks4(sharded, (2, 2), style, policy)


@pytest.mark.slow
@pytest.mark.parametrize(("style", "policy"), one_each_time(("gpipe", "bfloat16"), ("zbv", "float32")))
def test_stages_may_be_sharded_over_one_rank_for_the_sake_of_its_dtypes(ranks2, style, policy):
    ranks2(sharded, (2, 1), style, policy)


def tensor_parallel(rank, world_size, styles):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    stage, _ = mesh.get_coordinate()
    for style in styles:
        torch.manual_seed(0)
        model = GPT(num_blocks=2 * STYLES[style], tied=True)
        losses, _, gradients, _ = alone(model, text(), loss_of, 4)
        plan = PipelinePlan(model, pp_size=2, style=style, num_model_chunks=STYLES[style])
        styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], styles)
        plan.cut(stage)
        pipeline = StagePipeline(plan, group=mesh["pp"].get_group(), device=CPU)
        got, _ = pipeline.run(pieces(text()), loss_of, seed=1.0)
        for mine, whole in zip(got, losses, strict=False):
            torch.testing.assert_close(mine, whole, rtol=1e-5, atol=1e-6)
        for name, param in pipeline.own_parameters().items():
            grad = param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad
            torch.testing.assert_close(grad, gradients[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.slow
@some_styles
def test_a_model_may_be_tensor_parallel_before_it_is_cut(ranks4, styles):
    ranks4(tensor_parallel, styles)


class Halves(nn.Module):
    """Takes a part of the sequence when `divided`, as sequence parallelism leaves it between blocks."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))
        self.divided = False

    def forward(self, x):
        x = self.stem(x)
        if self.divided:
            x = x[:, : x.shape[1] // 2]
        for block in self.blocks:
            x = block(x)
        return x


def half_sequence(rank, world_size):
    torch.manual_seed(0)
    model = Halves()
    plan = PipelinePlan(model, pp_size=2)
    plan.cut(rank)
    pipeline = StagePipeline(plan, group=None, device=CPU, boundary=lambda shape: (shape[0], shape[1] // 2, *shape[2:]))
    model.divided = True
    x = torch.randn(4, 6, DIM)
    _, outputs = pipeline.run(pieces((x, x), 2), lambda out, target: out.square().mean(), seed=1.0)
    return [tuple(out.shape) for out in outputs]


def test_what_crosses_may_have_another_shape_than_it_had_when_the_model_was_whole(ranks2):
    assert ranks2(half_sequence) == [[], [(2, 3, DIM)] * 2]


def gradients_over_first_runs(rank, world_size, style):
    """How far gradients are from the sum over passes, after an evaluation, and after a pass of another shape."""
    torch.manual_seed(0)
    micro = {"num_microbatches": 2, "pp_style": style, "num_model_chunks": STYLES[style] if style != "zbv" else 1}
    booster = Booster("cpu", plugin=HybridParallelPlugin(1, world_size, **micro))
    model = GPT(num_blocks=world_size * STYLES[style])
    model, optimizer, criterion, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_of)

    def run(batch, *trained):
        booster.execute_pipeline(iter([batch]), model, criterion, *trained)
        return {name: local_shard(param.grad).clone() for name, param in model.named_parameters()}

    def distance(one, other):
        return max(float((one[name] - other[name]).abs().max()) for name in one)

    short = run(text(2, seed=1), optimizer)
    optimizer.zero_grad()
    whole = run(text(4), optimizer)
    evaluated = run(text(4, seed=2))
    for param in model.parameters():
        param.grad = None
    booster.execute_pipeline(iter([text(4)]), model, criterion, optimizer)
    both = run(text(2, seed=1), optimizer)
    return distance(evaluated, whole), distance(both, {name: short[name] + whole[name] for name in short})


@pytest.mark.slow_cases("gpipe", "1f1b")
@pytest.mark.parametrize("style", STYLES)
def test_gradients_outlast_an_evaluation_and_the_first_batch_of_another_shape(ranks2, style):
    for evaluated, both in ranks2(gradients_over_first_runs, style):
        assert evaluated == 0.0
        assert both < 1e-6


class Impossible(GPT):
    def forward(self, tokens):
        raise ZeroDivisionError("in the first pass")


def failing_at_once(rank, world_size):
    booster = Booster("cpu", plugin=HybridParallelPlugin(1, world_size, num_microbatches=2))
    model = Impossible(num_blocks=4)
    model, optimizer, criterion, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_of)
    with pytest.raises(ZeroDivisionError, match="in the first pass"):
        booster.execute_pipeline(iter([text(4)]), model, criterion, optimizer)


def test_an_error_in_the_very_first_pass_is_the_one_that_is_raised(ranks2):
    ranks2(failing_at_once)
