"""What cannot run on part of a sequence is refused by name: modules at boost, functions in forward, options, batches."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention

from booster import Booster
from booster.plugin.sequence_parallel import check_sizes, shard_batch, token_mean
from booster.plugin.sequence_parallel.all_to_all import Attention
from booster.plugin.sequence_parallel.attention_mode import SequenceMode, check_model
from booster.plugin.sequence_parallel.ring import attend_in_ring
from booster.plugin.sequence_parallel.sequence_cut import SequenceCut

CUT = SequenceCut(3, 16, 2, 0, zigzag=False)  # three sequences of 16 tokens, 8 on each of two ranks
X = torch.randn(3, 8, 6)
SCORED = torch.randn(3, 2, 8, 4)
TABLE = nn.Parameter(torch.randn(20, 6))
BUFFER = torch.randn(1, 1, 20, 20)
LAYER = nn.MultiheadAttention(6, 2, batch_first=True)


def in_mode(run, cut=CUT):
    owner = SimpleNamespace(size=2, group=None, buffers={id(BUFFER)}, attend=lambda q, k, v, mask, call: q)
    with SequenceMode(owner, cut):
        return run()


REFUSED = {
    "scores by matmul": lambda: SCORED @ SCORED.transpose(-1, -2),
    "scores by bmm": lambda: torch.bmm(X, X.mT),
    "scores by einsum": lambda: torch.einsum("bhqd,bhkd->bhqk", SCORED, SCORED),
    "scores of MultiheadAttention": lambda: LAYER(X, X, X),
    "a mean over tokens": lambda: X.mean(1),
    "a mean over tokens, from the end": lambda: torch.mean(X, dim=-2),
    "a sum of a mask": lambda: torch.ones(3, 8).sum(-1),
    "a largest token": lambda: X.amax(dim=(1,)),
    "a softmax over tokens": lambda: F.softmax(X, dim=1),
    "a cumsum": lambda: X.cumsum(1),
    "a flip": lambda: X.flip(1),
    "a roll": lambda: X.roll(1, 1),
    "a shift": lambda: X[:, 1:],
    "a shift the other way": lambda: X[..., :-1, :],
    "the first token": lambda: X[:, 0],
    "the last token": lambda: X[:, -1, :],
    "a convolution": lambda: F.conv1d(X.transpose(1, 2), torch.ones(6, 6, 3), padding=1),
    "counted positions": lambda: torch.arange(8),
    "counted positions from 0": lambda: torch.arange(0, 8, device="cpu"),
    "the head of a table": lambda: TABLE[:8],
    "the corner of a mask": lambda: BUFFER[:, :, :8, :8],
    "attention of other lengths": lambda: F.scaled_dot_product_attention(SCORED, SCORED[:, :, :4], SCORED[:, :, :4]),
    "a mask and is_causal": lambda: F.scaled_dot_product_attention(
        SCORED, SCORED, SCORED, torch.ones(8, 16), is_causal=True
    ),
    "shared keys without enable_gqa": lambda: F.scaled_dot_product_attention(SCORED, SCORED[:, :1], SCORED[:, :1]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_forward_reads_of_other_tokens_raises(name):
    with pytest.raises(RuntimeError, match=r"tokens|MultiheadAttention|is_causal|enable_gqa"):
        in_mode(REFUSED[name])


def test_what_works_token_by_token_does_not():
    def forward():
        assert X.mean(-1).shape == (3, 8)
        assert (X @ torch.ones(6, 8)).shape == (3, 8, 8)
        F.softmax(X, dim=-1), X[:, :, 1:], X[..., :3], X[1:], X[:, :], X[:, None], torch.arange(9), TABLE[2:8]
        frequencies = torch.ones(3, 8, 1) @ torch.ones(3, 1, 8)  # an outer product
        F.layer_norm(X, (6,)), frequencies, SCORED.mean(-1), SCORED[..., :2], X.sum(), X.norm(1, dim=-1)
        F.scaled_dot_product_attention(SCORED, SCORED, SCORED)
        return LAYER(X, X, X, need_weights=False)[0].shape

    assert in_mode(forward) == X.shape


@pytest.mark.filterwarnings("ignore")
def test_no_compiled_attention_goes_unseen():
    compiled = torch.compile(lambda x: F.scaled_dot_product_attention(x, -x, x), backend="eager")
    assert torch.equal(in_mode(lambda: compiled(SCORED)), SCORED)  # what `attend` makes of it here
    heads = torch.randn(3, 2, 8, 16)
    with pytest.raises(Exception, match="Observed exception"):  # within the compiler of torch
        in_mode(lambda: flex_attention(heads, heads, heads))


def test_attention_before_a_batch_was_cut_raises():
    with pytest.raises(RuntimeError, match="shard_sequence"):
        in_mode(lambda: F.scaled_dot_product_attention(SCORED, SCORED, SCORED), None)


MODULES = {
    "normalises over the tokens": nn.BatchNorm1d(4),
    "GroupNorm": nn.GroupNorm(2, 4),
    "InstanceNorm1d": nn.InstanceNorm1d(4),
    "one token after the other": nn.LSTM(4, 4),
    "neighbouring tokens": nn.Conv1d(4, 4, 3),
    "pools": nn.AdaptiveAvgPool1d(1),
    "3 heads, which do not divide by sp_size=2": nn.MultiheadAttention(6, 3),
    "add_bias_kv": nn.MultiheadAttention(6, 2, add_bias_kv=True),
    "is compiled": nn.ModuleDict({"_orig_mod": nn.Linear(2, 2)}),  # as torch.compile wraps it
}


@pytest.mark.parametrize("words", MODULES)
def test_modules_over_several_tokens_raise_at_boost(words):
    with pytest.raises(ValueError, match=rf"(?s)'1'.*{words}|'1.*{words}"):
        check_model(nn.Sequential(nn.Linear(2, 2), MODULES[words]), by_heads=True, size=2, tp_size=1)


def test_eager_attention_of_transformers_raises_at_boost():
    layer = nn.Linear(2, 2)
    layer.config = SimpleNamespace(_attn_implementation="eager")
    with pytest.raises(ValueError, match="'eager', which is not seen"):
        check_model(nn.Sequential(layer), by_heads=True, size=2, tp_size=1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((2, None, 1), "needs sequence_parallelism_mode"),
        ((1, "ring_attn", 1), "sp_size is 1"),
        ((2, "split_gather", 1), "tp_size=1"),
        ((4, "split_gather", 2), "sp_size is 4"),
        ((2, "split_gather", None), "sequence_parallelism_mode"),
        ((0, None, 1), "sp_size"),
        ((2, "ulysses", 1), "all_to_all"),
    ],
)
def test_options_that_do_not_fit_raise(options, words):
    with pytest.raises(ValueError, match=words):
        check_sizes(*options)


def shard(batch, *, size=2, **options):
    usual = {"labels": None, "shift_labels": False, "documents": None, "whole": (), "ignore_index": -100}
    return shard_batch(batch, size=size, rank=1, zigzag=False, averaging_group=None, **usual | options)[0]


TOKENS = torch.arange(10).reshape(2, 5)


def test_padding_counts_for_nothing_and_masks_lose_rows_alone():
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    tokens, rows, labels = shard((TOKENS, mask, TOKENS))
    assert tokens.tolist() == [[3, 4, 0], [8, 9, 0]]
    assert rows.shape == (2, 1, 3, 5)
    assert labels.tolist() == [[3, 4, -100], [8, 9, -100]]


def test_a_mapping_gets_positions_and_labels_one_token_on():
    found = shard({"input_ids": TOKENS, "labels": TOKENS}, shift_labels=True)
    assert found["position_ids"].tolist() == [[3, 4, 0]] * 2
    assert found["labels"].tolist() == found["shift_labels"].tolist() == [[4, -100, -100], [9, -100, -100]]
    assert found["attention_mask"].tolist() == [[1, 1, 0]] * 2
    assert float(found["num_items_in_batch"]) == 8


class Counted(nn.Linear):
    def forward(self, x, num_items_in_batch):
        return super().forward(x).float().sum() / num_items_in_batch, float(num_items_in_batch)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "bf16_naive", "fp16_naive"])
def test_no_precision_rounds_the_number_of_tokens(precision):
    many = torch.ones(1, 70_001, dtype=torch.int64)  # 70,144 in bfloat16, more than float16 has
    batch = shard({"input_ids": many, "labels": many}, shift_labels=True)
    booster = Booster("cpu", precision)
    model = Counted(2, 2)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loss, counted = model(torch.ones(1, 2), num_items_in_batch=batch["num_items_in_batch"])
    assert counted == 70_000
    booster.backward(loss, optimizer)
    assert optimizer.step().applied


@pytest.mark.parametrize(
    ("batch", "options", "words"),
    [
        ((TOKENS[:, :3],), {}, "sequences of 3 tokens"),
        ((TOKENS, torch.ones(2, 7)), {}, "whole=\\[1\\]"),
        ((TOKENS, torch.ones(5, 5)), {}, "whole=\\[1\\]"),
        ((torch.ones(3),), {}, "no tensor"),
        ((TOKENS,), {"labels": 1}, "labels names 1"),
        ({"x": TOKENS}, {"whole": ["y"]}, "whole names 'y'"),
        ({"x": TOKENS}, {"shift_labels": True}, "no entry 'labels'"),
        ({"position_ids": TOKENS % 3}, {}, "begin anew"),
        ((TOKENS,), {"documents": torch.tensor([0, 3, 5])}, "only sequence"),
        ((TOKENS[:1],), {"documents": torch.tensor([0, 3, 4])}, "rise from 0"),
        ((TOKENS,), {"documents": TOKENS[:, :2]}, "documents is"),
    ],
)
def test_batches_that_cannot_be_cut_raise(batch, options, words):
    with pytest.raises(ValueError, match=words):
        shard(batch, **options)


def test_the_mean_over_tokens_of_one_process_is_that_of_torch():
    losses = torch.tensor([[1.0, 2.0], [float("nan"), 5.0]], requires_grad=True)
    counted = torch.tensor([[True, True], [False, True]])
    mean = token_mean(losses, counted, None)
    mean.backward()
    assert float(mean.detach()) == pytest.approx(8 / 3)
    assert losses.grad.flatten().tolist() == pytest.approx([1 / 3, 1 / 3, 0, 1 / 3])


def ring(device="cpu", dtype=torch.float32, features=8, dropout_p=0.0, mask=None, documents=None, value_features=None):
    q, k = (torch.ones(1, 2, 8, features, dtype=dtype, device=device) for _ in range(2))
    v = torch.ones(1, 2, 8, value_features or features, dtype=dtype, device=device)
    cut = SequenceCut(1, 16, 2, 0, True, documents)
    return attend_in_ring(q, k, v, mask, Attention(dropout_p, True, None, cut, None))


# The meta device stands for any that is no CPU.
RING = {
    "dropout": ({"dropout_p": 0.1}, "dropout_p=0.1"),
    "dropout elsewhere": ({"dropout_p": 0.1, "device": "meta", "dtype": torch.bfloat16}, "dropout_p=0.1"),
    "learned bias": ({"mask": torch.zeros(8, 16).requires_grad_()}, "a mask with gradients"),
    "values of another size": ({"value_features": 4}, "wants as many"),
    "a mask elsewhere": (
        {"mask": torch.ones(8, 16, dtype=torch.bool, device="meta"), "device": "meta", "dtype": torch.bfloat16},
        "without masks and documents",
    ),
    "documents elsewhere": (
        {"documents": ((0, 5, 16),), "device": "meta", "dtype": torch.bfloat16},
        "without masks and documents",
    ),
    "float32 elsewhere": ({"device": "meta"}, "takes halves"),
    "many features elsewhere": ({"device": "meta", "dtype": torch.bfloat16, "features": 264}, "up to 256"),
}


@pytest.mark.parametrize("name", RING)
def test_a_ring_refuses_what_its_kernels_do_not_take_before_anything_is_sent(name):
    options, words = RING[name]
    with pytest.raises(RuntimeError, match=words):
        ring(**options)
