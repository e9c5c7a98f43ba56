"""Tensor parallelism: a divided model computes what the whole one does, loss, gradients and state dict included."""

import contextlib
import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from packages import package
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from booster import Booster
from booster.common.torch_internals.tensor_internals import gather_full
from booster.mixed_precision.half_products.product_choice import HalfProducts
from booster.mixed_precision.policy import DtypePolicy, cast_parameters, half_policy, install_keep_fp32
from booster.plugin import HybridParallelPlugin
from booster.plugin.tensor_parallel import apply_tensor_parallel, check_tensor_parallel, fsdp_placement
from booster.tensors.cast_regions import cast_floats

DIM, HEADS, TIME, VOCAB = 16, 4, 8, 12


# ---- models ----


class Attention(nn.Module):
    def __init__(self, bias=True):
        super().__init__()
        self.q = nn.Linear(DIM, DIM, bias=bias)
        self.k = nn.Linear(DIM, DIM, bias=bias)
        self.v = nn.Linear(DIM, DIM, bias=bias)
        self.q_norm = nn.LayerNorm(DIM // HEADS)
        self.out = nn.Linear(DIM, DIM, bias=bias)

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2) for p in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(self.q_norm(q), k, v, is_causal=True)
        return self.out(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(DIM)
        self.attn = Attention()
        self.norm2 = nn.LayerNorm(DIM)
        self.scale = nn.Parameter(torch.rand(DIM))
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.scale * self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, tied=False, checkpointed=False):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM, padding_idx=1)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.checkpointed = checkpointed
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(self.norm(x))


INNER = {
    "blocks.*.attn.q": "colwise",
    "blocks.*.attn.k": "colwise",
    "blocks.*.attn.v": "colwise",
    "blocks.*.attn.q_norm": "replicated_with_grad_allreduce",
    "blocks.*.attn.out": "rowwise",
    "blocks.*.mlp.0": "colwise",
    "blocks.*.mlp.2": "rowwise",
}
STRINGS = {"embed": "embedding_rowwise", **INNER, "head": "colwise_gather_output"}
STYLES = {
    "embed": RowwiseParallel(input_layouts=Replicate()),
    **{f"blocks.*.attn.{name}": ColwiseParallel() for name in "qkv"},
    "blocks.*.attn.q_norm": SequenceParallel(sequence_dim=1, use_local_output=True),
    "blocks.*.attn.out": RowwiseParallel(),
    "blocks.*.mlp.0": ColwiseParallel(),
    "blocks.*.mlp.2": RowwiseParallel(),
    "head": ColwiseParallel(output_layouts=Replicate()),
}


def ids(batch=3):
    return torch.randint(0, VOCAB, (batch, TIME), generator=torch.Generator().manual_seed(1))


def gpt(**options):
    torch.manual_seed(0)
    return GPT(**options), (ids(),), {}


def vit(**options):
    package("timm")
    from timm.models.vision_transformer import VisionTransformer

    torch.manual_seed(0)
    options = {"class_token": False, "global_pool": "avg", "qkv_bias": True, **options}
    model = VisionTransformer(
        img_size=8, patch_size=4, in_chans=1, embed_dim=DIM, depth=2, num_heads=HEADS, num_classes=4, **options
    )
    for param in model.parameters():  # biases start at zero, where mistakes hide
        nn.init.normal_(param, std=0.3)
    return model, (torch.randn(3, 1, 8, 8),), {}


def rich_vit():
    package("timm")
    from timm.layers import SwiGLUPacked

    return vit(qk_norm=True, init_values=0.5, mlp_layer=SwiGLUPacked, class_token=True, global_pool="token")


