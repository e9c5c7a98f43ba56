"""fp16 and bf16 on torch.autocast: what runs in which dtype, and that training is what it should be."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import booster.mixed_precision as mixed_precision
from booster import Booster
from booster.mixed_precision import (
    FP32,
    BF16MixedPrecision,
    DtypePolicy,
    DynamicScale,
    FP16TorchMixedPrecision,
    MixedPrecision,
)

CLASSES = {"fp16": FP16TorchMixedPrecision, "bf16": BF16MixedPrecision}
HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
both = pytest.mark.parametrize("precision", ["fp16", "bf16"])


def make(precision, **options):
    if precision == "fp16":
        options.setdefault("init_scale", 256.0)  # toy losses have large gradients
    return Booster(device="cpu", mixed_precision=CLASSES[precision](**options), half_products="native")


def gemm_net():
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))


def watch_outputs(module):
    """The dtypes that forward passes of `module` and its descendants return, in a list that fills itself."""
    seen = []
    for child in module.modules():
        if not list(child.children()):
            child.register_forward_hook(lambda m, args, out: seen.append(out.dtype))
    return seen


class Dtypes(TorchDispatchMode):
    """Records (name, dtype of the first tensor) of the operators that really run."""

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        if tensors:
            self.ops.append((func.overloadpacket.__name__, tensors[-1].dtype))
        return func(*args, **(kwargs or {}))

    def of(self, *names):
        return {dtype for name, dtype in self.ops if any(n in name for n in names)}


# ---- dtypes ----


@both
def test_parameters_gradients_and_states_stay_float32(precision):
    net = gemm_net()
    booster = make(precision)
    model, optimizer, *_ = booster.boost(net, torch.optim.AdamW(net.parameters()))
    booster.backward(model(torch.randn(4, 8)).square().mean(), optimizer)
    assert {p.dtype for p in net.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in net.parameters()} == {torch.float32}
    optimizer.step()
    states = [v for state in optimizer.state.values() for v in state.values() if v.dim()]
    assert {v.dtype for v in states} == {torch.float32}


@both
def test_matrix_products_run_in_half_forward_and_backward(precision):
    net = gemm_net()
    booster = make(precision)
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
    with Dtypes() as forward:
        loss = model(torch.randn(4, 8)).square().mean()
    with Dtypes() as backward:
        booster.backward(loss, optimizer)
    assert forward.of("addmm") == {HALF[precision]}
    assert backward.of("mm") == {HALF[precision]}


@both
def test_modules_return_what_autocast_makes_of_them_and_the_model_returns_float32(precision):
    net = gemm_net()
    seen = watch_outputs(net)
    model = make(precision).boost(net)[0]
    assert model(torch.randn(4, 8)).dtype == torch.float32
    assert seen == [HALF[precision]] * 4  # on CPU, normalisation returns what it is given


@both
@pytest.mark.parametrize("output_dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, None])
def test_output_dtype_is_what_model_and_criterion_return(precision, output_dtype):
    net = gemm_net()
    booster = make(precision, output_dtype=output_dtype)
    model, optimizer, criterion, *_ = booster.boost(
        net, torch.optim.SGD(net.parameters(), lr=0.1), lambda out: (out @ out.T).mean()
    )
    out = model(torch.randn(4, 8))
    expected = output_dtype or HALF[precision]
    assert out.dtype == expected
    loss = criterion(out)
    assert loss.dtype == (expected if output_dtype is not torch.float64 else torch.float64)
    booster.backward(loss, optimizer)
    assert optimizer.step().applied


@both
@pytest.mark.parametrize("kind", ["function", "module"])
def test_the_criterion_runs_under_the_precision(precision, kind):
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.seen = []

        def forward(self, out, target):
            scores = out @ target.T
            self.seen.append((out.dtype, scores.dtype))
            return F.cross_entropy(scores, torch.arange(len(out)))

    loss_module = Loss()
    criterion = loss_module if kind == "module" else lambda out, target: loss_module.forward(out, target)
    model, _, boosted, *_ = make(precision).boost(gemm_net(), criterion=criterion)
    loss = boosted(model(torch.randn(4, 8)), torch.randn(4, 4))
    assert loss.dtype == torch.float32
    assert loss_module.seen == [(torch.float32, HALF[precision])]


@both
def test_cross_entropy_of_large_logits_is_finite(precision):
    booster = make(precision)
    criterion = booster.boost(gemm_net(), criterion=nn.CrossEntropyLoss())[2]
    logits = torch.full((2, 3), 6e4)
    logits[:, 0] = -6e4
    assert criterion(logits, torch.tensor([0, 1])).isfinite()


@both
def test_the_autocast_context_is_that_of_the_model(precision):
    booster = make(precision)
    a = torch.ones(4, 4)
    with booster.autocast():
        assert (a @ a).dtype == HALF[precision]
    assert (a @ a).dtype == torch.float32


def test_fp16_on_cpu_is_real_fp16():
    # 4096 + 1 is not a float16: the product of a float32 or bfloat16 matmul would differ.
    linear = nn.Linear(1, 1, bias=False)
    nn.init.constant_(linear.weight, 2049.0)
    model = make("fp16").boost(linear)[0]
    assert model(torch.ones(1, 1)).item() == 2048.0
    assert model(torch.full((1, 1), 100.0)).isinf().all()


@both
def test_autocast_is_entered_in_the_thread_that_runs_forward(precision):
    net = gemm_net()
    seen = watch_outputs(net)
    model = make(precision).boost(net)[0]
    expected = model(torch.ones(2, 8))
    main, start = list(seen), threading.Barrier(4)

    def run(_):
        start.wait()
        return model(torch.ones(2, 8)), torch.is_autocast_enabled("cpu"), torch._C._len_torch_function_stack()

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(run, range(4)))
    assert sorted(map(str, seen)) == sorted(map(str, main * 5))
    assert all(torch.equal(out, expected) and not on and not modes for out, on, modes in results)


@both
@pytest.mark.parametrize("enabled", [True, False])
def test_cache_enabled_reaches_autocast(precision, enabled):
    seen = []

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            seen.append(torch.is_autocast_cache_enabled())
            return self.linear(self.linear(x))

    net = Twice()
    model = make(precision, cache_enabled=enabled).boost(net)[0]
    with Dtypes() as ops:
        model(torch.ones(1, 4, requires_grad=True))
    assert seen == [enabled]
    casts = sum(name == "_to_copy" and dtype == torch.float32 for name, dtype in ops.ops)
    assert casts == (3 if enabled else 5)  # the input, and weight and bias once or twice


@both
@pytest.mark.parametrize("outer", [False, True])
def test_weights_are_never_stale(precision, outer):
    def run(cache_enabled):
        torch.manual_seed(0)
        net = gemm_net()
        booster = make(precision, cache_enabled=cache_enabled)
        model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.05))
        losses = []
        # A context around the whole loop is a mistake that must not cost the training.
        with booster.autocast() if outer else nullcontext():
            for _ in range(4):
                loss = model(torch.ones(4, 8)).square().mean()
                booster.backward(loss, optimizer)
                assert optimizer.step().applied
                optimizer.zero_grad()
                losses.append(loss.item())
        return losses

    losses = run(True)
    assert losses == run(False)
    assert len(set(losses)) == 4


# ---- attention ----


class Block(nn.Module):
    """A transformer block; `use` says how to call its body."""

    def __init__(self, dim=16, heads=2, use=lambda body, x: body(x)):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.seen = []
        self.use = use

    def forward(self, x):
        return self.use(self.body, x)

    def body(self, x):
        batch, length, dim = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v)
        self.seen.append((q.dtype, out.dtype))
        x = x + self.proj(out.transpose(1, 2).reshape(batch, length, dim))
        return x + self.mlp(x)


def attention_dtypes(model, x):
    with Dtypes() as ops:
        out = model(x)
    return ops.of("scaled_dot_product"), out


@both
@pytest.mark.parametrize("sdpa_fp32", ["auto", True, False])
def test_training_runs_attention_in_float32_where_asked_while_other_products_are_native(precision, sdpa_fp32):
    net = Block()
    half = HALF[precision]
    model = make(precision, sdpa_fp32=sdpa_fp32).boost(net)[0]
    dtypes, _ = attention_dtypes(model, torch.randn(2, 4, 16))
    assert dtypes == ({torch.float32} if sdpa_fp32 is True else {half})
    assert net.seen == [(half, half)]  # what goes on has the dtype that autocast would have given it


@both
@pytest.mark.parametrize("sdpa_fp32", ["auto", True])
def test_inference_keeps_attention_in_half(precision, sdpa_fp32):
    model = make(precision, sdpa_fp32=sdpa_fp32).boost(Block())[0].eval()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert attention_dtypes(model, torch.randn(2, 4, 16))[0] == {HALF[precision]}


@both
def test_attention_in_float32_is_attention_of_the_rounded_inputs(precision):
    half = HALF[precision]
    q, k, v = torch.randn(3, 2, 2, 5, 8).unbind(0)
    mask = torch.randn(5, 5)
    booster = make(precision, sdpa_fp32=True)
    for options in ({}, {"is_causal": True}, {"attn_mask": mask}, {"attn_mask": mask > 0}, {"scale": 0.1}):
        with booster.autocast():
            out = F.scaled_dot_product_attention(q.to(half), k.to(half), v.to(half), **options)
            named = F.scaled_dot_product_attention(query=q.to(half), key=k.to(half), value=v.to(half), **options)
        exact = F.scaled_dot_product_attention(*(t.to(half).float() for t in (q, k, v)), **options)
        assert torch.equal(out, exact.to(half))
        assert torch.equal(named, out)


@both
def test_a_mask_in_half_joins_attention_in_float32(precision):
    half = HALF[precision]
    q = torch.randn(1, 2, 5, 8).to(half)
    mask = torch.randn(5, 5).to(half)
    with make(precision, sdpa_fp32=True).autocast():
        out = F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
    exact = F.scaled_dot_product_attention(q.float(), q.float(), q.float(), attn_mask=mask.float())
    assert torch.equal(out, exact.to(half))


@both
def test_float64_attention_is_left_alone(precision):
    q = torch.randn(1, 1, 3, 4, dtype=torch.float64)
    with make(precision, sdpa_fp32=True).autocast():
        assert F.scaled_dot_product_attention(q, q, q).dtype == torch.float64


@both
@pytest.mark.parametrize("sdpa_fp32", [True, False])
def test_multi_head_attention_module_computes_its_scores_in_float32_too(precision, sdpa_fp32):
    net = nn.MultiheadAttention(16, 2, batch_first=True)
    model = make(precision, sdpa_fp32=sdpa_fp32, output_dtype=None).boost(net)[0]
    x = torch.randn(2, 4, 16)
    with Dtypes() as ops:
        out, _ = model(x, x, x, need_weights=False)
    assert out.dtype == HALF[precision]
    assert ops.of("addmm") == {HALF[precision]}
    scores = ops.of("_softmax", "flash_attention")
    assert scores == ({torch.float32} if sdpa_fp32 else {HALF[precision]})


# ---- checkpointing ----


def plain(body, x):
    return body(x)


def reentrant(body, x):
    return checkpoint(body, x, use_reentrant=True)


def not_reentrant(body, x):
    return checkpoint(body, x, use_reentrant=False)


def gradients(precision, use, *, keep_fp32=(), sdpa_fp32=True, multi_head=False, optimizers=1):
    torch.manual_seed(0)
    block = Block(use=use)
    if multi_head:
        attention = nn.MultiheadAttention(16, 2, batch_first=True)
        block.body = lambda x: block.mlp(attention(x, x, x, need_weights=False)[0])
        block.attention = attention
    booster = make(precision, keep_fp32=keep_fp32, sdpa_fp32=sdpa_fp32)
    if optimizers == 1:
        model, optimizer, *_ = booster.boost(block, torch.optim.SGD(block.parameters(), lr=0.1))
    else:
        model, first, *_ = booster.boost(block, torch.optim.SGD(block.qkv.parameters(), lr=0.1))
        other = nn.Linear(1, 1)
        optimizer = [first, booster.boost(other, torch.optim.SGD(other.parameters(), lr=0.1))[1]]
    x = torch.randn(2, 4, 16, requires_grad=True)
    booster.backward(model(x).square().mean(), optimizer)
    assert not torch.is_autocast_enabled("cpu")
    assert torch._C._len_torch_function_stack() == 0
    grads = {name: p.grad for name, p in block.named_parameters() if p.grad is not None}
    return {**grads, "input": x.grad}, block.seen


@both
@pytest.mark.parametrize("use", [reentrant, not_reentrant])
@pytest.mark.parametrize("multi_head", [False, True])
@pytest.mark.parametrize("sdpa_fp32", [True, False])
def test_recomputing_a_block_gives_the_same_dtypes_and_gradients_to_the_bit(precision, use, multi_head, sdpa_fp32):
    expected, seen = gradients(precision, plain, multi_head=multi_head, sdpa_fp32=sdpa_fp32)
    recomputed, seen_twice = gradients(precision, use, multi_head=multi_head, sdpa_fp32=sdpa_fp32)
    assert seen_twice == seen * 2
    assert expected.keys() == recomputed.keys()
    assert all(torch.equal(recomputed[name], expected[name]) for name in expected)


@both
@pytest.mark.crossed
@pytest.mark.parametrize("use", [reentrant, not_reentrant])
@pytest.mark.parametrize("keep_fp32", ["mlp", "proj", "norm", "qkv"])
def test_recomputing_pinned_modules_gives_the_same_gradients_to_the_bit(precision, use, keep_fp32):
    expected, seen = gradients(precision, plain, keep_fp32=keep_fp32)
    recomputed, seen_twice = gradients(precision, use, keep_fp32=keep_fp32)
    assert seen_twice == seen * 2
    assert all(torch.equal(recomputed[name], expected[name]) for name in expected)


# ---- keep_fp32 ----


class Recorder(nn.Linear):
    """A linear layer that knows the dtypes it computed in."""

    def forward(self, x, **kwargs):
        self.dtypes = (x.dtype, *(v.dtype for v in kwargs.values()), torch.is_autocast_enabled("cpu"))
        return super().forward(x)


class Special(Recorder):
    pass


def tower():
    blocks = [nn.ModuleDict({"norm1": Recorder(4, 4), "attn": nn.Sequential(Recorder(4, 4))}) for _ in range(2)]

    class Tower(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(blocks)
            self.special = Special(4, 4)

        def forward(self, x):
            for block in self.blocks:
                x = block["attn"](block["norm1"](x))
            return self.special(x)

    return Tower()


def pinned_names(keep_fp32, precision="bf16"):
    net = tower()
    make(precision, keep_fp32=keep_fp32).boost(net)[0](torch.ones(1, 4))
    names = set()
    for name, module in net.named_modules():
        if isinstance(module, Recorder):
            dtype, autocast = module.dtypes
            if not autocast:
                assert dtype == torch.float32
                names.add(name)
    return names


ATTENTION = {"blocks.0.attn.0", "blocks.1.attn.0"}
NORMS = {"blocks.0.norm1", "blocks.1.norm1"}


@both
@pytest.mark.parametrize(
    ("keep_fp32", "expected"),
    [
        ((), set()),
        ([], set()),
        (Special, {"special"}),
        ((Special,), {"special"}),
        (nn.Sequential, ATTENTION),
        ("special", {"special"}),
        ("blocks.0.attn", {"blocks.0.attn.0"}),
        ("blocks.*.norm1", NORMS),
        ("blocks.1.**", {"blocks.1.norm1", "blocks.1.attn.0"}),
        ("**.norm1", NORMS),
        (["special", "blocks.*.norm1"], NORMS | {"special"}),
        (lambda name, module: name.endswith("norm1"), NORMS),
        (
            [Special, "blocks.0.norm1", lambda n, m: n == "blocks.1.attn"],
            {"special", "blocks.0.norm1", "blocks.1.attn.0"},
        ),
        (lambda name, module: False, set()),
        (["blocks.0.attn", "blocks.0.attn.0"], {"blocks.0.attn.0"}),
        (nn.Linear, ATTENTION | NORMS | {"special"}),
    ],
)
def test_keep_fp32_takes_types_patterns_and_predicates(precision, keep_fp32, expected):
    assert pinned_names(keep_fp32, precision) == expected


@pytest.mark.parametrize("typo", ["blocks.*.norm3", "Special", "block", nn.Conv2d, ["special", "nothing"], "spec.al"])
def test_a_pin_that_selects_nothing_raises_and_changes_nothing(typo):
    net = tower()
    with pytest.raises(ValueError, match=r"keep_fp32=.* selects no module of Tower.*\['blocks', 'special'\]"):
        make("bf16", keep_fp32=typo).boost(net)
    net(torch.ones(1, 4))
    assert net.special.dtypes == (torch.float32, False)
    with make("bf16").autocast():
        net(torch.ones(1, 4))
    assert net.special.dtypes[-1] is True


@both
def test_a_pinned_module_gets_its_keyword_inputs_in_float32_and_others_untouched(precision):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.pinned = Recorder(4, 4)

        def forward(self, x):
            h = self.first(x)
            return self.pinned(h, mask=h, ids=torch.arange(2), double=h.double())

    net = Outer()
    make(precision, keep_fp32="pinned").boost(net)[0](torch.ones(1, 4))
    assert net.pinned.dtypes == (torch.float32, torch.float32, torch.int64, torch.float64, False)


@both
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_inside_a_pinned_module_leaves_autocast_as_it_was(precision, error):
    class Failing(nn.Module):
        def forward(self, x):
            if self.training:
                raise error("inside")
            return x

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.failing = Failing()

        def forward(self, x):
            with pytest.raises(error):
                self.failing(x)
            return self.linear(x)

    net = Outer()
    seen = watch_outputs(net.linear)
    model = make(precision, keep_fp32=Failing).boost(net)[0]
    model(torch.ones(1, 4))
    assert seen == [HALF[precision]]
    assert not torch.is_autocast_enabled("cpu")
    # and the cache of half weights is cleared when the forward ends, so the next one sees new weights
    net.linear.weight.data.zero_()
    net.linear.bias.data.fill_(1.0)
    assert torch.equal(model(torch.ones(1, 4)), torch.ones(1, 4))


def test_pinning_a_module_that_two_models_share_works():
    shared = Recorder(4, 4)
    booster = make("bf16", keep_fp32=Recorder)
    models = [booster.boost(nn.Sequential(nn.Linear(4, 4), shared))[0] for _ in range(2)]
    for model in models:
        model(torch.ones(1, 4))
        assert shared.dtypes == (torch.float32, False)


def test_pinned_modules_train_like_float32_ones():
    def run(precision, **options):
        torch.manual_seed(0)
        net = gemm_net()
        booster = Booster(
            "cpu", FP32() if precision == "fp32" else CLASSES[precision](**options), half_products="native"
        )
        model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
        booster.backward(model(torch.ones(4, 8)).square().mean(), optimizer)
        optimizer.unscale_grads()
        return [p.grad for p in net.parameters()]

    everything = run("bf16", keep_fp32=(nn.Linear, nn.LayerNorm, nn.GELU))
    assert all(torch.equal(a, b) for a, b in zip(everything, run("fp32"), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(run("bf16"), run("fp32"), strict=True))


# ---- models in half ----


@both
def test_a_model_in_half_is_refused_and_the_parameters_are_listed(precision):
    net = gemm_net()
    net[0].half()
    net[3].bfloat16()
    net[3].bias.requires_grad_(False)
    before = {k: v.clone() for k, v in net.state_dict().items()}
    with pytest.raises(
        ValueError, match=rf"0\.weight, 0\.bias, 3\.weight.*mixed_precision='{precision}_naive'"
    ) as info:
        make(precision).boost(net)
    assert "3.bias" not in str(info.value)
    assert "model.float()" in str(info.value)
    assert all(v.dtype == before[k].dtype and torch.equal(v, before[k]) for k, v in net.state_dict().items())


@both
def test_a_criterion_with_trainable_half_parameters_is_refused_too(precision):
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1, dtype=torch.float16))

    with pytest.raises(ValueError, match="half precision: weight"):
        make(precision).boost(gemm_net(), criterion=Loss())


@both
def test_frozen_half_parameters_are_welcome(precision):
    net = gemm_net()
    net[0].half().requires_grad_(False)
    booster = make(precision)
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1))
    booster.backward(model(torch.randn(2, 8)).square().mean(), optimizer)
    assert optimizer.step().applied
    assert net[0].weight.dtype == torch.float16


# ---- the table and users' own strategies ----


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(mixed_precision, "_REGISTRY", dict(mixed_precision._REGISTRY))


def test_strings_mean_the_strategies_with_their_defaults():
    for name, strategy in {"fp32": FP32, "fp16": FP16TorchMixedPrecision, "bf16": BF16MixedPrecision}.items():
        assert type(Booster("cpu", name).precision) is strategy
    assert type(Booster("cpu").precision) is FP32
    assert issubclass(FP32, MixedPrecision)


@pytest.mark.parametrize("unknown", ["fp17", "FP16", "", "float17"])
def test_an_unknown_string_lists_the_legal_ones(unknown):
    with pytest.raises(
        ValueError, match=rf"mixed_precision='{unknown}' is unknown; choose one of .*'bf16'.*'fp16'.*'fp32'"
    ):
        Booster("cpu", unknown)


@pytest.mark.parametrize("wrong", [BF16MixedPrecision, 16, torch.complex64, object()])
def test_other_objects_raise_a_type_error(wrong):
    with pytest.raises(TypeError, match="mixed_precision must be one of") as info:
        Booster("cpu", wrong)
    assert ("pass an instance" in str(info.value)) == isinstance(wrong, type)


def test_a_registered_strategy_is_known_by_its_name(registry):
    class Mine(BF16MixedPrecision):
        pass

    mixed_precision.register("mine", Mine)
    mixed_precision.register("mine", Mine)
    assert "mine" in mixed_precision.available()
    assert type(Booster("cpu", "mine").precision) is Mine
    with pytest.raises(ValueError, match="'mine' is already Mine"):
        mixed_precision.register("mine", BF16MixedPrecision)
    with pytest.raises(ValueError, match="'fp16' is already FP16TorchMixedPrecision"):
        mixed_precision.register("fp16", Mine)
    for wrong in (Mine(), int, "fp16"):
        with pytest.raises(TypeError, match="needs a subclass"):
            mixed_precision.register("other", wrong)


def test_a_users_strategy_decides_context_scale_policy_and_configuration():
    calls = []

    class Mine(MixedPrecision):
        policy = DtypePolicy(output=torch.float64)

        @contextmanager
        def forward_context(self):
            calls.append("enter")
            with torch.autocast(self.device.type, torch.bfloat16):
                yield

        def make_scaler(self):
            return DynamicScale(init_scale=8.0)

        def configure(self, model, optimizer=None, criterion=None, **options):
            calls.append("configure")
            return super().configure(model, optimizer, criterion, **options)

    net = gemm_net()
    seen = watch_outputs(net)
    booster = Booster("cpu", Mine())
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
    out = model(torch.ones(1, 8))
    assert out.dtype == torch.float64
    assert seen[0] == torch.bfloat16
    assert calls == ["configure", "enter"]
    assert optimizer.loss_scale == 8.0
    booster.backward(out.sum(), optimizer)
    assert net[0].weight.grad.abs().sum() > 0
    assert optimizer.step().loss_scale == 8.0


def test_a_users_strategy_may_convert_modules():
    class Swapping(MixedPrecision):
        def convert(self, model):
            model[0] = nn.Linear(8, 16, bias=False)
            return model

    net = gemm_net()
    model = Booster("cpu", Swapping()).boost(net)[0]
    assert model[0].bias is None


def test_fp16_options_reach_the_scale_and_wrong_ones_raise_at_once():
    booster = make("fp16", init_scale=4.0, growth_interval=1, growth_factor=4.0, backoff_factor=0.25, max_scale=64.0)
    net = gemm_net()
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.0))
    scales = []
    for factor in (1.0, 1.0, 1.0, float("inf"), 1.0):
        booster.backward(model(torch.ones(1, 8)).sum() * factor, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        scales.append(optimizer.loss_scale)
    assert scales == [16.0, 64.0, 64.0, 16.0, 64.0]
    with pytest.raises(ValueError, match="growth_factor"):
        FP16TorchMixedPrecision(growth_factor=0.5)
    with pytest.raises(TypeError):
        BF16MixedPrecision(init_scale=2.0)
    with pytest.raises(TypeError):
        FP16TorchMixedPrecision(init_scal=2.0)


def test_two_boosters_in_one_process_do_not_touch_each_other():
    nets, models, optimizers, seen = [], [], [], []
    boosters = [make("fp16"), make("bf16"), Booster("cpu")]
    for booster in boosters:
        net = gemm_net()
        seen.append(watch_outputs(net))
        model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
        nets.append(net), models.append(model), optimizers.append(optimizer)
    outs = [model(torch.ones(1, 8)) for model in models]
    for booster, out, optimizer in zip(boosters, outs, optimizers, strict=True):
        booster.backward(out.square().mean(), optimizer)
        assert optimizer.step().applied
    assert [s[0] for s in seen] == [torch.float16, torch.bfloat16, torch.float32]
    assert [o.loss_scale for o in optimizers] == [256.0, 1.0, 1.0]


@pytest.mark.parametrize("outer", ["fp16", "bf16", "fp16_naive", "bf16_naive"])
@pytest.mark.parametrize("training", [True, False])
def test_a_float32_model_takes_the_activations_of_a_half_one_in_float32(outer, training):
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    inner = Booster("cpu").boost(teacher)[0]
    given, returned = [], []

    class Student(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.teacher = nn.Linear(4, 4), [inner]

        def forward(self, x):
            given.append(self.layer(x))
            returned.append(self.teacher[0](given[0]))
            return given[0] - returned[0]

    with torch.set_grad_enabled(training):
        Booster("cpu", outer).boost(Student())[0](torch.ones(2, 4))
        assert given[0].dtype in (torch.float16, torch.bfloat16)
        assert torch.equal(returned[0], teacher(given[0].float()))


def test_a_model_with_half_weights_under_fp32_computes_in_them():
    model = Booster("cpu").boost(nn.Linear(4, 4).to(torch.bfloat16))[0]
    assert model(torch.ones(1, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16


# ---- curves ----


class OfData(MixedPrecision):
    """bfloat16 said by its policy alone; attention as on CUDA."""

    policy = DtypePolicy(compute=torch.bfloat16, output=torch.float32)


def test_a_policy_that_names_what_to_compute_in_is_a_precision():
    found = []
    for precision in (OfData(), BF16MixedPrecision(sdpa_fp32=False)):
        torch.manual_seed(0)
        booster, model = Booster("cpu", precision, half_products="native"), gemm_net()
        model, optimizer, criterion, *_ = booster.boost(
            model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss()
        )
        seen = watch_outputs(model[0])
        for _ in range(3):
            loss = criterion(model(torch.ones(2, 8)), torch.zeros(2, 4))
            booster.backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        found.append((loss, *model.parameters()))
        assert seen == [torch.bfloat16] * 3
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert make("fp16").precision.policy.compute == torch.float16


@pytest.mark.parametrize("wrong", [torch.float32, torch.float64, torch.int8, "bfloat16"])
def test_what_autocast_cannot_compute_in_is_no_policy(wrong):
    with pytest.raises((TypeError, ValueError), match="compute"):
        DtypePolicy(compute=wrong)
