"""Tensor-parallel plans: what they resolve to, and what is said about those that cannot be."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from booster.mixed_precision import Int8MixedPrecision
from booster.plugin.tensor_parallel import Colwise, EmbeddingParallel, Region, Rowwise
from booster.plugin.tensor_parallel.module_styles import HeadParallel
from booster.plugin.tensor_parallel.tp_plan import resolve_plan

NAMES = [
    "all_reduce",
    "colwise",
    "colwise_gather_output",
    "colwise_rep",
    "embedding_colwise",
    "embedding_rowwise",
    "mla_kv_a_proj",
    "moe_tp_experts",
    "packed_colwise",
    "replicate",
    "replicated_with_grad_allreduce",
    "replicated_with_output_grad_allreduce",
    "rowwise",
    "rowwise_rep",
    "rowwise_split_input",
    "sequence_parallel",
]
PLAN = {"layers.*.q_proj": "colwise", "layers.*.out_proj": "rowwise"}


class Layer(nn.Module):
    def __init__(self, heads=4):
        super().__init__()
        self.head_dim = 4
        self.norm = nn.LayerNorm(16)
        self.q_proj = nn.Linear(16, heads * self.head_dim)
        self.out_proj = nn.Linear(heads * self.head_dim, 16)


class Net(nn.Module):
    def __init__(self, heads=4):
        super().__init__()
        self.embed = nn.Embedding(10, 16)
        self.layers = nn.ModuleList([Layer(heads), Layer(heads)])
        self.head = nn.Linear(16, 10)


def resolve(model, plan=None, tp_size=2, sequence_parallelism=False):
    return resolve_plan(model, plan, tp_size=tp_size, sequence_parallelism=sequence_parallelism)


def message(error, *args, **kwargs):
    with pytest.raises(error) as caught:
        resolve(*args, **kwargs)
    return str(caught.value)


def kinds(plan):
    return {name: type(style).__name__ for name, style in plan.items()}


# ---- what plans resolve to ----


def test_a_star_is_one_part_of_a_name_and_two_are_any_number():
    one = resolve(Net(), PLAN)
    assert kinds(one) == {
        f"layers.{i}.{name}": kind for name, kind in (("q_proj", "Colwise"), ("out_proj", "Rowwise")) for i in (0, 1)
    }
    assert kinds(resolve(Net(), {"**.q_proj": "colwise"})) == {
        "layers.0.q_proj": "Colwise",
        "layers.1.q_proj": "Colwise",
    }
    assert kinds(resolve(Net(), {"head": "rowwise"})) == {"head": "Rowwise"}


def test_later_patterns_win():
    plan = resolve(Net(), {**PLAN, "layers.1.q_proj": "colwise_gather_output"})
    assert [plan[f"layers.{i}.q_proj"].gather_output for i in (0, 1)] == [False, True]


def test_a_callable_is_given_the_model():
    model = Net()
    assert kinds(resolve(model, lambda given: {"head": "colwise"} if given is model else {})) == {"head": "Colwise"}


def test_styles_of_torch_are_taken_as_they_are():
    style = ColwiseParallel(output_layouts=Replicate())
    assert resolve(Net(), {"head": style}) == {"head": style}


def test_colwise_and_rowwise_of_an_embedding_are_its_features_and_its_vocabulary():
    assert [resolve(Net(), {"embed": name})["embed"].by for name in ("colwise", "rowwise")] == [
        "features",
        "vocabulary",
    ]


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("moe_tp_experts", "mla_kv_a_proj")])
def test_every_name_is_a_style(name):
    module = "embed" if name.startswith("embedding") else "layers.0.q_proj"
    style = resolve(Net(), {module: name})[module]
    assert isinstance(style, (Colwise, Rowwise, EmbeddingParallel, Region))


def test_the_names_are_those_that_plans_of_transformers_use(transformers):
    from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES

    others = {"packed_rowwise"}
    # Of experts that are divided among ranks; each version has changed their names: 4.57 has "gather" and "local".
    experts = ("moe_identity", "ep_", "grouped", "megamoe_", "local", "gather")
    theirs = {name for name in ALL_PARALLEL_STYLES if not name.startswith(experts)}
    assert theirs - others <= set(NAMES)


def test_timm_attention_is_divided_by_heads(timm):
    from timm.models.vision_transformer import VisionTransformer

    model = VisionTransformer(img_size=8, patch_size=4, embed_dim=16, depth=1, num_heads=4, qk_norm=True)
    plan = resolve(model)
    assert kinds(plan) == {
        "blocks.0.attn": "Region",
        "blocks.0.attn.qkv": "Colwise",
        "blocks.0.attn.proj": "Rowwise",
        "blocks.0.attn.q_norm": "Region",
        "blocks.0.attn.k_norm": "Region",
        "blocks.0.mlp.fc1": "Colwise",
        "blocks.0.mlp.fc2": "Rowwise",
    }
    assert plan["blocks.0.attn.qkv"].num_parts == 3
    assert plan["blocks.0.attn.q_norm"].partial_gradients
    given = resolve(model, {"blocks.*.attn.qkv": ColwiseParallel(), "blocks.*.attn.proj": "rowwise"})
    assert given["blocks.0.attn.qkv"].num_parts == 3
    assert given["blocks.0.attn"].divide == ("num_heads", "attn_dim")


def test_a_model_inside_another_is_found(transformers):
    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    inner = transformers.LlamaForCausalLM(config)
    outer = nn.ModuleDict({"text": inner, "image": nn.TransformerEncoderLayer(16, 2, 16)})
    plan = resolve(outer)
    assert {f"text.{name}" for name in resolve(inner)} <= plan.keys()
    assert isinstance(plan["image.self_attn"], HeadParallel)


def test_patterns_of_a_transformers_model_may_leave_out_the_prefix_of_its_base(transformers):
    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    plan = resolve(transformers.LlamaForCausalLM(config), {"layers.*.mlp.up_proj": "colwise"})
    assert list(plan) == ["model.layers.0.mlp.up_proj"]


def test_an_output_layer_tied_to_an_embedding_that_stays_whole_stays_whole(transformers):
    config = transformers.GPT2Config(vocab_size=8, n_embd=16, n_layer=1, n_head=2, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    model._tp_plan = {"lm_head": "colwise_rep"}
    plan = resolve(model)
    assert "lm_head" not in plan
    assert "transformer.h.0.attn.c_attn" in plan


def test_a_plan_that_a_transformers_model_brings_and_that_cannot_be_used_is_said_to_be_its_own(transformers):
    config = transformers.GPT2Config(vocab_size=8, n_embd=16, n_layer=1, n_head=2, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    model._tp_plan = {"lm_head": "packed_rowwise"}
    assert message(ValueError, model) == (
        "the plan that GPT2LMHeadModel brings cannot be used: tp_plan gives 'lm_head' the style 'packed_rowwise'; choose one "
        f"of {NAMES}, or a ParallelStyle"
    )


def test_a_module_in_two_places_is_divided_once():
    model = Net()
    model.layers[1] = model.layers[0]
    assert set(resolve(model, {"layers.1.q_proj": "colwise", "layers.*.out_proj": "rowwise"})) == {
        "layers.0.q_proj",
        "layers.0.out_proj",
    }


def test_under_sequence_parallelism_what_is_not_in_the_plan_has_partial_gradients():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.attn = nn.LayerNorm(16), Layer()

    model = nn.ModuleDict({"layers": nn.ModuleList([Block(), Block(), Block()])})
    plan = resolve(model, {"**.q_proj": "colwise", "**.out_proj": "rowwise"}, sequence_parallelism=True)
    assert [(plan[f"layers.{i}"].into, plan[f"layers.{i}"].out) for i in range(3)] == [
        ("split", None),
        (None, None),
        (None, "gather"),
    ]
    for i in range(3):
        assert plan[f"layers.{i}.norm"].partial_gradients
        assert plan[f"layers.{i}.attn.norm"].partial_gradients
        assert plan[f"layers.{i}.attn"].into == "gather"
        assert plan[f"layers.{i}.attn.q_proj"].shared_input
        assert plan[f"layers.{i}.attn.out_proj"].sequence_dim == 1


# ---- what raises ----


def test_a_model_without_a_known_plan_says_what_a_plan_looks_like():
    assert message(ValueError, Net()) == (
        "tp_plan=None: no tensor-parallel plan is known for Net; give one, such as "
        "tp_plan={'layers.*.attn.q_proj': 'colwise', 'layers.*.attn.out_proj': 'rowwise'}. Known are transformers models "
        "that bring a plan or are made of attention and feed-forward modules of known shapes, timm's attention and MLP "
        "modules, and torch's Transformer layers"
    )


def test_patterns_that_match_nothing_are_named_with_what_is_near():
    assert message(ValueError, Net(), {**PLAN, "layers.*.qproj": "colwise"}) == (
        "tp_plan names ['layers.*.qproj'], which match no module of Net; near are "
        "['layers.*.q_proj', 'layers.*.out_proj', 'layers.*.norm']"
    )
    assert message(ValueError, Net(), {"zzz": "colwise"}) == (
        "tp_plan names ['zzz'], which match no module of Net; its top-level modules are ['embed', 'layers', 'head']"
    )


def test_a_name_that_is_no_style_is_answered_with_all_that_are():
    assert message(ValueError, Net(), {"head": "columns"}) == (
        f"tp_plan gives 'head' the style 'columns'; choose one of {NAMES}, or a ParallelStyle"
    )
    assert message(TypeError, Net(), {"head": 1}) == (
        f"tp_plan gives 'head' 1; a style is a torch.distributed.tensor.parallel.ParallelStyle or one of {NAMES}"
    )


def test_a_plan_that_is_none_is_a_type_error():
    example = "tp_plan={'layers.*.attn.q_proj': 'colwise', 'layers.*.attn.out_proj': 'rowwise'}"
    assert message(TypeError, Net(), ["head"]) == (
        f"tp_plan is a list; it must be a dict from module name patterns to styles, such as {example}"
    )
    assert message(TypeError, Net(), lambda model: None) == (
        "what the callable tp_plan returned is a NoneType; it must be a dict from module name patterns to styles, such as "
        f"{example}"
    )
    assert message(ValueError, Net(), {}) == (
        f"tp_plan is empty, so nothing would be divided; name modules, such as {example}, or pass None"
    )


def test_bare_parameters_are_named_beside_experts_only():
    assert message(ValueError, Net(), {"layers.*.q_proj.weight": "colwise"}) == (
        "tp_plan names the parameters ['weight'] of 'layers.0.q_proj', a Linear; give the module a style instead, or "
        "'moe_tp_experts' too if it holds experts"
    )


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.zeros(2, 12, 4))
        self.down = nn.Parameter(torch.zeros(2, 4, 6))


def test_experts_are_divided_by_what_the_plan_says_of_their_parameters():
    model = nn.ModuleDict({"experts": Experts()})
    given = {"experts": "moe_tp_experts", "experts.up": "packed_colwise", "experts.down": "rowwise"}
    plan = resolve(model, given)
    assert plan["experts"].parameters == {"up": "packed_colwise", "down": "rowwise"}
    assert message(ValueError, model, {**given, "experts.up": "replicate"}) == (
        "'experts.up', of shape (2, 12, 4), cannot be divided by 'replicate'; parameters of experts have three dimensions, and "
        "one of the styles ['colwise', 'packed_colwise', 'rowwise']"
    )
    assert message(ValueError, model, {"experts": "moe_tp_experts", "experts.up": "colwise"}) == (
        "'experts' is divided as experts, but tp_plan does not say how its parameter 'down' is"
    )
    assert message(ValueError, model, given, tp_size=4) == (
        "'experts.up' has 12 features to divide by 'packed_colwise', which do not divide by tp_size=4; choose another tp_size, "
        "or leave the experts out of tp_plan"
    )


def test_heads_that_do_not_divide_raise_with_module_size_and_ranks():
    assert message(ValueError, Net(heads=3), PLAN) == (
        "'layers.0.q_proj' has 3 heads of 4 features, which do not divide by tp_size=2; choose another tp_size, or leave its "
        "attention module out of tp_plan"
    )


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"head": "colwise"}, "'head' has 10 output features, which do not divide by tp_size=3"),
        ({"head": "rowwise"}, "'head' has 16 input features, which do not divide by tp_size=3"),
        (
            {"head": "packed_colwise"},
            "'head' has 10 output features in 2 projections, which do not divide by tp_size=3",
        ),
        (
            {"embed": "embedding_rowwise"},
            "'embed' has 10 entries, which do not divide by tp_size=3; pad the vocabulary",
        ),
        ({"embed": "embedding_colwise"}, "'embed' has 16 features, which do not divide by tp_size=3"),
        (
            {"head": ColwiseParallel()},
            "'head', Linear(in_features=16, out_features=10, bias=True), has 10 features or entries to divide by "
            "ColwiseParallel, which do not divide by tp_size=3",
        ),
        (
            {"embed": RowwiseParallel()},
            "'embed', Embedding(10, 16), has 10 features or entries to divide by RowwiseParallel",
        ),
    ],
)
def test_sizes_that_do_not_divide_raise(plan, said):
    assert message(ValueError, Net(), plan, tp_size=3).startswith(said)


def test_modules_that_cannot_be_divided_so_raise():
    assert message(ValueError, Net(), {"layers.*.norm": "colwise"}) == (
        "'layers.0.norm' is a LayerNorm, which cannot be divided by columns; linear layers can"
    )
    assert message(ValueError, Net(), {"head": "embedding_rowwise"}) == (
        "'head' is a Linear, which cannot be divided by vocabulary, as an Embedding"
    )
    model = nn.ModuleDict(
        {"embed": nn.Embedding(4, 4, max_norm=1.0), "attn": nn.MultiheadAttention(4, 2, add_zero_attn=True)}
    )
    assert message(ValueError, model, {"embed": "rowwise"}) == (
        "the Embedding 'embed' uses ['max_norm'], which do not work divided; leave it out of tp_plan"
    )
    assert message(ValueError, model, {"attn": "colwise"}) == (
        "'attn' uses add_bias_kv or add_zero_attn, which do not work divided by heads; leave it out of tp_plan"
    )


def test_torch_attention_and_timm_attention_name_their_heads(timm):
    from timm.models.vision_transformer import VisionTransformer

    layer = nn.TransformerEncoderLayer(12, 3, 16)
    assert message(ValueError, layer) == (
        "'self_attn' has num_heads=3, which does not divide by tp_size=2; choose another tp_size"
    )
    model = VisionTransformer(img_size=8, patch_size=4, embed_dim=12, depth=1, num_heads=3)
    assert message(ValueError, model) == (
        "'blocks.0.attn' has num_heads=3, which does not divide by tp_size=2; choose another tp_size"
    )


def test_an_attention_that_normalises_over_all_heads_has_no_known_plan(timm):
    from timm.models.vision_transformer import VisionTransformer

    model = VisionTransformer(img_size=8, patch_size=4, embed_dim=8, depth=1, num_heads=2, scale_attn_norm=True)
    assert message(ValueError, model) == (
        "no tensor-parallel plan is known for 'blocks.0.attn': this Attention normalises over all heads; give a tp_plan"
    )


def test_sequence_parallelism_says_where_it_cannot_be():
    fix = "use sequence_parallelism=False"

    def said(model, plan):
        return message(ValueError, model, plan, sequence_parallelism=True)

    assert said(Net(), {"head": "colwise_gather_output"}) == (
        f"sequence_parallelism=True: tp_plan names no module in a ModuleList or Sequential; {fix}"
    )
    assert said(Net(), {**PLAN, "head": "rowwise"}) == (
        f"sequence_parallelism=True: 'head' is in no block of a ModuleList or Sequential; {fix}"
    )
    assert said(Net(), {"layers.0.q_proj": "colwise"}) == (
        f"sequence_parallelism=True: tp_plan names nothing in 'layers.1'; {fix}"
    )
    assert said(Net(), {"layers.*.q_proj": "colwise"}) == (
        f"sequence_parallelism=True: tp_plan does not divide 'layers.0.out_proj.weight'; name its module, or {fix}"
    )
    assert said(Net(), {**PLAN, "layers.*.q_proj": "colwise_gather_output"}) == (
        f"sequence_parallelism=True: the style of 'layers.0.q_proj', Colwise, cannot be used in it; {fix}"
    )
    model = Net()
    model.layers[0].norm = nn.BatchNorm1d(16)
    assert said(model, PLAN) == (
        f"sequence_parallelism=True: 'layers.0.norm' is a BatchNorm1d, which mixes tokens; {fix}"
    )
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"attn": Layer()})])})
    assert said(model, {"**.q_proj": "colwise"}) == (
        "sequence_parallelism=True needs one row-wise module in 'layers.0.attn', to divide its output; tp_plan names none. "
        f"Otherwise {fix}"
    )


def test_resolving_changes_nothing():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 2)
    before = {name: id(param) for name, param in model.named_parameters()}
    for sequence_parallelism in (False, True):
        assert all(
            isinstance(s, ParallelStyle) for s in resolve(model, sequence_parallelism=sequence_parallelism).values()
        )
    assert {name: id(param) for name, param in model.named_parameters()} == before
    assert model.use_nested_tensor


# ---- plans by shape ----


class Attention(nn.Module):
    """As transformers writes them; `extra` is what else it holds."""

    def __init__(self, **extra):
        super().__init__()
        self.num_heads, self.head_dim, self.embed_dim = 4, 4, 16
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(16, 16) for _ in range(4))
        for name, value in extra.items():
            setattr(self, name, value)

    def forward(self, hidden_states):
        q, k, v = (self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states))
        return self.out_proj((q * k * v).reshape(-1, self.embed_dim))


class ReadsWidth(Attention):
    def forward(self, hidden_states):
        batch, length, width = hidden_states.size()
        q, k, v = (self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states))
        return self.out_proj((q * k * v).view(batch, length, width))


class DividesWidth(Attention):
    def forward(self, hidden_states):
        q, k, v = (self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states))
        return self.out_proj((q * k * v).unflatten(-1, (self.num_heads, self.embed_dim // self.num_heads)).flatten(-2))


class LastSize(Attention):
    def forward(self, hidden_states):
        q, k, v = (self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states))
        return self.out_proj((q * k * v).reshape(-1, hidden_states.shape[-1]))


class ForeignBias(Attention):
    def forward(self, hidden_states, position_bias=None):
        return super().forward(hidden_states)


class FeedForward(nn.Module):
    def __init__(self, **between):
        super().__init__()
        self.fc1, self.fc2, self.act = nn.Linear(16, 24), nn.Linear(24, 16), nn.PReLU()
        self.between = between.get("between", nn.Identity())

    def forward(self, hidden_states):
        return self.fc2(self.between(self.act(self.fc1(hidden_states))))


class ResidualFeedForward(FeedForward):
    def forward(self, hidden_states):
        return self.fc2(self.act(self.fc1(self.between(hidden_states))))


class Gated(FeedForward):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(16, 48)

    def forward(self, hidden_states):
        gate, up = self.fc1(hidden_states).chunk(2, -1)
        return self.fc2(self.act(gate) * up)


for cls in (Gated, Attention, ReadsWidth, DividesWidth, LastSize, ForeignBias, FeedForward, ResidualFeedForward):
    cls.__module__ = "transformers.models.made_up"


def test_an_attention_module_and_a_feed_forward_one_are_known_by_their_shape():
    plan = resolve(nn.Sequential(Attention(norm=nn.LayerNorm(4)), ResidualFeedForward(between=nn.LayerNorm(16))))
    assert kinds(plan) == {
        **{f"0.{name}_proj": "Colwise" for name in "qkv"},
        "0.out_proj": "Rowwise",
        "0.norm": "Region",
        "0": "Region",
        "1.fc1": "Colwise",
        "1.fc2": "Rowwise",
        "1.act": "Region",
    }
    assert plan["0"].divide == ("embed_dim",)
    assert plan["0.norm"].partial_gradients
    assert plan["1.act"].partial_gradients


def test_layers_converted_to_a_low_precision_are_divided_as_the_linear_ones_were():
    def make():
        return nn.Sequential(Attention(norm=nn.LayerNorm(4)), ResidualFeedForward(between=nn.LayerNorm(16)))

    converted = Int8MixedPrecision(keep=()).convert(make())
    assert not any(type(module) is nn.Linear for module in converted.modules())
    assert kinds(resolve(converted)) == kinds(resolve(make()))


@pytest.mark.parametrize(
    "module",
    [
        Attention(norm=nn.LayerNorm(16)),
        Attention(mix=nn.Linear(4, 4)),
        Attention(sinks=nn.Parameter(torch.zeros(4))),
        Attention(v_proj=nn.Linear(16, 12)),
        Attention(head_dim=5),
        ReadsWidth(),
        DividesWidth(),
        LastSize(),
        ForeignBias(),
        FeedForward(between=nn.LayerNorm(24)),
        FeedForward(between=nn.Conv1d(1, 1, 3)),
        Gated(),
    ],
    ids=lambda module: type(module).__name__,
)
def test_what_speaks_against_a_shape_leaves_the_module_whole(module):
    assert "no tensor-parallel plan is known" in message(ValueError, nn.Sequential(module))


def test_other_libraries_modules_are_not_taken_for_those_of_transformers():
    assert "no tensor-parallel plan is known" in message(ValueError, nn.Sequential(FeedForwardOfOthers()))


class FeedForwardOfOthers(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x):
        return self.fc2(self.fc1(x))


class Linear(nn.Module):
    """A layer with adapters as peft makes it, which is no `nn.Linear`."""

    def __init__(self, features_in, features_out):
        super().__init__()
        self.base_layer = nn.Linear(features_in, features_out)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(features_in, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, features_out, bias=False)})
        self.lora_dropout = nn.ModuleDict({"default": nn.Identity()})


@pytest.mark.parametrize(("features", "named"), [(8, None), (7, r"up\.base_layer' has 7 output features")])
def test_of_layers_with_adapters_those_inside_are_divided_and_checked(features, named):
    model = nn.Sequential()
    model.add_module("up", Linear(4, features))
    model.add_module("down", Linear(features, 4))
    given = {"up": "colwise", "down": "rowwise"}
    if named is not None:
        with pytest.raises(ValueError, match=named):
            resolve_plan(model, given, tp_size=2, sequence_parallelism=False)
        return
    plan = resolve_plan(model, given, tp_size=2, sequence_parallelism=False)
    assert set(plan) == {"up.base_layer", "up.lora_B.default", "down.base_layer", "down.lora_A.default"}