def encoder(batch_first=True, norm_first=False, **masks):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(DIM, HEADS, 32, dropout=0.0, batch_first=batch_first, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    for param in model.parameters():
        nn.init.normal_(param, std=0.3)
    x = torch.randn(3, TIME, DIM)
    return model, (x if batch_first else x.transpose(0, 1),), masks


def masked_encoder():
    padding = torch.zeros(3, TIME, dtype=torch.bool)
    padding[1, -3:] = True
    return encoder(mask=torch.ones(TIME, TIME).triu(1).bool(), src_key_padding_mask=padding)


def causal_encoder():
    return encoder(norm_first=True, mask=nn.Transformer.generate_square_subsequent_mask(TIME), is_causal=True)


def seq2seq():
    torch.manual_seed(0)
    layers = encoder(batch_first=False)[0]
    model = nn.Transformer(DIM, HEADS, 2, 2, 32, dropout=0.0, custom_encoder=layers)
    for param in model.parameters():
        nn.init.normal_(param, std=0.3)
    return model, (torch.randn(6, 3, DIM), torch.randn(TIME, 3, DIM)), {}


class OtherWidths(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(DIM, HEADS, kdim=6, vdim=10, batch_first=True)

    def forward(self, query, key, value):
        mask = (
            torch.rand(query.shape[0] * HEADS, query.shape[1], TIME, generator=torch.Generator().manual_seed(5)) > 0.5
        )
        mask[..., 0] = False
        return self.attn(query, key, value, attn_mask=mask, need_weights=False)[0]


def other_widths():
    torch.manual_seed(0)
    model = OtherWidths()
    nn.init.normal_(model.attn.in_proj_bias)
    return model, (torch.randn(3, 5, DIM), torch.randn(3, TIME, 6), torch.randn(3, TIME, 10)), {}


def tied_gpt():
    return gpt(tied=True)


SMALL = {"vocab_size": VOCAB, "initializer_range": 0.3, "use_cache": False}
DEEP = {"num_hidden_layers": 2, "num_attention_heads": HEADS}
SIDES = {
    f"{side}_{key}": value
    for side in ("encoder", "decoder")
    for key, value in {"layers": 2, "attention_heads": HEADS, "ffn_dim": 24}.items()
}
# model type: model class, options of its configuration
HUGGING_FACE = {
    "bert": ("BertForMaskedLM", {**SMALL, **DEEP, "hidden_size": DIM, "intermediate_size": 24}),
    "roberta": ("RobertaForMaskedLM", {**SMALL, **DEEP, "hidden_size": DIM, "intermediate_size": 24}),
    "albert": (
        "AlbertForMaskedLM",
        {**SMALL, **DEEP, "hidden_size": DIM, "embedding_size": 8, "intermediate_size": 24},
    ),
    "distilbert": ("DistilBertForMaskedLM", {**SMALL, "dim": DIM, "n_layers": 2, "n_heads": HEADS, "hidden_dim": 24}),
    "opt": (
        "OPTForCausalLM",
        {**SMALL, **DEEP, "hidden_size": DIM, "ffn_dim": 24, "word_embed_proj_dim": 8, "init_std": 0.3},
    ),
    "bloom": ("BloomForCausalLM", {**SMALL, "hidden_size": DIM, "n_layer": 2, "n_head": HEADS}),
    "gpt2": ("GPT2LMHeadModel", {**SMALL, "n_embd": DIM, "n_layer": 2, "n_head": HEADS}),
    "gptj": ("GPTJForCausalLM", {**SMALL, "n_embd": DIM, "n_layer": 2, "n_head": HEADS, "rotary_dim": 2}),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        {
            **SMALL,
            "hidden_size": DIM,
            "num_layers": 2,
            "num_heads": HEADS,
            "attention_types": [[["global", "local"], 1]],
        },
    ),
    "mixtral": (
        "MixtralForCausalLM",
        {
            **SMALL,
            **DEEP,
            "hidden_size": DIM,
            "intermediate_size": 24,
            "num_key_value_heads": 2,
            "num_local_experts": 4,
        },
    ),
    "t5": (
        "T5ForConditionalGeneration",
        {**SMALL, "d_model": DIM, "d_kv": 4, "num_heads": HEADS, "num_layers": 2, "d_ff": 24},
    ),
    "bart": (
        "BartForConditionalGeneration",
        {
            **SMALL,
            "d_model": DIM,
            **SIDES,
            "init_std": 0.3,
        },
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        {
            **SMALL,
            "d_model": DIM,
            **SIDES,
            "num_mel_bins": 4,
            "max_source_positions": TIME,
            "init_std": 0.3,
        },
    ),
    "vit": (
        "ViTForImageClassification",
        {**DEEP, "hidden_size": DIM, "intermediate_size": 24, "image_size": 8, "patch_size": 4, "num_channels": 1},
    ),
    **{
        kind: (
            f"{name}ForCausalLM",
            {**SMALL, **DEEP, "hidden_size": DIM, "intermediate_size": 24, "num_key_value_heads": 2, "head_dim": 4},
        )
        for kind, name in {
            "apertus": "Apertus",
            "llama": "Llama",
            "mistral": "Mistral",
            "olmo2": "Olmo2",
            "phi3": "Phi3",
            "qwen2": "Qwen2",
            "qwen3": "Qwen3",
            "gemma": "Gemma",
            "gemma2": "Gemma2",
            "granite": "Granite",
            "cohere": "Cohere",
        }.items()
    },
}


def hugging_face(name, dropout=0.0, **more):
    transformers = package("transformers")
    class_name, options = HUGGING_FACE[name]
    config = transformers.AutoConfig.for_model(name)
    for key in [key for key in config.to_dict() if "drop" in key]:
        setattr(config, key, dropout)
    ids_ = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    for key, value in (options | (ids_ if "vocab_size" in options else {}) | more).items():
        setattr(config, key, value)
    torch.manual_seed(0)
    model = getattr(transformers, class_name)(config)
    for key, param in model.named_parameters():
        if key.endswith("bias"):
            nn.init.normal_(param, std=0.3)
    if name == "vit":
        return model, (torch.randn(3, 1, 8, 8),), {"labels": torch.tensor([0, 1, 1])}
    if name == "whisper":
        return model, (torch.randn(3, 4, 2 * TIME),), {"labels": ids()}
    return model, (ids(),), {"labels": ids()}


def plan_of(model):
    assert isinstance(model, GPT)
    return STRINGS


# name: model, plan, sequence parallelism
CASES = {
    "strings": (gpt, STRINGS, False),
    "styles": (gpt, STYLES, False),
    "callable": (gpt, plan_of, False),
    "unordered exact names": (gpt, {"blocks.1.mlp.2": "rowwise_split_input", "embed": "embedding_colwise"}, False),
    "tied": (tied_gpt, STRINGS, False),
    "tied styles": (tied_gpt, STYLES | {"head": ColwiseParallel(output_layouts=Replicate())}, False),
    "gpt sequence": (gpt, STRINGS, True),
    "timm": (vit, None, False),
    "timm strings": (vit, {"blocks.*.attn.qkv": "colwise", "blocks.*.attn.proj": "rowwise"}, False),
    "timm rich": (rich_vit, None, False),
    "timm sequence": (vit, None, True),
    "encoder": (encoder, None, False),
    "encoder masks": (masked_encoder, None, False),
    "encoder sequence": (causal_encoder, None, True),
    "seq2seq": (seq2seq, None, False),
    "seq2seq sequence": (seq2seq, None, True),
    "attention": (other_widths, {"attn": "colwise", "attn.out_proj": "rowwise"}, False),
    "llama tied": (partial(hugging_face, "llama", tie_word_embeddings=True), None, False),
    **{name: (partial(hugging_face, name), None, False) for name in HUGGING_FACE},
    **{f"{name} sequence": (partial(hugging_face, name), None, True) for name in ("llama", "gpt2", "bloom", "gptj")},
}


# ---- comparing ----


def tp_mesh(world_size):
    return init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))


