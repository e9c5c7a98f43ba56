"""Memory estimates before the first step against the allocator's record of a step; what is held now, counted."""

import gc

import pytest
import torch
from torch import nn

from benchmarks.memory import high_water
from booster import Booster
from booster.memory import compare, estimate, measure
from booster.mixed_precision import BF16NaiveMixedPrecision, FP16ApexMixedPrecision

cross_entropy = nn.functional.cross_entropy


class Block(nn.Module):
    def __init__(self, width, heads, causal):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        count, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(count, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).reshape(count, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.position = nn.Embedding(512, 128), nn.Parameter(torch.zeros(64, 128))
        self.blocks = nn.ModuleList(Block(128, 4, True) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(128), nn.Linear(128, 512)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches, self.position = nn.Conv2d(3, 192, 4, stride=4), nn.Parameter(torch.zeros(64, 192))
        self.blocks = nn.ModuleList(Block(192, 3, False) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(192), nn.Linear(192, 10)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def cnn():
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.BatchNorm2d(64), nn.ReLU()),
        *(nn.Conv2d(64, 128, 3, stride=2, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        nn.Linear(128, 10),
    )


def images():
    return torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))


def tokens():
    return torch.randint(0, 512, (8, 64)), torch.randint(0, 512, (8, 64))


def token_loss(logits, targets):
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


MODELS = {"vit": (ViT, images, cross_entropy), "gpt": (GPT, tokens, token_loss), "cnn": (cnn, images, cross_entropy)}
PRECISIONS = {
    "fp32": lambda: "fp32",
    "bf16": lambda: "bf16",
    "fp16": lambda: "fp16",
    "bf16_naive": lambda: "bf16_naive",
    "seven bytes": lambda: BF16NaiveMixedPrecision(master_weights="split24", states="8bit"),
}


def parts(name, make=torch.optim.AdamW):
    torch.manual_seed(0)
    build, data, criterion = MODELS[name]
    model = build()
    return model, make(model.parameters(), lr=1e-4), data(), criterion


def alive():
    """Every storage that a tensor known to Python has, by address; to be held, so that no address is used again."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    storages = [
        t.untyped_storage() for t in tensors if t.device.type == "cpu" and type(t) in (torch.Tensor, nn.Parameter)
    ]
    return {storage.data_ptr(): storage for storage in storages}


def recorded(name, precision, make):
    """Bytes that a step leaves, and its peak, from the allocator's record."""
    before = alive()
    model, optimizer, batch, criterion = parts(name, make)
    booster = Booster("cpu", precision)
    boosted, stepped, loss_of, *_ = booster.boost(model, optimizer, criterion)

    def step():
        booster.backward(loss_of(boosted(batch[0]), batch[1]), stepped)
        stepped.step()

    def held():
        return sum(storage.nbytes() for address, storage in alive().items() if address not in before)

    for _ in range(2):
        step()
        stepped.zero_grad()
    step()
    after = held()
    stepped.zero_grad()
    base = held()
    return after, base + high_water(step, "cpu")[0], measure(boosted, stepped)


QUICK = [("vit", "bf16"), ("gpt", "fp32"), ("gpt", "seven bytes"), ("cnn", "bf16_naive")]
CASES = [
    pytest.param(name, precision, torch.optim.AdamW, marks=[] if (name, precision) in QUICK else [pytest.mark.slow])
    for name in MODELS
    for precision in PRECISIONS
]
CASES += [
    pytest.param("gpt", "bf16_naive", torch.optim.RMSprop, marks=pytest.mark.slow),
    pytest.param("gpt", "fp32", torch.optim.SGD, marks=pytest.mark.slow),
    pytest.param("vit", "bf16", torch.optim.NAdam, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "precision", "make"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_an_estimate_is_what_the_allocator_records(name, precision, make):
    expected = estimate(*parts(name, make), precision=PRECISIONS[precision]())
    held, peak, measured = recorded(name, PRECISIONS[precision](), make)
    assert expected.held == pytest.approx(held, rel=0.01)
    assert expected.peak == pytest.approx(peak, rel=0.03)
    assert expected.states == pytest.approx(measured.states, rel=0.01)
    assert expected.masters == measured.masters
    assert expected.weights == measured.weights


def test_an_estimate_changes_nothing():
    model, optimizer, batch, criterion = parts("gpt")
    before, state = [param.clone() for param in model.parameters()], torch.get_rng_state()
    estimate(model, optimizer, batch, criterion, precision="bf16_naive")
    assert all(map(torch.equal, before, model.parameters()))
    assert torch.equal(state, torch.get_rng_state())
    assert not optimizer.state
    assert all(param.grad is None for param in model.parameters())


def test_a_model_without_memory_can_be_estimated():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(100_000, 100_000), nn.Linear(100_000, 10))
    batch = torch.empty(4, 100_000, device="meta"), torch.empty(4, dtype=torch.long, device="meta")
    found = estimate(model, torch.optim.AdamW(model.parameters()), batch, cross_entropy, precision="fp32")
    assert found.weights > 4e10
    assert found.held == pytest.approx(16 * 1e10, rel=0.01)


def test_ranks_divide_what_their_plugin_divides():
    found = compare(
        *parts("gpt"), precisions=["bf16_naive"], plugins=["single", "ddp", "zero1", "zero2", "fsdp"], world_sizes=[4]
    )
    single, ddp, zero1, zero2, fsdp = found
    assert ddp.communication == ddp.gradients == single.gradients
    assert zero1.states == pytest.approx(single.states / 4, rel=0.02)
    assert zero1.gradients == single.gradients
    assert zero2.gradients == single.gradients // 4
    assert (fsdp.weights, fsdp.masters) == (2 * single.weights // 4, 0)
    assert [each.world_size for each in found] == [1, 4, 4, 4, 4]


def test_what_cannot_be_estimated_says_why():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(x) * float(x.sum())

    model = Reads()
    optimizer, batch = torch.optim.SGD(model.parameters(), lr=0.1), (torch.ones(2, 4), torch.ones(2, 4))
    with pytest.raises(ValueError, match="reads numbers out of tensors"):
        estimate(model, optimizer, batch, nn.functional.mse_loss)
    with pytest.raises(ValueError, match="world_size=2 needs a plugin that uses ranks"):
        estimate(*parts("gpt"), world_size=2)
    with pytest.raises(ValueError, match="plugin='tp' is not legal"):
        estimate(*parts("gpt"), plugin="tp")
    with pytest.raises(ValueError, match="what FP16ApexMixedPrecision keeps beside weights is not known"):
        estimate(*parts("gpt"), precision=FP16ApexMixedPrecision("O2"))
