"""What is legal in public calls: ranges and objects by the name of a parameter, and legal arguments to vary one at a time.

A new function, class or parameter needs a line here where its annotation does not say everything:
- RANGES, by parameter name, or "Call(parameter)" where one call differs: which values are legal, None aside;
- EXAMPLES, by call: legal arguments for its required parameters (several sets where options go together), from a `World`;
- EXEMPT: what takes anything, with the reason.
"""

import math
import random
import types
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch
from bad_arguments import Predicate
from ports import free_port
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Sampler, TensorDataset

import booster
import booster.numerics
from booster.mixed_precision import FP32, LossScaler, MixedPrecision, apex_amp
from booster.plugin import FP8Communication, Plugin
from booster.plugin.tensor_parallel import Region

MODULES = [
    "booster",
    "booster.logging",
    "booster.facade.foreign_names",
    "booster.mixed_precision",
    "booster.mixed_precision.apex_amp",
    "booster.plugin",
    "booster.plugin.tensor_parallel",
    "booster.nn.lr_scheduler",
    "booster.numerics",
]


class World:
    """A booster and what its `boost` returned, and raw objects to boost."""

    precision = "bf16"

    @cached_property
    def booster(self) -> booster.Booster:
        return booster.Booster("cpu", self.precision)

    @cached_property
    def raw(self) -> nn.Module:
        return nn.Linear(2, 2)

    @cached_property
    def raw_optimizer(self) -> Optimizer:
        optimizer = torch.optim.SGD(self.raw.parameters(), lr=0.1, momentum=0.9)
        optimizer.param_groups[0] |= {
            "initial_lr": 0.1,
            "max_lr": 0.1,
            "min_lr": 0.1,
            "max_momentum": 0.9,
            "base_momentum": 0.8,
        }
        return optimizer

    @cached_property
    def boosted(self) -> tuple[Any, ...]:
        schedule = torch.optim.lr_scheduler.StepLR(self.raw_optimizer, 1)
        dataset = TensorDataset(torch.ones(4, 2), torch.ones(4, 2))
        loader = torch.utils.data.DataLoader(dataset, batch_size=2)
        return self.booster.boost(self.raw, self.raw_optimizer, nn.functional.mse_loss, loader, schedule)

    @property
    def model(self) -> Any:
        return self.boosted[0]

    @property
    def optimizer(self) -> Any:
        return self.boosted[1]

    @property
    def loss(self) -> torch.Tensor:
        return self.model(torch.ones(1, 2)).sum()


# ---------------------------------------------------------------------- predicates


def number(
    low: float = -math.inf, high: float = math.inf, *, above: float = -math.inf, infinite: bool = False
) -> Predicate:
    def legal(value: Any) -> bool:
        real = isinstance(value, Real) and not isinstance(value, bool) and value == value
        return real and low <= value <= high and value > above and (infinite or abs(value) != math.inf)

    return legal


def whole(low: float = -math.inf, high: float = math.inf) -> Predicate:
    return lambda value: isinstance(value, Integral) and not isinstance(value, bool) and low <= value <= high


def one_of(*legal: Any) -> Predicate:
    return lambda value: any(type(value) is type(entry) and value == entry for entry in legal)


def a(*kinds: type) -> Predicate:
    return lambda value: isinstance(value, kinds)


def either(*predicates: Predicate) -> Predicate:
    return lambda value: any(predicate(value) for predicate in predicates)


def several(predicate: Predicate, *kinds: type) -> Predicate:
    return lambda value: isinstance(value, kinds or (list, tuple, set, frozenset)) and all(predicate(e) for e in value)


def nothing(value: Any) -> bool:
    """None of the pool is legal: the call wants its own object."""
    return False


def text(value: Any) -> bool:
    return isinstance(value, str) and value.strip() != ""


def scalar_tensor(predicate: Predicate) -> Predicate:
    return lambda value: isinstance(value, torch.Tensor) and value.dim() == 0 and predicate(value.item())


def floating(value: Any) -> bool:
    return isinstance(value, torch.dtype) and value.is_floating_point


def pin(value: Any) -> bool:
    if isinstance(value, nn.Module):
        return False
    return issubclass(value, nn.Module) if isinstance(value, type) else isinstance(value, str) or callable(value)


def pins(value: Any) -> bool:
    return pin(value) or several(pin)(value)


def wraps(value: Any) -> bool:
    entry = either(a(str), lambda v: isinstance(v, type) and issubclass(v, nn.Module))
    return pin(value) or whole(1)(value) or (several(entry)(value) and len(value) > 0)


def batches(value: Any) -> bool:
    rows = isinstance(value, torch.Tensor) and value.dim() > 0
    return rows or (isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping, torch.Tensor)))


def samples(value: Any) -> bool:
    return isinstance(value, (list, tuple, dict)) or (isinstance(value, torch.Tensor) and value.dim() > 0)