def divide(model, mesh, plan=None, sequence=False, policy=None):
    apply_tensor_parallel(model, mesh=mesh, tp_plan=plan, sequence_parallelism=sequence, policy=policy or DtypePolicy())
    return model


def whole(tensor):
    return gather_full(tensor) if isinstance(tensor, DTensor) else tensor


def loss_of(out):
    """Output and loss of what a model returns."""
    if hasattr(out, "logits"):
        return out.logits, out.loss
    return out, (out.float() * torch.linspace(-1, 1, out.numel()).view_as(out)).square().mean()


def run(model, args, kwargs):
    """Output and loss; gradients are left in the model."""
    out, loss = loss_of(model(*args, **kwargs))
    loss.backward()
    return out.detach(), loss.detach()


def distance(actual, expected):
    return (actual.float() - expected.float()).abs().max().item() / max(1.0, expected.float().abs().max().item())


def compare(model, reference, args, kwargs, tolerance):
    out, loss = run(model, args, kwargs)
    expected_out, expected_loss = run(reference, args, kwargs)
    assert distance(out, expected_out) <= tolerance, distance(out, expected_out)
    assert distance(loss, expected_loss) <= tolerance
    found = dict(model.named_parameters())
    expected = {name: param.grad for name, param in reference.named_parameters()}
    largest = max(grad.abs().max().item() for grad in expected.values() if grad is not None)
    for name, grad in expected.items():
        assert (found[name].grad is None) == (grad is None), name
        if grad is not None:  # of keys' biases zero, up to rounding, which differs among CPUs
            scale = max(grad.abs().max().item(), largest / 20)
            assert distance(whole(found[name].grad) / scale, grad / scale) <= 10 * tolerance, name


def same_on_all_ranks(tensor, mesh):
    ranks = DTensor.from_local(tensor[None], mesh, [Shard(0)], run_check=False).full_tensor()
    return all(torch.equal(part, ranks[0]) for part in ranks)


