"""Tensor parallelism: a divided model computes what the whole one does, loss, gradients and state dict included."""

import copy
import importlib.util
import warnings
from importlib import import_module
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel
from torch.utils.checkpoint import checkpoint

from booster.casting import cast_floats
from booster.mixed_precision.attention import Float32Attention
from booster.mixed_precision.policy import DtypePolicy, cast_parameters, half_policy, install_pins
from booster.plugin.tensor_parallel import Colwise, apply_tensor_parallel, check_tensor_parallel, fsdp_placement

DIM, HEADS, TIME, VOCAB = 16, 4, 8, 12
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


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
    "blocks.*.attn.[qkv]": None,
    "blocks.*.attn.q_norm": SequenceParallel(sequence_dim=1, use_local_output=True),
    "blocks.*.attn.out": RowwiseParallel(),
    "blocks.*.mlp.0": ColwiseParallel(),
    "blocks.*.mlp.2": RowwiseParallel(),
    "head": ColwiseParallel(output_layouts=Replicate()),
}
del STYLES["blocks.*.attn.[qkv]"]
STYLES |= {f"blocks.*.attn.{name}": ColwiseParallel() for name in "qkv"}


def ids(batch=3):
    return torch.randint(0, VOCAB, (batch, TIME), generator=torch.Generator().manual_seed(1))


def gpt(**options):
    torch.manual_seed(0)
    return GPT(**options), (ids(),), {}


def package(name):
    """timm or transformers, also where torchvision's compiled operators do not load."""
    spec = importlib.util.spec_from_file_location("torchvision_ops", EXAMPLES / "vit" / "torchvision_ops.py")
    module = importlib.util.module_from_spec(spec)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        spec.loader.exec_module(module)
        try:
            module.import_torchvision()
        except ModuleNotFoundError:
            pass
        return import_module(name)


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
    causal = nn.Transformer.generate_square_subsequent_mask(TIME)
    return encoder(mask=causal, src_key_padding_mask=padding)


def causal_encoder():
    return encoder(norm_first=True, mask=nn.Transformer.generate_square_subsequent_mask(TIME), is_causal=True)


def seq2seq():
    torch.manual_seed(0)
    model = nn.Transformer(DIM, HEADS, 2, 2, 32, dropout=0.0)
    for param in model.parameters():
        nn.init.normal_(param, std=0.3)
    return model, (torch.randn(6, 3, DIM), torch.randn(TIME, 3, DIM)), {}


def other_widths():
    torch.manual_seed(0)
    model = nn.ModuleDict({"attn": nn.MultiheadAttention(DIM, HEADS, kdim=6, vdim=10, batch_first=True)})
    nn.init.normal_(model["attn"].in_proj_bias)
    x, key, value = torch.randn(3, 5, DIM), torch.randn(3, TIME, 6), torch.randn(3, TIME, 10)
    model.forward = lambda *args: model["attn"](*args, need_weights=False)[0]
    return model, (x, key, value), {}


def llama(**options):
    transformers = package("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=DIM,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        max_position_embeddings=TIME,
        initializer_range=0.3,
        use_cache=False,
        **options,
    )
    return transformers.LlamaForCausalLM(config), (ids(),), {"labels": ids()}


def tied_llama():
    return llama(tie_word_embeddings=True)


def gpt2():
    transformers = package("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCAB,
        n_embd=DIM,
        n_layer=2,
        n_head=HEADS,
        n_positions=TIME,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        initializer_range=0.3,
        use_cache=False,
    )
    model = transformers.GPT2LMHeadModel(config)
    for name, param in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(param, std=0.3)
    return model, (ids(),), {"labels": ids()}


def tied_gpt():
    return gpt(tied=True)


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
    "llama": (llama, None, False),
    "llama sequence": (llama, None, True),
    "llama tied": (tied_llama, None, False),
    "gpt2": (gpt2, None, False),
    "gpt2 sequence": (gpt2, None, True),
}


# ---- comparing ----


def tp_mesh(world_size):
    return init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))


def divide(model, mesh, plan=None, sequence=False, policy=None):
    apply_tensor_parallel(
        model, mesh=mesh, tp_plan=plan, sequence_parallelism=sequence, policy=policy or DtypePolicy()
    )
    return model


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def run(model, args, kwargs):
    """Output and loss; gradients are left in the model."""
    out = model(*args, **kwargs)
    if hasattr(out, "logits"):
        out, loss = out.logits, out.loss
    else:
        loss = (out.float() * torch.linspace(-1, 1, out.numel()).view_as(out)).square().mean()
    loss.backward()
    return out.detach(), loss.detach()


def distance(actual, expected):
    return (actual.float() - expected.float()).abs().max().item() / max(1.0, expected.float().abs().max().item())


def compare(model, reference, args, kwargs, tolerance):
    out, loss = run(model, args, kwargs)
    expected_out, expected_loss = run(reference, args, kwargs)
    assert distance(out, expected_out) <= tolerance
    assert distance(loss, expected_loss) <= tolerance
    found = dict(model.named_parameters())
    expected = {name: param.grad for name, param in reference.named_parameters()}
    largest = max(grad.abs().max().item() for grad in expected.values() if grad is not None)
    for name, grad in expected.items():
        assert (found[name].grad is None) == (grad is None), name
        if grad is not None:  # keys' biases have gradients of zero, up to rounding
            scale = max(grad.abs().max().item(), largest / 100)
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


@pytest.mark.parametrize("name", CASES)
def test_a_divided_model_is_the_whole_one(ranks2, name):
    ranks2(check_case, name)


@pytest.mark.parametrize("name", ["strings", "gpt sequence", "timm", "gpt2", "encoder"])
def test_so_it_is_on_four_ranks(ranks4, name):
    ranks4(check_case, name)