def rows(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(rows(entry) for entry in value.values())
    if isinstance(value, (list, tuple)):
        return all(rows(entry) for entry in value)
    return isinstance(value, (float, torch.Tensor)) or (isinstance(value, int) and abs(value) < 2**63)


def may_raise(value: Any) -> bool:
    """A class or module, which raises its own error when it is called with other arguments than its own."""
    return isinstance(value, (type, nn.Module))


def trainable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def named_precision(value: Any) -> bool:
    return isinstance(value, str) and value in booster.mixed_precision.available()


def plan(value: Any) -> bool:
    styles = isinstance(value, Mapping) and value and all(isinstance(style, str) for style in value.values())
    return bool(styles) or (callable(value) and not isinstance(value, (type, nn.Module)))


def stateful(value: Any) -> bool:
    return hasattr(value, "load_state_dict") and not isinstance(value, type)


a_scale = number(2.0**-126, 3.4e38)

RANGES: dict[str, Predicate] = {
    # the facade
    "device": one_of("cpu", torch.device("cpu")),
    "Booster.profile(skip)": whole(1),
    "Booster.profile(steps)": whole(1),
    "Booster.progress(items)": a(Iterable),
    "Booster.progress(description)": a(str),
    "Booster.progress(total)": whole(0),
    "find_batch_size(trial)": callable,
    "find_batch_size(start)": whole(1),
    "find_batch_size(least)": whole(1, 4),
    "mixed_precision": either(named_precision, a(MixedPrecision)),
    "precision": either(named_precision, a(MixedPrecision)),
    "plugin": a(Plugin),
    "clip_grad_norm": number(0),
    "max_consecutive_skips": whole(1),
    "patience": number(above=0),
    "timeout": number(high=1e9, above=0),
    "diagnose": either(whole(1), one_of("first", "every")),
    "Booster(states)": one_of("fp32", "bf16", "8bit"),
    "fp16": one_of({}),
    "model": nothing,
    "register_elementwise(states)": one_of({}, {"exp_avg": "signed"}),
    "register_elementwise(rule)": either(
        one_of(None, "lion"), lambda value: callable(value) and type(value) is not type
    ),
    "Booster.boost(model)": a(nn.Module),
    "Booster.estimate_memory(model)": a(nn.Module),
    "Booster.estimate_memory(optimizer)": a(Optimizer),
    "optimizer": nothing,
    "criterion": callable,
    "dataloader": batches,
    "Booster.gather(dataloader)": nothing,
    "lr_scheduler": one_of(None, [], ()),
    "loss": nothing,
    "loss_id": one_of(0),
    "forward": callable,
    "inputs": lambda v: v is None,
    "data_iter": nothing,
    "num_micro_batches": whole(1),
    "num_tokens": either(number(above=0), scalar_tensor(number(above=0))),
    "boosted": nothing,
    "dataset": samples,
    "batch_size": whole(1),
    "seed": whole(0, 2**63 - 1),
    "num_workers": whole(0),
    "distributed_sampler_cls": lambda v: isinstance(v, type) and issubclass(v, Sampler),
    "tensor": rows,
    "Booster.reduce(tensor)": either(rows, one_of(["x"], [None])),  # labels in containers stay
    "Autopilot(low)": either(text, a(booster.mixed_precision.LowPrecision)),
    "Autopilot(budget)": number(0, 1),
    "Autopilot(sample)": lambda v: number(above=0)(v) and v <= 1,
    "delayed_scaling": either(one_of(True, False), a(booster.mixed_precision.DelayedScaling)),
    "amax_history_len": whole(1),
    "margin": whole(0),
    "rounds": whole(1),
    **dict.fromkeys(("Blocks(first)", "Blocks(last)"), lambda v: number(0)(v) and (v <= 1 or v == int(v))),
    "PrecisionSchedule(phases)": nothing,
    "train_step": callable,
    "max_graphs": whole(1),
    # numerics
    "cls": lambda v: isinstance(v, type) and issubclass(v, Optimizer),
    "model_fn": may_raise,
    "optimizer_fn": may_raise,
    "precisions": nothing,
    "steps": whole(3),
    "budget": nothing,
    "bound": number(above=0),
    **dict.fromkeys(("seconds", "max_gradient_error", "max_loss_error", "max_memory"), number(above=0)),
    "auto_pins(model)": either(a(nn.Module), may_raise),
    "source": either(text, a(Path)),
    "format": floating,
    "a": nothing,
    "b": nothing,
    # checkpoints
    "folder": either(text, a(Path)),
    "every": whole(1),
    "activations": one_of([], ()),
    "tracker": callable,
    "step": whole(0),
    "keep_last": whole(1),
    "prefix": text,
    "size_per_shard": whole(1),
    **{
        f"Booster.{call}({name})": one_of(None, [], (), {})
        for call in ("save", "load", "resume_or_start")
        for name in ("model", "optimizer")
    },
    **{
        f"Booster.{call}({name})": either(stateful, one_of(None, [], (), {}))
        for call in ("save", "load", "resume_or_start")
        for name in ("dataloader", "lr_scheduler")
    },
    **{
        f"Booster.{call}(criterion)": either(callable, one_of(None, [], (), {}))
        for call in ("save", "load", "resume_or_start")
    },
    **{f"Booster.{call}(lr_scheduler)": stateful for call in ("save_lr_scheduler", "load_lr_scheduler")},
    # what boost returns
    "closure": callable,
    "max_norm": either(number(0, infinite=True), scalar_tensor(number(0))),
    "norm_type": number(above=0, infinite=True),
    "clip_value": either(number(0, infinite=True), scalar_tensor(number(0))),
    "reason": text,
    "action": callable,
    "param_group": nothing,
    "epoch": whole(0),
    "fn": callable,
    "ModelWrapper.register_buffer(name)": text,
    "ModelWrapper.register_buffer(tensor)": a(torch.Tensor),
    "ModelWrapper.register_parameter(name)": text,
    "ModelWrapper.register_parameter(param)": nothing,
    "ModelWrapper.add_module(name)": text,
    "ModelWrapper.add_module(module)": a(nn.Module),
    # launch, ranks, logs
    "rank": one_of(0),
    "world_size": whole(1, 2**31 - 1),
    "host": one_of("127.0.0.1"),
    "port": whole(1, 65535),
    "backend": one_of("gloo"),
    "local_rank": whole(0, 2**31 - 1),
    "DistCoordinator(local_rank)": whole(0),
    "config": one_of({}),
    "group": nothing,
    "executor_rank": one_of(0),
    "ranks": several(whole(0)),
    "level": whole(),
    "mode": one_of("a", "w"),
    "path": either(text, a(Path)),
    "suffix": text,
    "DistLogger(name)": a(str),
    "get_dist_logger(name)": a(str),
    # precisions
    "output_dtype": floating,
    "keep_fp32": pins,
    "half_buffers": pins,
    "fp32_buffers": pins,
    "keep": pins,
    "tokens": nothing,  # but with convert="measured"
    "compute_dtype": one_of(torch.bfloat16, torch.float32),
    "storage_dtype": one_of("int8", "fp8", "nf4", torch.float32, torch.bfloat16, torch.float16),
    "products": one_of("float32", "bfloat16"),
    "describe(model)": a(nn.Module),
    "load_weights(compute_dtype)": one_of(torch.float32, torch.bfloat16, torch.float16),
    "load_weights(model)": a(nn.Module),
    "KeptModules(option)": text,
    "init_scale": a_scale,
    "initial_scale": number(1, 2.0**32),
    "scale": a(LossScaler),
    "StaticScale(scale)": a_scale,
    "growth_factor": number(above=1),
    "backoff_factor": lambda v: number(above=0)(v) and v < 1,
    "growth_interval": whole(1),
    "hysteresis": whole(1),
    "min_scale": number(2.0**-126, 2.0**16),
    "max_scale": number(2.0**16, infinite=True),
    "param": floating,
    "compute": one_of(torch.float16, torch.bfloat16),
    "DtypePolicy(gather)": nothing,  # it follows another field
    "store": floating,
    "reduce": floating,
    "output": floating,
    "KeptModules(model)": a(nn.Module),
    "KeptModules.contains(name)": a(str),
    "DtypePolicy(keep_fp32)": several(text, set, frozenset),
    "DtypePolicy(half_buffers)": several(text, set, frozenset),
    "DtypePolicy(fp32_buffers)": several(text, set, frozenset),
    "DtypePolicy(fp8_weights)": several(text, set, frozenset),
    "place": callable,
    "Placement(device)": a(torch.device),
    "synchronise": callable,
    "shards": callable,
    "dtype": one_of(torch.float16, torch.bfloat16, torch.float32),
    "parallel_group": nothing,
    "NaiveAMPModel(model)": a(nn.Module),
    "register(name)": text,
    **{f"register_{kind}_function(name)": nothing for kind in ("half", "float", "promote")},
    "strategy": nothing,
    "module": a(nn.Module),
    # apex
    "opt_level": nothing,
    "cast_model_type": either(one_of(None, False), floating),
    "keep_batchnorm_fp32": one_of(True, False, "True", "False"),
    "loss_scale": either(one_of("dynamic", "1"), number(above=0)),
    "cast_model_outputs": floating,
    "num_losses": whole(1),
    "verbosity": whole(),
    "min_loss_scale": number(0),
    "max_loss_scale": number(above=0, infinite=True),
    "scale_window": whole(1),
    "models": either(a(nn.Module), one_of([])),
    "optimizers": either(a(Optimizer), one_of(None, [])),
    "scale_loss(loss)": a(torch.Tensor),
    "scale_loss(optimizers)": one_of([], ()),
    "master_params(optimizer)": a(Optimizer),
    "destination": a(dict),
    "function": callable,
    # plugins
    "bucket_cap_mb": number(above=0),
    "comm_hook": callable,
    "fp8_communication": either(one_of(True, False), a(FP8Communication)),
    "error_feedback": one_of(True, False),
    "stage": one_of(1, 2),
    "reshard_after_forward": nothing,
    "wrap_policy": wraps,
    "reduce_dtype": floating,
    "replicate_size": one_of(1),
    "ep_size": one_of(1),
    "tp_size": one_of(1),
    "sp_size": one_of(1),
    "Booster.shard_sequence(labels)": one_of("labels", "input_ids"),
    "Booster.shard_sequence(documents)": nothing,  # on a single device
    "Booster.shard_sequence(whole)": several(one_of("labels", "input_ids")),
    "Booster.shard_sequence(ignore_index)": whole(-(2**63), 2**63 - 1),
    "Booster.token_mean(losses)": lambda v: isinstance(v, torch.Tensor) and not v.is_complex(),
    "Booster.token_mean(counted)": either(number(0), lambda v: isinstance(v, torch.Tensor) and v.numel() in (1, 8)),
    "Booster.balancing_loss(router_logits)": lambda v: isinstance(v, torch.Tensor) and v.shape == (8, 4),
    "Booster.balancing_loss(top_k)": whole(1, 4),
    "Booster.balancing_loss(attention_mask)": either(
        nothing, lambda v: isinstance(v, torch.Tensor) and v.numel() == 8 and not v.is_complex()
    ),
    "pp_size": one_of(1),
    "num_microbatches": whole(1),
    "microbatch_size": whole(1),
    "num_model_chunks": one_of(1),
    "tp_plan": plan,
    "split_points": nothing,
    # styles of tensor parallelism
    "num_parts": whole(1),
    "sequence_dim": whole(),
    **dict.fromkeys(("divide", "by_heads", "shared"), several(text, tuple, list)),
    "assign": lambda v: isinstance(v, Mapping) and all(isinstance(key, str) for key in v),
    # schedules
    **{f"{name}(optimizer)": a(Optimizer) for name in booster.nn.lr_scheduler.__all__},
    "total_steps": whole(1),
    "warmup_steps": whole(0, 10),
    "LinearWarmupLR(warmup_steps)": whole(0),
    "last_epoch": whole(-1),
    "eta_min": number(0),
    "end_lr": number(0),
    "pct_start": number(0, 1),
    "gamma": number(0),
    "power": number(0),
    "step_size": whole(1),
    "milestones": several(whole(0, 10), list, tuple),
    "lr_lambda": callable,
    "base_momentum": number(0, 1),
    "max_momentum": number(0, 1),
    "div_factor": number(above=0),
    "final_div_factor": number(above=0),
}

EXEMPT: dict[str, str] = {
    "(batch)": "any tree; the user's model judges it",
    "(extra)": "a tree of any depth, in which the place of what cannot be kept is named; has its own tests",
    "ModelWrapper.replace_with()": "called by Booster.switch, with what boost would return",
    "OptimizerWrapper.replace_with()": "called by Booster.switch, with what boost would return",
    "CriterionWrapper.replace_with()": "called by Booster.switch, with what boost would return",
    **{
        f"{name}()": "called by Booster, with what a user wrote"
        for name in ("refuse_unknown", "missing_method", "check_places", "meant_by")
    },
    "cast_parameters()": "called by plugins, with what they are given",
    "install_keep_fp32()": "called by plugins, with what they are given",
    "PlacedModule()": "made by plugins",
    "(msg)": "logging and print write any object",
    "Booster.print()": "print takes any object, and says itself what is wrong with sep and end",
    "launch_notebook()": "starts processes; has its own tests",
    "AMP_TYPE()": "an enum: its call is the enum's own",
    "LossScaleError()": "an exception takes anything",
    "LowPrecision()": "a base, which says that it has no recipe",
    "NaiveMixedPrecision()": "a base, which says that it has no dtype",
    "Booster.enable_lora()": "needs peft, and has its own tests",
    "RanksApart()": "an exception takes anything",
    "ReplayError()": "an exception takes anything",
    "Description()": "made by describe()",
    "Advice()": "made by the library, read by users",
    "Comparison()": "made by the library, read by users",
    "Diagnosis()": "made by the library, read by users",
    "Numbers()": "made by the library, read by users",
    "Pins()": "made by the library, read by users",
    "Record()": "made by the library, read by users",
    "Report()": "made by the library, read by users",
    "Run()": "made by the library, read by users",
    "TimedLayers()": "made by the library, read by users",
    "TimedShape()": "made by the library, read by users",
    "StepResult()": "made by step(), read by users",
    "AutocastMixedPrecision()": "a base class: subclasses say in which dtype; its options are tried in those",
    "Pipeline()": "a protocol",
    "Plugin()": "an abstract class",
    "LossScaler()": "the null object has no arguments",
    "is_batch_norm()": "a predicate that KeptModules calls",
    "apply_tensor_parallel()": "called by HybridParallelPlugin with arguments that it has checked",
    "check_tensor_parallel()": "called by HybridParallelPlugin with arguments that it has checked",
    "fsdp_placement()": "called by fully_shard",
    "make()": "names the argument of Booster that it reads, mixed_precision, which is tried there",
    "scale_loss(model)": "not used, as in apex",
    "ModelWrapper.keep_calls()": "called by boost",
    "CriterionWrapper.keep_calls()": "called by boost",
    "ModelWrapper.cast_inputs()": "any tree; what is no tensor stays",
    "ModelWrapper.cast_outputs()": "any tree; what is no tensor stays",
    "OptimizerWrapper.read_state_dict()": "has the tests of load_state_dict, which calls it",
    "load_state_dict()": "has its own tests, with damaged states",
}

# Raised as apex raises them.
OTHER_ERRORS: dict[str, tuple[type[Exception], ...]] = {
    "FP16ApexMixedPrecision(keep_batchnorm_fp32)": (AssertionError,),
    "initialize(keep_batchnorm_fp32)": (AssertionError,),
    "scale_loss(loss_id)": (IndexError,),
}

Examples = list[Callable[[World], dict[str, Any]]]


def _to_train() -> dict[str, Any]:
    model = nn.Linear(2, 2)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}