def check_case(rank, world_size, name):
    build, plan, sequence = CASES[name]
    model, args, kwargs = build()
    reference = copy.deepcopy(model)
    mesh = tp_mesh(world_size)
    shapes = {key: value.shape for key, value in model.state_dict().items()}
    divide(model, mesh, plan, sequence)
    state = model.state_dict()
    assert {key: value.shape for key, value in state.items()} == shapes
    for key, value in reference.state_dict().items():
        assert torch.equal(whole(state[key]), value), key
    held = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in model.parameters())
    assert held < sum(p.numel() for p in model.parameters())
    assert all(
        p.to_local().untyped_storage().nbytes() == p.to_local().nbytes
        for p in model.parameters()
        if isinstance(p, DTensor)
    )
    compare(model, reference, args, kwargs, 1e-6)
    for key, param in model.named_parameters():
        if not isinstance(param, DTensor) and param.grad is not None:
            assert same_on_all_ranks(param.grad, mesh), key
    model.eval(), reference.eval()
    with torch.no_grad():
        actual, expected = model(*args, **kwargs), reference(*args, **kwargs)
    actual, expected = (getattr(out, "logits", out) for out in (actual, expected))
    assert distance(actual, expected) <= 1e-6


@pytest.mark.slow_cases(
    "roberta",
    "albert",
    "distilbert",
    "gptj",
    "gpt_neo",
    "bart",
    "mistral",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen3",
    "gemma",
    "granite",
    "gptj sequence",
    "bloom sequence",
    "llama tied",
    "timm strings",
    "seq2seq",
)
@pytest.mark.parametrize("name", CASES)
def test_a_divided_model_is_the_whole_one(ranks2, name):
    ranks2(check_case, name)


def second_gradients(model, args, kwargs):
    """Gradients, by name, of a penalty on the gradients of the loss; the fused kernel of attention has none of those."""
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    with sdpa_kernel(SDPBackend.MATH):
        loss = loss_of(model(*args, **kwargs))[1]
        grads = torch.autograd.grad(loss, list(params.values()), create_graph=True, allow_unused=True)
        penalty = sum(whole(grad).square().sum() for grad in grads if grad is not None)
        found = torch.autograd.grad(penalty, list(params.values()), allow_unused=True)
    return {name: grad for name, grad in zip(params, found, strict=True) if grad is not None}


def check_second_gradients(rank, world_size, name):
    build, plan, sequence = CASES[name]
    model, args, kwargs = build()
    reference = copy.deepcopy(model)
    mesh = tp_mesh(world_size)
    divide(model, mesh, plan, sequence)
    found, expected = second_gradients(model, args, kwargs), second_gradients(reference, args, kwargs)
    largest = max(grad.abs().max().item() for grad in expected.values())
    for key, grad in expected.items():
        scale = max(grad.abs().max().item(), largest / 100)
        assert distance(whole(found[key]) / scale, grad / scale) <= 1e-4, key


# One of each way in which a layer is divided: `make slow` differentiates every other model twice too.
TWICE = {"strings", "tied", "gpt sequence", "timm", "timm rich", "encoder", "gpt2", "llama", "mixtral", "t5", "bloom"}


# torch's own styles (2.13) lose what comes back to the gradients that they sum.
@pytest.mark.slow_cases("mixtral", "timm rich", "bloom", "gpt2", "t5")
@pytest.mark.skipif(torch.__version__.startswith("2.11."), reason="of torch 2.11: its DTensors differentiate once")
@pytest.mark.parametrize(
    "name",
    [n if n in TWICE else pytest.param(n, marks=pytest.mark.slow) for n in CASES if "styles" not in n],
)
def test_gradients_of_gradients_are_those_of_the_whole_model(ranks2, name):
    ranks2(check_second_gradients, name)


# Four ranks would import transformers each, which takes longer than all cases of the others.
@pytest.mark.slow_cases("encoder")
@pytest.mark.parametrize(
    "name",
    ["strings", "gpt sequence", "encoder", *(pytest.param(name, marks=pytest.mark.slow) for name in ("timm", "gpt2"))],
)
def test_so_it_is_on_four_ranks(ranks4, name):
    ranks4(check_case, name)


def check_nested(rank, world_size):
    model, args, _ = encoder()
    model.use_nested_tensor = True  # as the constructor does by default
    padding = torch.arange(TIME) >= torch.tensor([[TIME], [5], [3]])
    reference = copy.deepcopy(model).eval()
    reference.use_nested_tensor = False
    divide(model, tp_mesh(world_size)).eval()
    with torch.no_grad():
        out, expected = (each(*args, src_key_padding_mask=padding) for each in (model, reference))
    assert distance(out[~padding], expected[~padding]) <= 1e-6


def test_an_encoder_that_would_use_nested_tensors_in_evaluation_computes_without(ranks2):
    ranks2(check_nested)


# ---- frozen and tied weights, one rank ----


def check_frozen(rank, world_size):
    for plan in (STRINGS, STYLES):
        model, args, kwargs = gpt()
        model.blocks[0].requires_grad_(False)
        model.head.requires_grad_(False)
        reference = copy.deepcopy(model)
        divide(model, tp_mesh(world_size), plan)
        frozen = {name for name, param in model.named_parameters() if not param.requires_grad}
        assert frozen == {name for name, param in reference.named_parameters() if not param.requires_grad}
        compare(model, reference, args, kwargs, 1e-6)


