"""From what a user gives as `tp_plan`, with names of styles as transformers' plans write them, to a style for each module."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from booster.common import arguments
from booster.frozen import FrozenLinear
from booster.model.modules import matcher, names_in_forward, side_of, tensor_places
from booster.plugin.tensor_parallel.known_plans import (
    derive_by_shape,
    derive_plan,
    with_sequence_parallelism,
    within_adapters,
)
from booster.plugin.tensor_parallel.linear_styles import Colwise, Rowwise, output_dim
from booster.plugin.tensor_parallel.local_style import LocalStyle
from booster.plugin.tensor_parallel.module_styles import (
    EmbeddingParallel,
    Experts,
    HeadParallel,
    KVLatentProjection,
    Region,
)


def _colwise(module: nn.Module) -> ParallelStyle:
    if isinstance(module, nn.Embedding):
        return EmbeddingParallel(by="features")
    if isinstance(module, nn.MultiheadAttention):
        return HeadParallel()
    return Colwise()


STYLES: dict[str, Callable[[nn.Module], ParallelStyle]] = {
    "all_reduce": lambda module: Region(out="reduce"),
    "colwise": _colwise,
    "colwise_gather_output": lambda module: Colwise(gather_output=True),
    "colwise_rep": lambda module: Colwise(gather_output=True),
    "embedding_colwise": lambda module: EmbeddingParallel(by="features"),
    "embedding_rowwise": lambda module: EmbeddingParallel(by="vocabulary"),
    "mla_kv_a_proj": lambda module: KVLatentProjection(),
    "moe_tp_experts": lambda module: Experts({}),
    "packed_colwise": lambda module: Colwise(num_parts=2),
    "replicate": lambda module: Region(),
    "replicated_with_grad_allreduce": lambda module: Region(partial_gradients=True),
    "replicated_with_output_grad_allreduce": lambda module: Region(out="copy"),
    "rowwise": lambda module: EmbeddingParallel(by="vocabulary") if isinstance(module, nn.Embedding) else Rowwise(),
    "rowwise_rep": lambda module: Rowwise(split_input=True),
    "rowwise_split_input": lambda module: Rowwise(split_input=True),
    "sequence_parallel": lambda module: Region(partial_gradients=True),
}


def style_of(name: str, module: nn.Module, value: object) -> ParallelStyle:
    """Return the style that a plan gives `module`, called `name`, as an object. Raises as `check_style`."""
    check_style(name, value)
    return value if isinstance(value, ParallelStyle) else STYLES[str(value)](module)


def check_style(name: str, value: object) -> None:
    """Raise TypeError or ValueError unless `value`, which a plan gives the modules of `name`, is a style."""
    if isinstance(value, ParallelStyle):
        return
    if not isinstance(value, str):
        raise TypeError(
            f"tp_plan gives {name!r} {value!r}; a style is a torch.distributed.tensor.parallel.ParallelStyle or one of "
            f"{sorted(STYLES)}"
        )
    if value not in STYLES:
        raise ValueError(
            f"tp_plan gives {name!r} the style {value!r}; choose one of {sorted(STYLES)}, or a ParallelStyle"
        )


TPPlan = Mapping[str, Any] | Callable[[nn.Module], Mapping[str, Any]] | None
_HEAD_SIZES = ("head_dim", "head_size", "attention_head_size")
_EXAMPLE = "tp_plan={'layers.*.attn.q_proj': 'colwise', 'layers.*.attn.out_proj': 'rowwise'}"


def resolve_plan(
    model: nn.Module, tp_plan: TPPlan, *, tp_size: int, sequence_parallelism: bool
) -> dict[str, ParallelStyle]:
    """Return one style for each module that is sharded, by its exact name; nothing is changed.

    Raises TypeError or ValueError for a plan that is none, patterns and styles that are unknown, sizes and heads that do
    not divide by `tp_size`, tied parameters that would get several placements, and sequence parallelism where it cannot be.
    """
    plan = _known_plan(model) if tp_plan is None else _given_plan(model, tp_plan)
    # What plans leave out, because in one process it needs no style: numbers of heads, norms of a head, positions.
    plan = _with_positions(model, _with_inner_parameters(model, _with_heads(model, plan)))
    for name, style in plan.items():
        layer = model.get_submodule(name)
        if isinstance(style, LocalStyle) and not hasattr(layer, "lora_A"):  # the layers inside of these are sharded
            style.check(name, layer, tp_size)
        if name:
            _check_heads(model, name, style, tp_size)
    plan = _around_adapters(model, plan, sequence_parallelism=sequence_parallelism)
    for name, style in plan.items():
        module = model.get_submodule(name)
        if isinstance(module, FrozenLinear):
            raise ValueError(
                f"{name!r}: its weight is stored in {module.form or module.weight.dtype}, which tensor parallelism does not "
                "divide; leave it out of tp_plan, or keep it wide with load_weights(keep=...)"
            )
        if isinstance(style, LocalStyle):
            style.check(name, module, tp_size)
        elif isinstance(style, (ColwiseParallel, RowwiseParallel)) and isinstance(module, (nn.Linear, nn.Embedding)):
            by_rows = isinstance(style, RowwiseParallel)
            size = module.weight.shape[int(by_rows) if isinstance(module, nn.Linear) else 1 - int(by_rows)]
            if size % tp_size:
                raise ValueError(
                    f"{name!r}, {module}, has {size} features or entries to divide by {type(style).__name__}, which do not "
                    f"divide by tp_size={tp_size}; choose another tp_size, or leave the module out of tp_plan"
                )
    if sequence_parallelism:
        plan = with_sequence_parallelism(model, plan)
    check_ties(model, plan)
    return plan


def check_tp_plan(tp_plan: Any) -> None:
    """Raise TypeError or ValueError unless `tp_plan` is None, a callable or a dict from patterns to styles."""
    if tp_plan is None or (callable(tp_plan) and not isinstance(tp_plan, (type, nn.Module))):
        return
    if not isinstance(tp_plan, Mapping) or not all(isinstance(pattern, str) for pattern in tp_plan):
        legal = (
            f"a dict from module name patterns to styles, such as {_EXAMPLE}, or a function that makes one of the model"
        )
        raise TypeError(arguments.refusal("tp_plan", tp_plan, legal, "None"))
    _check_filled(tp_plan)
    for pattern, style in tp_plan.items():
        check_style(pattern, style)


def _check_filled(tp_plan: Mapping[str, Any]) -> None:
    if not tp_plan:
        raise ValueError(
            f"tp_plan is empty, so nothing would be divided; name modules, such as {_EXAMPLE}, or pass None"
        )


def _given_plan(model: nn.Module, tp_plan: TPPlan) -> dict[str, ParallelStyle]:
    given = tp_plan(model) if callable(tp_plan) else tp_plan
    if not isinstance(given, Mapping):
        source = "what the callable tp_plan returned" if callable(tp_plan) else "tp_plan"
        raise TypeError(
            f"{source} is a {type(given).__name__}; it must be a dict from module name patterns to styles, such as {_EXAMPLE}"
        )
    _check_filled(given)
    return _expand(model, given, strict=True)


def _known_plan(model: nn.Module) -> dict[str, ParallelStyle]:
    """Return the plans that transformers models in `model` bring, and those of known modules."""
    plan = derive_by_shape(model) | derive_plan(model)
    inside = ""
    for name, module in model.named_modules():
        # Modules come parents first, so all of a model's own follow it.
        if inside and name.startswith(inside):
            continue
        config: Any = getattr(module, "config", None)
        own = getattr(module, "_tp_plan", None) or getattr(config, "base_model_tp_plan", None)
        if own and _is_transformers(module):
            # A plan by shapes is a guess; the model's own replaces all of it, not entry by entry.
            plan = {other: style for other, style in plan.items() if not other.startswith(f"{name}." if name else "")}
            plan |= {f"{name}.{other}".lstrip("."): style for other, style in derive_plan(module).items()}
            prefix = f"{name}." if name else ""
            try:
                expanded = _expand(module, own, strict=False)
            except ValueError as error:
                raise ValueError(f"the plan that {type(module).__name__} brings cannot be used: {error}") from error
            plan |= {f"{prefix}{key}": style for key, style in expanded.items()}
            if not name:
                break
            inside = prefix  # a model's plan covers the models inside it
    # A weight that one module shards and the other reads whole cannot be one tensor.
    plan = _without_half_tied(model, plan)
    if not any(isinstance(style, (Colwise, Rowwise, HeadParallel)) for style in plan.values()):
        raise ValueError(
            f"tp_plan=None: no tensor-parallel plan is known for {type(model).__name__}; give one, such as {_EXAMPLE}. "
            "Known are transformers models that bring a plan or are made of attention and feed-forward modules of known "
            "shapes, timm's attention and MLP modules, and torch's Transformer layers"
        )
    return plan


def _without_half_tied(model: nn.Module, plan: dict[str, ParallelStyle]) -> dict[str, ParallelStyle]:
    """Return `plan` without output layers tied to an embedding that the plan does not name."""
    names = {module: name for name, module in model.named_modules()}
    for places in tied_slots(model):
        holders = {names[module] for _, module, _ in places}
        if not holders <= plan.keys():
            plan = {name: style for name, style in plan.items() if name not in holders}
    return plan


def _is_transformers(module: nn.Module) -> bool:
    return any(cls.__name__ == "PreTrainedModel" for cls in type(module).__mro__)


def _expand(model: nn.Module, plan: Mapping[str, Any], *, strict: bool) -> dict[str, ParallelStyle]:
    """Return the plan by exact names. Later patterns win; a shared module is listed once, by its first name."""
    modules = dict(model.named_modules(remove_duplicate=False))
    # Reversed, so that the first name of a shared module is the one that stays.
    first = {module: name for name, module in reversed(modules.items())}
    prefix = f"{model.base_model_prefix}." if _is_transformers(model) else ""
    expanded: dict[str, Any] = {}  # in the order of patterns, which is that of application
    experts: dict[str, dict[str, Any]] = {}
    unmatched = []

    def matching(pattern: str) -> list[str]:
        return list(filter(matcher(pattern), modules))

    for pattern, value in plan.items():
        # Plans of transformers name modules of the base model, without its prefix in a model with a head.
        names = matching(pattern) or matching(prefix + pattern)
        if names:
            expanded |= {first[modules[name]]: style_of(pattern, modules[name], value) for name in names}
            continue
        # Fused experts are parameters without modules of their own.
        holders, _, own = pattern.rpartition(".")
        held = [name for name in matching(holders) if own in modules[name]._parameters]
        for name in held:
            experts.setdefault(name, {})[own] = value
        # A model's own plan names modules that only some of its variants have; a user's name that matches none is a typing
        # error.
        if strict and not held:
            unmatched.append(pattern)
    if unmatched:
        raise ValueError(_unmatched_message(model, unmatched, modules))
    for name, parameters in experts.items():
        if not isinstance(expanded.get(name), Experts):
            raise ValueError(
                f"tp_plan names the parameters {sorted(parameters)} of {name!r}, a {type(modules[name]).__name__}; give the "
                "module a style instead, or 'moe_tp_experts' too if it holds experts"
            )
        expanded[name] = Experts(parameters)
    return expanded


def _unmatched_message(model: nn.Module, unmatched: list[str], modules: Mapping[str, nn.Module]) -> str:
    generic = list(dict.fromkeys(re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in modules if name))
    near = list(
        dict.fromkeys(
            close for pattern in unmatched for close in difflib.get_close_matches(pattern, generic, n=3, cutoff=0.4)
        )
    )
    hint = f"near are {near}" if near else f"its top-level modules are {[name for name, _ in model.named_children()]}"
    return f"tp_plan names {unmatched}, which match no module of {type(model).__name__}; {hint}"


def _with_heads(model: nn.Module, plan: dict[str, ParallelStyle]) -> dict[str, ParallelStyle]:
    """Return `plan` with regions for known attention modules with sharded projections: they need the local number of heads."""
    derived = derive_plan(model)
    for name, style in list(plan.items()):
        parent = name.rpartition(".")[0]
        # Heads are counted in the attention module, which reshapes by that number.
        if isinstance(style, (Colwise, ColwiseParallel)) and parent in derived and parent not in plan:
            plan[parent] = derived[parent]
            # A fused projection has one way to be divided.
            wanted = derived.get(name)
            if isinstance(wanted, Colwise) and getattr(style, "num_parts", 1) != wanted.num_parts:
                plan[name] = wanted
    return plan


def _with_positions(model: nn.Module, plan: dict[str, ParallelStyle]) -> dict[str, ParallelStyle]:
    """Return `plan` with the number of position features that latent attention has after its latents."""
    completed = dict(plan)
    for name, style in plan.items():
        if not isinstance(style, KVLatentProjection) or style.num_positions is not None:
            continue
        around: Any = model.get_submodule(name.rpartition(".")[0])
        sizes = [getattr(each, "qk_rope_head_dim", None) for each in (around, getattr(around, "config", None))]
        size = next((size for size in sizes if isinstance(size, int)), None)
        if size is None:
            raise ValueError(
                f"tp_plan gives {name!r} 'mla_kv_a_proj', but the {type(around).__name__} around it does not say in "
                "qk_rope_head_dim how many of its output features are positions that every head reads; set that attribute"
            )
        completed[name] = KVLatentProjection(size)
    return completed


def _with_inner_parameters(model: nn.Module, plan: dict[str, ParallelStyle]) -> dict[str, ParallelStyle]:
    """Return `plan` with modules between its column-wise and row-wise ones, such as norms of a head and PReLU."""
    completed = dict(plan)
    for parent in dict.fromkeys(name.rpartition(".")[0] for name in plan if name):
        module = model.get_submodule(parent)
        styles = {name: plan.get(f"{parent}.{name}".lstrip(".")) for name, _ in module.named_children()}
        up = [name for name, style in styles.items() if isinstance(style, (Colwise, ColwiseParallel))]
        down = [name for name, style in styles.items() if isinstance(style, (Rowwise, RowwiseParallel))]
        # Only between the two is an activation sharded; a gathered one is whole again.
        if not up or len(down) != 1 or any(getattr(styles[name], "gather_output", False) for name in up):
            continue
        used = names_in_forward(module)
        sizes = {1, *(size for key in _HEAD_SIZES if isinstance(size := getattr(module, key, None), int))}
        for name, child in module.named_children():
            inside = any(side_of(name, other, used) > 0 for other in up) and side_of(name, down[0], used) < 0
            if styles[name] is None and inside and all(param.numel() in sizes for param in child.parameters()):
                for inner, each in child.named_modules(prefix=f"{parent}.{name}".lstrip(".")):
                    if each._parameters:
                        # Their inputs differ by rank, so their gradients are sums over ranks.
                        completed.setdefault(inner, Region(partial_gradients=True))
    return completed


def _around_adapters(
    model: nn.Module, plan: dict[str, ParallelStyle], *, sequence_parallelism: bool
) -> dict[str, ParallelStyle]:
    """Return `plan` with the low-rank adapters of its layers: B of a column-wise layer is sharded, A of a row-wise one.

    Raises ValueError for what cannot be sharded so.
    """
    # The other of the two matrices stays unsharded.
    completed = {}
    for name, style in plan.items():
        layer: Any = model.get_submodule(name)
        if not hasattr(layer, "lora_A"):
            completed[name] = style
            continue
        if not isinstance(style, (Colwise, Rowwise)):
            raise ValueError(
                f"{name!r} has adapters, which go with 'colwise' and 'rowwise', and tp_plan gives it a "
                f"{type(style).__name__}; leave it out of tp_plan or of the adapters"
            )
        if sequence_parallelism or any(getattr(each, "p", 0.0) for each in layer.lora_dropout.values()):
            what = "sequence_parallelism=True" if sequence_parallelism else "lora_dropout"
            raise ValueError(
                f"{name!r}: {what} goes with no adapters under tensor parallelism, where each rank would see another part of "
                "what one matrix reads; leave it out"
            )
        completed[f"{name}.base_layer"] = style
        divided = "lora_B" if isinstance(style, Colwise) else "lora_A"
        completed |= {f"{name}.{divided}.{adapter}": style for adapter in getattr(layer, divided)}
    return completed


def _check_heads(model: nn.Module, name: str, style: ParallelStyle, tp_size: int) -> None:
    """Raise ValueError if columns of an attention module would be cut within a head."""
    module: Any = within_adapters(model.get_submodule(name))
    parent = model.get_submodule(name.rpartition(".")[0])
    head_dim = next((size for key in _HEAD_SIZES if isinstance(size := getattr(parent, key, None), int)), None)
    if not isinstance(style, (Colwise, ColwiseParallel)) or getattr(style, "gather_output", False) or not head_dim:
        return
    features = module.weight.shape[output_dim(module)] // getattr(style, "num_parts", 1)
    # A projection of another size, as of latents, has no heads to cut.
    if features % head_dim == 0 and (features // head_dim) % tp_size:
        raise ValueError(
            f"{name!r} has {features // head_dim} heads of {head_dim} features, which do not divide by tp_size={tp_size}; "
            "choose another tp_size, or leave its attention module out of tp_plan"
        )


Slots = list[tuple[str, nn.Module, str]]  # name of the parameter, its module, its name in there


def tied_slots(model: nn.Module) -> list[Slots]:
    """Return the places of every parameter of `model` that is in more than one."""
    all_slots = []
    for places in tensor_places(model).values():
        # A module that is registered twice is one slot.
        slots = {(place.holder, place.own): (place.name, place.holder, place.own) for place in reversed(places)}
        all_slots.append(list(reversed(slots.values())))
    return [slots for slots in all_slots if len(slots) > 1]


def check_ties(model: nn.Module, plan: dict[str, ParallelStyle]) -> None:
    """Raise ValueError if `plan`, of exact names, would give a tied parameter several placements."""
    styles = {model.get_submodule(name): style for name, style in plan.items()}
    for places in tied_slots(model):
        placements = [(name, _placement(styles.get(module), module, own)) for name, module, own in places]
        for name, placement in placements[1:]:
            if placement != placements[0][1]:
                raise placements_differ(placements[0][0], placements[0][1], name, placement)


def _placement(style: ParallelStyle | None, module: nn.Module, own: str) -> Placement | None:
    """Return the placement that `style` will give a parameter; None for a plain tensor, and for a style of the user."""
    if isinstance(style, LocalStyle):
        return style.placements(module).get(own)
    if not isinstance(style, (ColwiseParallel, RowwiseParallel)):
        return None
    by_rows = isinstance(style, RowwiseParallel)
    if own == "bias" and by_rows:
        return Replicate()
    return Shard(int(by_rows) if not isinstance(module, nn.Embedding) else 1 - int(by_rows))


def placements_differ(first: str, placement: Placement | None, second: str, other: Placement | None) -> ValueError:
    return ValueError(
        f"{first!r} and {second!r} are one tied parameter, but tp_plan makes it {placement or 'whole'!s} in the one and "
        f"{other or 'whole'!s} in the other; name both modules or neither, for example 'embedding_rowwise' for an embedding "
        "and 'colwise_gather_output' for the head that shares its weight"
    )