def _optimizer(w: World) -> dict[str, Any]:
    return {"optimizer": w.raw_optimizer, "total_steps": 10}


PORT = free_port()


def _process(w: World) -> dict[str, Any]:
    return {"rank": 0, "world_size": 1, "host": "127.0.0.1", "port": PORT}


class _Plain(torch.optim.SGD):
    """An optimizer to register, that nothing else uses."""


def _linear() -> nn.Module:
    return nn.Linear(2, 2)


def _sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


_BATCH = torch.ones(1, 2), torch.ones(1, 2)
_NO_RUN = booster.numerics.Run(Path("none"), {})
_half = types.SimpleNamespace(__name__="a_module", work=lambda x: x)

EXAMPLES: dict[str, Examples] = {
    "Booster.save": [lambda w: {"folder": "run", "model": w.model, "optimizer": w.optimizer}],
    "Autopilot": [lambda w: {"low": "nvfp4"}],
    "PrecisionSchedule": [lambda w: {"phases": {0: "fp32", 0.5: "bf16"}, "total_steps": 10}],
    "Blocks": [lambda w: {"first": 1, "last": 0.5}],
    "NVFP4MixedPrecision.preset": [lambda w: {"name": "nvidia-2025"}],
    "Booster.switch": [lambda w: {"mixed_precision": "bf16"}],
    **{f"Booster.{call}": [lambda w: {"train_step": lambda: None}] for call in ("capturable", "capture")},
    "Booster.record": [lambda w: {"folder": f"record {w.model and random.random()}"}],
    "register_elementwise": [lambda w: {"cls": _Plain}],
    "advise": [
        lambda w: {
            "model_fn": _linear,
            "batch": _BATCH,
            "criterion": nn.functional.mse_loss,
            "optimizer_fn": _sgd,
            "steps": 3,
            "precisions": ["fp32"],
        }
    ],
    "time_layers": [lambda w: {"model_fn": _linear, "batch": _BATCH, "rounds": 1}],
    "auto_pins": [
        lambda w: {"model": nn.Linear(2, 2), "batch": _BATCH, "criterion": nn.functional.mse_loss, "precision": "bf16"}
    ],
    "compare": [lambda w: dict.fromkeys("ab", _NO_RUN)],
    "read_run": [lambda w: {"folder": "run"}],
    "report": [lambda w: {"source": w.optimizer}],
    "Booster.load": [lambda w: {"folder": "run", "model": w.model, "optimizer": w.optimizer}],
    "Booster.resume_or_start": [lambda w: {"folder": "none", "model": w.model}],
    "Booster.save_model": [lambda w: {"model": w.model, "path": "weights"}],
    "Booster.enable_lora": [lambda w: {"model": nn.Linear(2, 2)}],
    "Booster.save_lora": [lambda w: {"model": w.model, "folder": "adapters"}],
    "Booster.sync_weights": [lambda w: {"model": w.model}],
    "Booster.load_model": [lambda w: {"model": w.model, "path": "weights"}],
    **{f"Booster.{verb}_optimizer": [lambda w: {"optimizer": w.optimizer, "path": "o"}] for verb in ("save", "load")},
    **{
        f"Booster.{verb}_lr_scheduler": [lambda w: {"lr_scheduler": w.boosted[4], "path": "s"}]
        for verb in ("save", "load")
    },
    "describe": [lambda w: {"model": w.model}],
    "load_weights": [lambda w: {"model": nn.Linear(2, 2), "path": _weights_file(), "storage_dtype": "int8"}],
    "KeptModules": [lambda w: {"model": w.model, "keep_fp32": ()}],
    "KeptModules.contains": [lambda w: {"name": "0"}],
    "Booster.boost": [
        lambda w: {"model": nn.Linear(2, 2)},
        lambda w: {"criterion": nn.functional.mse_loss, **_to_train()},
    ],
    "Booster.estimate_memory": [lambda w: {**_to_train(), "batch": _BATCH, "criterion": nn.functional.mse_loss}],
    "Booster.memory": [lambda w: {"model": w.model, "optimizer": w.optimizer}],
    "Booster.diagnose": [lambda w: {"forward": lambda: w.loss, "optimizer": w.optimizer}],
    "Booster.backward": [lambda w: {"loss": w.loss, "optimizer": w.optimizer}],
    "Booster.execute_pipeline": [
        lambda w: {
            "data_iter": iter([(torch.ones(1, 2), torch.ones(1, 2))]),
            "model": w.model,
            "criterion": nn.functional.mse_loss,
            "optimizer": w.optimizer,
        }
    ],
    "Booster.accumulate": [lambda w: {"model": w.model, "optimizer": w.optimizer, "num_micro_batches": 2}],
    "Booster.shard_sequence": [
        lambda w: {
            "batch": {"labels": torch.ones(2, 4, dtype=torch.int64), "input_ids": torch.ones(2, 4, dtype=torch.int64)}
        }
    ],
    "Booster.token_mean": [lambda w: {"losses": torch.ones(2, 4)}],
    "Booster.balancing_loss": [lambda w: {"router_logits": torch.ones(8, 4), "top_k": 2}],
    "Booster.no_sync": [lambda w: {"model": w.model}],
    "Booster.unwrap": [lambda w: {"boosted": w.model}],
    "Booster.prepare_dataloader": [
        lambda w: {"dataset": [1, 2, 3], "batch_size": 1},
        lambda w: {"dataset": [1, 2, 3], "batch_size": 1, "shuffle": True},
    ],
    "Booster.gather": [lambda w: {"tensor": torch.ones(2)}],
    "Booster.reduce": [lambda w: {"tensor": torch.ones(2)}],
    "OptimizerWrapper.backward": [lambda w: {"loss": w.loss}],
    "OptimizerWrapper.clip_grad_by_norm": [lambda w: {"max_norm": 1.0}],
    "OptimizerWrapper.clip_grad_by_value": [lambda w: {"clip_value": 1.0}],
    "OptimizerWrapper.forbid_step": [lambda w: {"reason": None}],
    "OptimizerWrapper.when_synced": [lambda w: {"action": lambda: None}],
    "OptimizerWrapper.add_param_group": [lambda w: {"param_group": {"params": []}}],
    "ModelWrapper.apply": [lambda w: {"fn": lambda module: None}],
    "ModelWrapper.register_buffer": [lambda w: {"name": "b", "tensor": torch.ones(1)}],
    "ModelWrapper.register_parameter": [lambda w: {"name": "p", "param": None}],
    "ModelWrapper.add_module": [lambda w: {"name": "m", "module": None}],
    "DataLoaderWrapper.set_epoch": [lambda w: {"epoch": 1}],
    "DistLogger.log_to_file": [lambda w: {"path": "logs"}],
    "DistLogger.set_level": [lambda w: {"level": "INFO"}],
    "DistLogger": [lambda w: {"name": "tests.bad_arguments"}],
    **{f"DistLogger.{level}": [lambda w: {"msg": "m"}] for level in ("info", "warning", "debug", "error")},
    "Booster.profile": [lambda w: {"folder": "trace"}],
    "Booster.progress": [lambda w: {"items": [1, 2]}],
    "find_batch_size": [lambda w: {"trial": lambda size: None, "start": 4}],
    "seed_everything": [lambda w: {"seed": 1}],
    "DistCoordinator.print_on_master": [lambda w: {"msg": ""}],
    "DistCoordinator.print_on_node_master": [lambda w: {"msg": ""}],
    "launch": [_process],
    "launch_from_slurm": [lambda w: {"host": "127.0.0.1", "port": PORT}],
    "launch_from_openmpi": [lambda w: {"host": "127.0.0.1", "port": PORT}],
    "translate": [lambda w: {"fp16": None}],
    "make": [lambda w: {"precision": None}],
    "register": [lambda w: {"name": "tests_bad_arguments", "strategy": FP32}],
    "set_fp32_attr_to_module": [lambda w: {"module": w.raw}],
    "NaiveAMPModel": [lambda w: {"model": w.raw}],
    "FP16ApexMixedPrecision": [lambda w: {"verbosity": 0}, lambda w: {"opt_level": "O2", "verbosity": 0}],
    "initialize": [
        lambda w: {"models": w.raw, "verbosity": 0},
        lambda w: {"models": w.raw, "optimizers": w.raw_optimizer, "opt_level": "O2", "verbosity": 0},
    ],
    "scale_loss": [lambda w: _apex_loss(w)],
    "master_params": [lambda w: {"optimizer": w.raw_optimizer}],
    **{f"{kind}_function": [lambda w: {"function": print}] for kind in ("half", "float", "promote")},
    **{
        f"register_{kind}_function": [lambda w: {"module": _half, "name": "work"}]
        for kind in ("half", "float", "promote")
    },
    "HybridParallelPlugin": [lambda w: {"tp_size": 1, "pp_size": 1}],
    "EmbeddingParallel": [lambda w: {"by": "features"}],
    **{
        name: [_optimizer]
        for name in booster.nn.lr_scheduler.__all__
        if name not in ("LambdaLR", "MultiplicativeLR", "MultiStepLR", "MultiStepWarmupLR")
    },
    **{name: [lambda w: {**_optimizer(w), "lr_lambda": lambda step: 1.0}] for name in ("LambdaLR", "MultiplicativeLR")},
    **{name: [lambda w: {**_optimizer(w), "milestones": [3, 6]}] for name in ("MultiStepLR", "MultiStepWarmupLR")},
}