def test_frozen_weights_stay_frozen(ranks2):
    ranks2(check_frozen)


def check_tied(rank, world_size):
    model, args, kwargs = tied_gpt()
    before = model.embed.weight
    divide(model, tp_mesh(world_size), STRINGS)
    assert model.embed.weight is model.head.weight is not before
    assert isinstance(model.embed.weight, DTensor)
    model, args, kwargs = hugging_face("llama", tie_word_embeddings=True)
    divide(model, tp_mesh(world_size))
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_tied_weight_stays_one_parameter(ranks2):
    ranks2(check_tied)


def check_parting_ties(rank, world_size):
    message = (
        "'embed.weight' and 'head.weight' are one tied parameter, but tp_plan makes it {} in the one and S(0) in the other; "
        "name both modules or neither, for example 'embedding_rowwise' for an embedding and 'colwise_gather_output' for the "
        "head that shares its weight"
    )
    for given, said in ((INNER, "whole"), ({**INNER, "embed": "embedding_colwise"}, "S(1)")):
        model, *_ = tied_gpt()
        before = dict(model.named_parameters())
        with pytest.raises(ValueError) as error:
            divide(model, tp_mesh(world_size), {**given, "head": "colwise_gather_output"})
        assert str(error.value).replace("Shard(dim=0)", "S(0)").replace("Shard(dim=1)", "S(1)") == message.format(said)
        assert all(param is before[name] for name, param in model.named_parameters())


def test_a_plan_that_would_part_a_tied_weight_raises_before_anything_changes(ranks2):
    ranks2(check_parting_ties)


def check_one_rank(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("dp", "tp"))["tp"]
    for model, plan in ((gpt()[0], STRINGS), (gpt()[0], None), (nn.Linear(3, 3), None)):
        before = dict(model.named_parameters())
        divide(model, mesh, plan, True)
        assert all(param is before[name] for name, param in model.named_parameters())
        assert "forward" not in vars(model)
    with pytest.raises(ValueError, match="match no module"):
        divide(gpt()[0], mesh, {"nothing": "colwise"})


def test_on_one_rank_nothing_changes_but_a_wrong_plan_raises(ranks2):
    ranks2(check_one_rank)


def check_start(rank, world_size):
    torch.manual_seed(rank)
    model = GPT()
    model.register_buffer("count", torch.tensor(rank))
    boosted, *_ = Booster("cpu", "fp32", HybridParallelPlugin(world_size, 1, tp_plan=STRINGS)).boost(model)
    torch.manual_seed(0)
    expected = GPT().state_dict()
    state = boosted.module.state_dict()
    assert state.pop("count") == 0
    assert all(torch.equal(whole(value), expected[name]) for name, value in state.items())


def test_all_ranks_start_from_the_weights_of_the_first(ranks2):
    ranks2(check_start)


# ---- precisions ----


def attention_in_float32(dtype):
    products = HalfProducts(dtype, sdpa_fp32=True)
    products.choose("native")
    return products.forward_context("cpu")


def check_autocast(rank, world_size, name, dtype, tolerance):
    build, plan, sequence = CASES[name]
    model, args, kwargs = build()
    reference = copy.deepcopy(model)
    divide(model, tp_mesh(world_size), plan, sequence)
    with torch.autocast("cpu", dtype), attention_in_float32(dtype):
        compare(model, reference, args, kwargs, tolerance)


@pytest.mark.crossed
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float16, 2e-3), (torch.bfloat16, 1.6e-2)], ids=["fp16", "bf16"]
)
@pytest.mark.parametrize("name", ["strings", "styles", "timm rich", "encoder sequence", "llama sequence", "gpt2"])
def test_autocast_is_that_of_one_process(ranks2, name, dtype, tolerance):
    ranks2(check_autocast, name, dtype, tolerance)


def check_autocast_dtype(rank, world_size):
    for plan in ({"0": "colwise", "1": "rowwise"}, {"0": "rowwise_split_input", "1": "colwise_gather_output"}):
        model = divide(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), tp_mesh(world_size), plan)
        with torch.autocast("cpu", torch.bfloat16):
            assert model[0](torch.ones(2, 4)).dtype == model(torch.ones(2, 4)).dtype == torch.bfloat16


def test_under_autocast_divided_layers_return_half(ranks2):
    ranks2(check_autocast_dtype)