def _weights_file() -> str:
    from safetensors.torch import save_file

    save_file(nn.Linear(2, 2).state_dict(), "linear.safetensors")
    return "linear.safetensors"


def _apex_loss(w: World) -> dict[str, Any]:
    apex_amp.shutdown()
    model, optimizer = apex_amp.initialize(nn.Linear(2, 2), verbosity=0), None
    model = nn.Linear(2, 2)
    model, optimizer = apex_amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), verbosity=0)
    return {"loss": model(torch.ones(1, 2)).sum(), "optimizers": optimizer}


# Classes with methods that users call, and how to come by an object.
OBJECTS: dict[type, Callable[[World], Any]] = {
    booster.Booster: lambda w: w.booster,
    type(World().model): lambda w: w.model,
    type(World().optimizer): lambda w: w.optimizer,
    type(World().boosted[2]): lambda w: w.boosted[2],
    type(World().boosted[3]): lambda w: w.boosted[3],
    type(World().boosted[4]): lambda w: w.boosted[4],
    booster.DistCoordinator: lambda w: booster.DistCoordinator(),
    booster.logging.DistLogger: lambda w: booster.logging.get_dist_logger("tests.bad_arguments"),
    booster.mixed_precision.KeptModules: lambda w: booster.mixed_precision.KeptModules(torch.nn.Linear(1, 1), ()),
}

# Classes with methods that the library calls, with arguments that it has made or checked.
CALLED_BY_US: tuple[type, ...] = (
    MixedPrecision,
    Plugin,
    booster.mixed_precision.Autopilot,
    booster.mixed_precision.PrecisionSchedule,
    booster.mixed_precision.Blocks,
    booster.mixed_precision.Ends,
    booster.mixed_precision.DelayedScaling,
    booster.mixed_precision.LossScaler,
    booster.mixed_precision.DtypePolicy,
    booster.mixed_precision.Placement,
    torch.optim.lr_scheduler.LRScheduler,
    Region.__mro__[1],
    booster.mixed_precision.NaiveAMPModel.__mro__[1],
    booster.StepResult,
    booster.Description,
    booster.AMP_TYPE,
    booster.LossScaleError,
    booster.numerics.RanksApart,
    booster.numerics.ReplayError,
    booster.plugin.FP8Communication,
    booster.plugin.Pipeline,
    booster.plugin.PlacedModule,
    *(
        getattr(booster.numerics, name)
        for name in (
            "Advice",
            "Budget",
            "Comparison",
            "Diagnosis",
            "Numbers",
            "Pins",
            "Record",
            "Report",
            "Run",
            "TimedLayers",
            "TimedShape",
        )
    ),
)