def check_half(rank, world_size, name, dtype, cast_first):
    build, plan, sequence = CASES[name]
    model, args, kwargs = build()
    reference = copy.deepcopy(model)
    policy = half_policy(model, dtype, keep_fp32=nn.LayerNorm if isinstance(model, GPT) else ())
    if cast_first:
        divide(cast_parameters(model, policy), tp_mesh(world_size), plan, sequence, policy)
        install_keep_fp32(model, policy)
    else:
        cast_parameters(divide(model, tp_mesh(world_size), plan, sequence, policy), policy)
    cast_parameters(reference, policy)
    args = cast_floats(args, dtype)
    dtypes = {key: param.dtype for key, param in reference.named_parameters()}
    assert {key: param.dtype for key, param in model.named_parameters()} == dtypes
    with attention_in_float32(dtype):
        compare(model, reference, args, kwargs, 5e-2 if sequence else 1e-2)


@pytest.mark.crossed
@pytest.mark.parametrize("cast_first", [True, False], ids=["cast, divide", "divide, cast"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("name", ["strings", "styles", "gpt sequence", "timm", "encoder sequence"])
def test_half_weights_compute_what_one_process_does(ranks2, name, dtype, cast_first):
    ranks2(check_half, name, dtype, cast_first)


def check_pinned(rank, world_size, plan, returned):
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(2))
        model[1].weight.copy_(torch.tensor([[4.0, -4.0], [4.0, -4.0]]))
        model[1].bias.fill_(1.0)
    policy = half_policy(model, torch.float16, keep_fp32="1")
    cast_parameters(divide(model, tp_mesh(world_size), plan, policy=policy), policy)
    out = model(torch.full((1, 2), 60000.0, dtype=torch.float16))
    assert out.dtype == returned
    assert out.tolist() == [[1.0, 1.0]]  # in float16 the ranks' terms, 240000 and -240000, would be infinite
    assert model[1].weight.dtype == torch.float32


@pytest.mark.parametrize(
    ("plan", "returned"),
    [
        ({"0": "colwise", "1": "rowwise"}, torch.float32),
        ({"0": ColwiseParallel(), "1": RowwiseParallel()}, torch.float16),  # torch's styles return a class of their own
    ],
    ids=["strings", "styles"],
)
def test_a_module_pinned_to_float32_is_reduced_in_float32(ranks2, plan, returned):
    ranks2(check_pinned, plan, returned)


def check_checkpointing(rank, world_size, sequence):
    model, args, kwargs = gpt(checkpointed=True)
    reference = gpt()[0]
    divide(model, tp_mesh(world_size), STRINGS, sequence)
    compare(model, reference, args, kwargs, 1e-6)


@pytest.mark.parametrize("sequence", [False, True])
def test_activation_checkpointing_recomputes_the_same(ranks2, sequence):
    ranks2(check_checkpointing, sequence)


def check_dropout(rank, world_size, sequence):
    model, args, kwargs = vit(proj_drop_rate=0.5, attn_drop_rate=0.5, drop_path_rate=0.5)
    mesh = tp_mesh(world_size)
    divide(model, mesh, None, sequence)
    torch.manual_seed(3)
    out, _ = run(model, args, kwargs)
    assert same_on_all_ranks(out, mesh)
    for name, param in model.named_parameters():
        assert same_on_all_ranks(whole(param.grad), mesh), name


@pytest.mark.parametrize("sequence", [False, True])
def test_dropout_leaves_ranks_of_one_seed_in_agreement(ranks2, sequence):
    ranks2(check_dropout, sequence)


def drifted(rank, world_size, names):
    """Of each model, dropout on, the whole weights that differ after ranks drew unequally before three steps."""
    found = {}
    for name in names:
        model, args, kwargs = hugging_face(name, dropout=0.2)
        b = Booster("cpu", "fp32", HybridParallelPlugin(tp_size=2, pp_size=1))
        model, optimizer, *_ = b.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        for step in range(3):
            torch.rand(5 * rank + step)
            b.backward(model.train()(*args, **kwargs).loss, optimizer)
            assert optimizer.step().applied
            optimizer.zero_grad()
        alike = {key: p.detach() for key, p in b.unwrap(model).named_parameters() if not isinstance(p, DTensor)}
        mesh = next(p.device_mesh for p in b.unwrap(model).parameters() if isinstance(p, DTensor))
        found[name] = [key for key, value in alike.items() if not same_on_all_ranks(value, mesh)]
    return found


@pytest.mark.parametrize(
    "names", [["gpt_neo", "llama"], pytest.param(list(HUGGING_FACE), marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_no_model_with_dropout_drifts_where_ranks_drew_unequally(ranks2, names):
    for found in ranks2(drifted, names):
        assert found == {name: [] for name in names}


def check_accumulation(rank, world_size):
    model, args, kwargs = vit(qk_norm=True)
    reference = copy.deepcopy(model)
    divide(model, tp_mesh(world_size), None, True)
    for each in (model, reference):
        run(each, args, kwargs)
    compare(model, reference, args, kwargs, 1e-6)


def test_gradients_accumulate(ranks2):
    ranks2(check_accumulation)


# ---- with data parallelism ----


def check_fsdp(rank, world_size, name, replicate):
    """Under fully_shard over as many copies, or parts, as there are pairs of ranks."""
    build, plan, sequence = CASES[name]
    model, args, kwargs = build()
    reference = copy.deepcopy(model)
    dims = (world_size // 2, 1, 2) if replicate else (1, world_size // 2, 2)
    mesh = init_device_mesh("cpu", dims, mesh_dim_names=("replicate", "shard", "tp"))
    dp = mesh["replicate", "shard"] if replicate else mesh["shard"]
    divide(model, mesh["tp"], plan, sequence)
    blocks = next(
        each for each in model.modules() if isinstance(each, (nn.ModuleList, nn.Sequential)) and len(each) == 2
    )
    for module in (*blocks, model):
        fully_shard(module, mesh=dp, reshard_after_forward=False, shard_placement_fn=fsdp_placement)
    for key, value in reference.state_dict().items():
        param = model.state_dict()[key]
        assert torch.equal(whole(param), value), key
        cut = distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None)
        assert torch.equal(cut.to_local(), param.to_local()), key
    compare(model, reference, args, kwargs, 1e-6)  # every rank has the whole batch: the mean is what each has


@pytest.mark.slow_cases("tied")
@pytest.mark.crossed
@pytest.mark.parametrize("replicate", [False, True], ids=["shard", "replicate"])
@pytest.mark.parametrize(
    "name", ["strings", pytest.param("timm rich", marks=pytest.mark.slow), "encoder sequence", "tied"]
)
def test_fully_shard_divides_a_divided_model_again(ranks4, name, replicate):
    ranks4(check_fsdp, name, replicate)


@pytest.mark.crossed
@pytest.mark.parametrize("replicate", [False, True], ids=["shard", "replicate"])
@pytest.mark.parametrize(
    ("name", "ranks"),
    [(n, r) if r == 2 else pytest.param(n, r, marks=pytest.mark.slow) for n in ("gpt2", "mixtral") for r in (2, 4)],
)
def test_fully_shard_divides_a_divided_model_of_transformers_again(run_on_ranks, name, ranks, replicate):
    run_on_ranks(check_fsdp, ranks, name, replicate)


# ---- what raises ----


def check_twice(rank, world_size):
    model = divide(gpt()[0], tp_mesh(world_size), STRINGS)
    with pytest.raises(RuntimeError) as error:
        divide(model, tp_mesh(world_size), STRINGS)
    assert str(error.value) == (
        "'embed.weight' is a DTensor already: the model was divided before; pass it as it was then"
    )


def test_a_model_is_divided_once(ranks2):
    ranks2(check_twice)


def check_weights_wanted(rank, world_size):
    model, args, _ = other_widths()
    divide(model, tp_mesh(world_size), {"attn": "colwise", "attn.out_proj": "rowwise"})
    with pytest.raises(ValueError) as error:
        model.attn(*args)
    assert str(error.value) == (
        "attention weights are not available under tensor parallelism; call with need_weights=False"
    )


def test_attention_weights_are_refused(ranks2):
    ranks2(check_weights_wanted)


def check_uneven_sequence(rank, world_size):
    model, *_ = gpt()
    divide(model, tp_mesh(world_size), STRINGS, True)
    with pytest.raises(ValueError) as error:
        model(ids()[:, :5])
    assert str(error.value) == (
        "dimension 1 of a tensor of shape (3, 5, 16) does not divide by tp_size=2; under sequence_parallelism=True pad the "
        "sequence to a multiple of it, or use sequence_parallelism=False"
    )


def test_a_sequence_that_does_not_divide_raises(ranks2):
    ranks2(check_uneven_sequence)


def check_mesh(rank, world_size):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    with pytest.raises(ValueError) as error:
        divide(gpt()[0], mesh, STRINGS)
    assert str(error.value) == "tensor parallelism needs a mesh of one dimension, got 2; pass mesh['tp']"
    model, *_ = gpt()
    before = dict(model.named_parameters())
    check_tensor_parallel(model, mesh=tp_mesh(2), tp_plan=STRINGS, sequence_parallelism=True)
    assert all(param is before[name] for name, param in model.named_parameters())


def test_checking_changes_nothing_and_wants_one_dimension(ranks2):
    ranks2(check_mesh)


# ---- collectives ----


class Between(nn.Module):
    """A norm over all features, or a parameter for each of them, between two layers of a plan."""

    def __init__(self, what):
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.norm = nn.LayerNorm(2 * DIM) if what == "norm" else None
        self.scale = nn.Parameter(torch.ones(2 * DIM)) if what == "parameter" else None

    def forward(self, x):
        h = self.up(x)
        return self.down(self.norm(h) if self.scale is None else h * self.scale)


def check_between(rank, world_size, what):
    torch.manual_seed(0)
    whole, x = Between(what), torch.randn(4, DIM)
    outputs = []
    for styles in (("colwise", "rowwise"), ("colwise_gather_output", "rowwise_split_input")):
        plugin = HybridParallelPlugin(tp_size=2, pp_size=1, tp_plan=dict(zip(("up", "down"), styles, strict=True)))
        booster, model = Booster("cpu", "fp32", plugin), copy.deepcopy(whole)
        model, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        if styles[0] == "colwise":
            expected = (
                "test_tensor_parallel.py.*16 features met something of 32.*'colwise_gather_output' and the one behind"
            )
            with pytest.raises(RuntimeError, match=expected):
                model(x)
        else:
            outputs.append(model(x))
    torch.testing.assert_close(outputs[0], whole(x))


@pytest.mark.parametrize("what", ["norm", "parameter"])
def test_what_is_of_full_width_between_divided_layers_is_named_with_the_styles_that_keep_it_whole(ranks2, what):
    ranks2(check_between, what)


class Penalised(Between):
    def __init__(self, gathers):
        super().__init__("parameter")
        self.gathers = gathers

    def forward(self, x):
        penalty = self.up.weight.square().sum()
        if self.gathers and isinstance(penalty, DTensor):
            penalty = penalty.full_tensor()
        return self.down(self.up(x)), penalty


def check_penalty(rank, world_size, gathers):
    torch.manual_seed(0)
    whole, x = Penalised(gathers), torch.randn(4, DIM)
    plugin = HybridParallelPlugin(tp_size=2, pp_size=1, tp_plan={"up": "colwise", "down": "rowwise"})
    booster, model = Booster("cpu", "fp32", plugin), copy.deepcopy(whole)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def loss_of(outputs):
        return F.cross_entropy(outputs[0], torch.arange(4)) + outputs[1]

    if not gathers:
        with pytest.raises(RuntimeError, match=r"the loss is a DTensor, as a penalty.*sum\(\).full_tensor\(\)"):
            booster.backward(loss_of(model(x)), optimizer)
        return
    booster.backward(loss_of(model(x)), optimizer)
    loss_of(whole(x)).backward()
    torch.testing.assert_close(model.up.weight.grad.full_tensor(), whole.up.weight.grad)


@pytest.mark.parametrize("gathers", [False, True])
def test_a_penalty_on_a_divided_weight_is_named_until_it_is_made_whole(ranks2, gathers):
    ranks2(check_penalty, gathers)


class Gated(nn.Module):
    """Queries, keys and values of one input, and two layers that read another."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(DIM, DIM) for _ in range(4))
        self.gate, self.up, self.down = nn.Linear(DIM, 8), nn.Linear(DIM, 8), nn.Linear(8, DIM)

    def forward(self, x):
        x = x + self.out(self.q(x) * self.k(x).sigmoid() + self.v(x))
        return x + self.down(self.gate(x).tanh() * self.up(x))


GATED = {f"*.{name}": "colwise" for name in ("q", "k", "v", "gate", "up")} | {"*.out": "rowwise", "*.down": "rowwise"}


def sums(function):
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as seen:
        function()
    return sum(event.name == "c10d::allreduce_" for event in seen.events())


def check_sums(rank, world_size, context):
    torch.manual_seed(0)
    model = nn.Sequential(Gated(), Gated())
    reference = copy.deepcopy(model)
    divide(model, tp_mesh(world_size), GATED)
    x = torch.randn(2, 3, DIM)
    with torch.autocast("cpu", torch.bfloat16) if context == "autocast" else contextlib.nullcontext():
        given = x.clone().requires_grad_()
        made = []
        assert sums(lambda: made.append(model(given))) == 4  # what rows give
        assert sums(lambda: made[0].float().square().sum().backward()) == 4  # of what columns read
        expected = x.clone().requires_grad_()
        reference(expected).float().square().sum().backward()
    tolerance = 0.05 if context == "autocast" else 1e-5
    assert distance(given.grad, expected.grad) <= tolerance
    for name, param in model.named_parameters():
        assert distance(whole(param.grad), dict(reference.named_parameters())[name].grad) <= tolerance, name


@pytest.mark.parametrize("context", ["plain", "autocast"])
def test_layers_that_read_one_input_sum_its_gradient_over_the_ranks_once(ranks2, context):
    ranks2(check_sums, context)