# ---------------------------------------------------------------------- command lines, files, variables

# What is tried where text is read.
TEXTS = (
    "",
    " ",
    "x",
    "-1",
    "0",
    "1",
    "2",
    "1.5",
    "0x1",
    "nan",
    "1e3",
    "99999999999",
    "True",
    "None",
    "0,1",
    "[0]",
    "a b",
    "a,,b",
    "-x",
)


def digits(low: int, high: int = 2**31 - 1) -> Predicate:
    return lambda value: value.isdigit() and low <= int(value) <= high


def names(value: str) -> bool:
    return all(host(name) for name in value.split(","))


def host(value: str) -> bool:
    return value != "" and value[0] not in "-." and all(c.isalnum() or c in "_.-:[]@%" for c in value)


# By option of `booster run`: what is legal, and options that must be there.
OPTIONS: dict[str, tuple[Predicate, tuple[str, ...]]] = {
    "nproc_per_node": (either(digits(1), one_of("cpu")), ()),
    "nnodes": (digits(1), ("--node_rank", "0", "--master_addr", "127.0.0.1")),
    "node_rank": (digits(0, 1), ("--nnodes", "2", "--master_addr", "127.0.0.1")),
    "master_addr": (host, ("--nnodes", "2", "--node_rank", "0")),
    "master_port": (digits(1, 65535), ()),
    "host": (names, ()),
    "hostfile": (nothing, ()),
    "include": (nothing, ("--hostfile", "hosts")),
    "exclude": (nothing, ("--hostfile", "hosts")),
    "ssh_port": (digits(1, 65535), ("--host", "localhost")),
    "env": (nothing, ()),
    "max_restarts": (digits(0), ()),
    "grace_seconds": (digits(0), ()),
    "timeout": (digits(1, 10**9), ()),
    "log_dir": (lambda value: value.strip() != "", ()),
    "tee": (digits(0, 3), ()),
    "watch_stdin": (nothing, ()),
    "module": (nothing, ()),
    "script": (nothing, ()),
}


def listed(*names: str) -> Predicate:
    return lambda value: value != "" and all(part.strip() in names for part in value.split(","))


def decimal(above: float) -> Predicate:
    def legal(value: str) -> bool:
        try:
            return float(value) > above
        except ValueError:
            return False

    return legal


_switch = (nothing, ())
_job = ("job.py:job",)
_file = (lambda value: value.strip() != "", ())

# By option of the other commands: what is legal, and arguments that must be there. A job that runs raises.
COMMAND_OPTIONS: dict[str, tuple[Predicate, tuple[str, ...]]] = {
    "check --json": _switch,
    "env --json": _switch,
    "estimate --precision": (nothing, _job),
    "estimate --plugin": (nothing, _job),
    "estimate --world_size": (digits(1, 2**40), (*_job, "--plugin=ddp")),
    "estimate --batch_size": (digits(1, 2**40), _job),
    "estimate --memory": (decimal(0), _job),
    "estimate --device": (nothing, _job),
    "estimate --release_gradients": (nothing, _job),
    "estimate --clips": (nothing, _job),
    "estimate --emulate": (nothing, _job),
    "estimate --offload_states": (nothing, _job),
    "estimate --json": (nothing, _job),
    "estimate --picture": (lambda value: value.strip() != "", _job),
    "estimate JOB": (nothing, ()),
    "checkpoint show --json": (nothing, ("run",)),
    "checkpoint show FOLDER": (nothing, ()),
    "checkpoint verify FOLDER": (nothing, ()),
    "checkpoint convert --model": (lambda value: True, ("run", "weights")),  # there is none
    "checkpoint convert --masters": (nothing, ("run", "weights")),
    "checkpoint convert --torch": (nothing, ("run", "weights")),
    "checkpoint convert --shard": (digits(1, 2**40), ("run", "weights")),
    "checkpoint convert FOLDER": (nothing, ("weights",)),
    "checkpoint convert TARGET": (nothing, ()),
    "report --json": (nothing, ("run",)),
    "report --html": (lambda value: value.strip() != "", ("run",)),
    "report FOLDER": (nothing, ()),
    "compare --json": (nothing, ("a", "b")),
    "compare RUN_A": (nothing, ("b",)),
    "compare RUN_B": (nothing, ("a",)),
    "advise --precisions": (nothing, _job),
    "advise --steps": (digits(3, 2**40), _job),
    "advise --seconds": (decimal(0), _job),
    "advise --max_gradient_error": (decimal(0), _job),
    "advise --max_memory_mib": (decimal(0), _job),
    "advise --device": (nothing, _job),
    "advise --seed": (digits(0, 2**40), _job),
    "advise --json": (nothing, _job),
    "advise --layers": (nothing, _job),
    "advise JOB": (nothing, ()),
}

# By option of `get_default_parser`.
SCRIPT_OPTIONS: dict[str, Predicate] = {
    **dict.fromkeys(("config", "host", "backend"), lambda value: True),
    **dict.fromkeys(("port", "world_size", "rank", "local_rank"), lambda value: value.lstrip("-").isdigit()),
}

HOST_LINES = (
    *(
        "-oProxyCommand=x",
        "a slots=0",
        "a slots=-1",
        "a slots=x",
        "a slots=",
        "a slots",
        "a 3",
        "a slots=1 slots=2",
        "a b",
    ),
    *(
        "a slots=1.5",
        "a, b",
        "a;b",
        "a slots = 2",
        "a slots=4x",
        "good",
        "$(x)",
        "`x`",
        "a/b",
        "slots=2 a",
        "a max_slots=2",
    ),
)

# By function: the variables with legal values, and by variable what is legal.
ENVIRONMENTS: dict[str, dict[str, tuple[str, Predicate]]] = {
    "launch_from_torch": {
        "RANK": ("0", one_of("0")),
        "WORLD_SIZE": ("1", digits(1)),
        "LOCAL_RANK": ("0", digits(0)),
        "MASTER_ADDR": ("127.0.0.1", one_of("127.0.0.1")),
        "MASTER_PORT": (str(PORT), digits(1, 65535)),
        "BOOSTER_RUN_TIMEOUT": ("60", digits(1, 10**9)),
    },
    "launch_from_torch under plain python": {
        "SLURM_STEP_NUM_TASKS": ("1", digits(0, 1)),
        "OMPI_COMM_WORLD_SIZE": ("1", digits(0, 1)),
    },
    "launch_from_slurm": {
        "SLURM_PROCID": ("0", one_of("0")),
        "SLURM_NPROCS": ("1", digits(1)),
        "SLURM_LOCALID": ("0", digits(0)),
    },
    "launch_from_openmpi": {
        "OMPI_COMM_WORLD_RANK": ("0", one_of("0")),
        "OMPI_COMM_WORLD_SIZE": ("1", digits(1)),
        "OMPI_COMM_WORLD_LOCAL_RANK": ("0", digits(0)),
    },
}
