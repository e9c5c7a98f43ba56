"""Random programs on one device, each step of them compared with the oracle's."""

import copy
import io
import random

import torch
from oracle import HALF, Oracle
from program import Disagreement, Invalid, Program
from torch import nn
from torch.nn import functional as F

from booster import Booster
from booster.mixed_precision import (
    BF16NaiveMixedPrecision,
    FP16ApexMixedPrecision,
    FP16NaiveMixedPrecision,
    FP16TorchMixedPrecision,
)

DIM, LENGTH, VOCABULARY, BATCH = 8, 4, 11, 4
PRECISIONS = ["fp32", "fp16", "bf16", "fp16_naive", "bf16_naive", "fp16_apex O1", "fp16_apex O2"]

OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "SGD nesterov": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "SGD dampening": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.5, "dampening": 0.3}),
    "Adam": (torch.optim.Adam, {"lr": 0.01, "eps": 1e-2}),
    "Adam amsgrad": (torch.optim.Adam, {"lr": 0.01, "eps": 1e-2, "amsgrad": True, "weight_decay": 0.1}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "eps": 1e-2, "weight_decay": 0.1}),
    "AdamW maximize": (torch.optim.AdamW, {"lr": 0.01, "eps": 1e-2, "maximize": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.02, "eps": 1e-2, "lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.005, "eps": 1e-2, "momentum": 0.9}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 0.5, "eps": 1e-2}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.01, "eps": 1e-2}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01, "eps": 1e-2}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.05, "eps": 1e-2}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.05}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.02, "eps": (1e-2, 1e-1)}),
}
SCHEDULERS = {
    True: lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
    "exponential": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8),
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4),
    "lambda": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "warm-up": lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, 0.25, total_iters=3),
}
SPARSE = ["SGD", "Adagrad"]  # what torch steps on sparse gradients
PARTS = ["linear", "norm", "attention", "conv", "batch norm", "group norm", "strided", "scalar", "unused", "empty"]

PASSES = ["backward", "backward_method", "backward_twice", "backward_penalty", "accumulate", "execute_pipeline"]

# What one rounding of a format is worth, relative; and how far gradients of a format may be off, of the path walked.
ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
OF_PATH = {None: 2e-4, torch.float16: 0.04, torch.bfloat16: 0.2}

DEFAULTS = {
    "parts": ["linear"],
    "sparse": False,
    "functional": False,
    "tied": False,
    "frozen": [],
    "late": [],
    "channels_last": False,
    "optimizer": "SGD",
    "implementation": {},
    "fused_optimizer": True,
    "skip_nonfinite": False,
    "clip_grad_norm": 0.0,
    "masters": {},
    "growth_interval": 2000,
    "hysteresis": 1,
    "scheduler": False,
    "num_groups": 1,
    "cache_enabled": True,
}


class Bomb(torch.autograd.Function):
    """Multiplies the gradient that passes by a factor, which may be inf."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class OnImages(nn.Module):
    """A layer of images, between sequences."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        image = x.transpose(1, 2).unflatten(-1, (2, 2))
        if isinstance(self.layer, nn.BatchNorm2d):
            return self.layer(image.to(self.layer.weight.dtype)).to(x.dtype).flatten(2).transpose(1, 2)
        return self.layer(image).flatten(2).transpose(1, 2)


class Strided(nn.Module):
    """A weight that is a view of a larger tensor."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter((torch.randn(DIM, DIM + 3) * 0.3)[:, :DIM])

    def forward(self, x):
        return F.linear(x, self.weight)


class Scalar(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return x * self.factor


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x):
        return torch.zeros_like(x)


class Empty(nn.Module):
    def __init__(self):
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, DIM))

    def forward(self, x):
        return x * (1 + self.nothing.sum())


LAYERS = {
    "linear": lambda: nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM)),
    "norm": lambda: nn.LayerNorm(DIM),
    "attention": Attention,
    "conv": lambda: OnImages(nn.Conv2d(DIM, DIM, 3, padding=1)),
    "batch norm": lambda: OnImages(nn.BatchNorm2d(DIM)),
    "group norm": lambda: OnImages(nn.GroupNorm(2, DIM)),
    "strided": Strided,
    "scalar": Scalar,
    "unused": Unused,
    "empty": Empty,
}


class Net(nn.Module):
    """Tokens to logits, by way of any layers."""

    def __init__(self, setting):
        super().__init__()
        self.functional, self.tied = setting["functional"], setting["tied"]
        self.sparse = setting["sparse"]
        self.embedding = nn.Embedding(VOCABULARY, DIM, sparse=setting["sparse"])
        self.parts = nn.ModuleList(LAYERS[part]() for part in setting["parts"])
        self.head = nn.Linear(DIM, VOCABULARY)
        if self.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens, bomb=None, fails=False):
        if self.functional:
            x = F.embedding(tokens, self.embedding.weight, sparse=self.sparse)
        else:
            x = self.embedding(tokens)
        for number, part in enumerate(self.parts):
            x = x + part(x)
            if bomb is not None and bomb[0] == number:
                x = Bomb.apply(x, bomb[1])
        if fails:
            raise ArithmeticError("as planted")
        return self.head(x)


def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_model(setting):
    torch.manual_seed(setting["seed"])
    model = Net(setting)
    if setting["channels_last"]:
        model.to(memory_format=torch.channels_last)
    for number in setting["frozen"]:
        model.parts[number].requires_grad_(False)
    return model


def make_batch(seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
    return tokens, torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)


def make_optimizer(setting, groups, **implementation):
    kind, options = OPTIMIZERS[setting["optimizer"]]
    return kind(groups, **options, **implementation)


def make_scheduler(setting, optimizer):
    kind = setting["scheduler"]
    return SCHEDULERS[kind](optimizer) if kind else None


def early_and_late(setting, model):
    """Names of parameters: in the groups of the optimizer, and in none yet, by part."""
    late = {number: [] for number in setting["late"]}
    early = []
    for name, _ in model.named_parameters():
        number = int(name.split(".")[1]) if name.startswith("parts.") else None
        late.get(number, early).append(name)
    count = min(setting["num_groups"], len(early))
    return [early[index::count] for index in range(count)], late


def make_precision(setting):
    name, scale = setting["precision"], setting["scale"]
    growth, hysteresis = setting["growth_interval"], setting["hysteresis"]
    if name == "fp16":
        return FP16TorchMixedPrecision(
            init_scale=scale, growth_interval=growth, hysteresis=hysteresis, cache_enabled=setting["cache_enabled"]
        )
    if name == "fp16_naive":
        return FP16NaiveMixedPrecision(
            initial_scale=scale, growth_interval=growth, hysteresis=hysteresis, **setting["masters"]
        )
    if name == "bf16_naive":
        return BF16NaiveMixedPrecision(**setting["masters"])
    if name.startswith("fp16_apex"):
        return FP16ApexMixedPrecision(name.split()[1], max_loss_scale=scale, verbosity=0)
    return name


class Run:
    """One program under way: the boosted objects, and the oracle."""

    make_model = staticmethod(make_model)
    defaults = DEFAULTS

    def __init__(self, program):
        self.setting = setting = {**self.defaults, **program.setting}
        self.tol_dtype = HALF.get(setting["precision"])
        if any(number >= len(setting["parts"]) for number in (*setting["frozen"], *setting["late"])):
            raise Invalid
        model = self.make_model(setting)
        self.groups, self.late = early_and_late(setting, model)
        self.oracle = Oracle(
            self.make_model(setting),
            lambda groups: make_optimizer(setting, groups, foreach=False),
            self.groups,
            precision=setting["precision"],
            scale=setting["scale"],
            growth_interval=setting["growth_interval"],
            hysteresis=setting["hysteresis"],
            skip_nonfinite=setting["skip_nonfinite"],
            is_kept=lambda name: (
                name.startswith("parts.") and setting["parts"][int(name.split(".")[1])] == "batch norm"
            ),
        )
        self.schedule = make_scheduler(setting, self.oracle.optimizer)
        self.applied_since = False
        self.booster = None
        self.boost(model, self.groups)
        self.stepped = False  # since the last backward
        self.diverged = False

    def boost(self, model, groups):
        setting = self.setting
        if self.booster is None:
            self.booster = Booster(
                "cpu",
                make_precision(setting),
                fused_optimizer=setting["fused_optimizer"],
                skip_nonfinite=setting["skip_nonfinite"],
                clip_grad_norm=setting["clip_grad_norm"],
                max_consecutive_skips=None,
            )
        params = dict(model.named_parameters())
        optimizer = make_optimizer(
            setting, [{"params": [params[name] for name in names]} for names in groups], **setting["implementation"]
        )
        scheduler = make_scheduler(setting, optimizer)
        self.model, self.optimizer, self.criterion, _, self.scheduler = self.booster.boost(
            model, optimizer, loss_of, lr_scheduler=scheduler
        )

    def run(self, operations):
        for position, operation in enumerate(operations):
            name, *arguments = operation
            if name in PASSES:
                # apex: an overflow of an earlier pass counts.
                if (self.oracle.apex or self.overwrites()) and self.stepped and self.oracle.grads:
                    raise Invalid
                self.stepped = False
            try:
                getattr(self, name)(*arguments)
                self.compare()
                if self.diverged:
                    return
            except Disagreement as error:
                raise Disagreement(f"operation {position}, {operation}: {error}") from None

    # ------------------------------------------------------------------ comparing

    def params(self):
        return dict(self.model.named_parameters())

    def held(self):
        """What this process holds of each parameter."""
        return self.params()

    def compare(self):
        dtype = self.tol_dtype
        longest = max(self.oracle.path.values())
        for name, param in self.params().items():
            wanted, own = self.oracle.params[name], param
            if own.dtype != wanted.dtype:
                raise Disagreement(f"{name} is {own.dtype}, wanted {wanted.dtype}")
            if own.requires_grad != wanted.requires_grad:
                raise Disagreement(f"{name}.requires_grad is {own.requires_grad}")
            if not own.numel():
                continue
            allowed = 1e-6 + OF_PATH[dtype] * (self.oracle.path[name] + 0.6 * longest)
            if wanted.dtype != torch.float32:
                allowed += 2.01 * ROUNDING[dtype] * float(wanted.abs().max())
            self.near(f"weight {name}", own, wanted, allowed)
        if self.optimizer.loss_scale != self.oracle.scale:
            raise Disagreement(f"loss scale {self.optimizer.loss_scale}, wanted {self.oracle.scale}")
        rates = [group["lr"] for group in self.optimizer.param_groups]
        wanted = [group["lr"] for group in self.oracle.optimizer.param_groups]
        if any(abs(a - b) > 1e-9 for a, b in zip(rates, wanted, strict=True)):
            raise Disagreement(f"learning rates {rates}, wanted {wanted}")
        for name, buffer in self.model.named_buffers():
            wanted = dict(self.oracle.model.named_buffers())[name]
            if buffer.is_floating_point():
                size = float(wanted.abs().max())
                self.near(f"buffer {name}", buffer, wanted, 1e-6 + (1 + size) * (OF_PATH[dtype] * 0.5))

    def near(self, what, own, wanted, allowed):
        own, wanted = own.detach().float(), wanted.detach().float()
        if own.shape != wanted.shape:
            raise Disagreement(f"{what} has shape {tuple(own.shape)}, wanted {tuple(wanted.shape)}")
        off = (own - wanted).abs()
        off = float(torch.where(own.isnan() & wanted.isnan() | (own == wanted), 0.0, off).max()) if own.numel() else 0.0
        if not off <= allowed:
            raise Disagreement(f"{what} is {off:.3g} off, allowed {allowed:.3g}")

    def compare_loss(self, own, wanted):
        self.diverged = self.diverged or not float(wanted) < 8.0  # where rounding grows without bounds
        if not self.diverged:
            self.compare_number("loss", own, wanted)

    def compare_number(self, what, own, wanted, relative=1.0):
        own, wanted = float(own), float(wanted)
        if own == wanted or (own != own and wanted != wanted):
            return
        rel = {None: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.08}[self.tol_dtype]
        if not abs(own - wanted) <= relative * rel * (abs(wanted) + 0.05):
            raise Disagreement(f"{what} {own}, wanted {wanted}")

    def fresh(self):
        """Under a loss scale, gradients that a step has used cannot be used again; nor where the step wrote to them."""
        if (self.oracle.scales or self.overwrites()) and self.oracle.grads and self.stepped:
            raise Invalid

    def overwrites(self):
        """Whether a step may leave other gradients: torch's foreach form of SGD adds Nesterov's momentum to them."""
        return any(group.get("nesterov") and group.get("foreach") for group in self.optimizer.param_groups)

    def part(self, number):
        if number >= len(self.setting["parts"]):
            raise Invalid

    # ------------------------------------------------------------------ operations

    def backward(self, seed, bomb=None):
        tokens, targets = make_batch(seed)
        wanted = loss_of(self.oracle.forward(tokens, bomb=bomb), targets)
        self.oracle.backward(wanted)
        own = self.criterion(self.model(tokens, bomb=bomb), targets)
        self.booster.backward(own, self.optimizer)
        self.compare_loss(own.detach(), wanted.detach())

    def backward_method(self, seed):
        tokens, targets = make_batch(seed)
        self.oracle.backward(loss_of(self.oracle.forward(tokens), targets))
        self.optimizer.backward(self.criterion(self.model(tokens), targets))

    def backward_twice(self, seed):
        """Two losses of one graph."""
        tokens, targets = make_batch(seed)
        wanted = loss_of(self.oracle.forward(tokens), targets)
        self.oracle.backward(wanted * 1.5)
        own = self.criterion(self.model(tokens), targets)
        self.booster.backward(own, self.optimizer, retain_graph=True)
        self.booster.backward(own * 0.5, self.optimizer)

    def backward_penalty(self, seed):
        """A loss with a penalty on the gradient of the loss."""
        tokens, targets = make_batch(seed)

        def penalised(loss, weight):
            (grad,) = torch.autograd.grad(loss, weight, create_graph=True)
            return loss + grad.float().square().sum()

        wanted = loss_of(self.oracle.forward(tokens), targets)
        self.oracle.backward(penalised(wanted, self.oracle.model.head.bias))
        own = self.criterion(self.model(tokens), targets)
        self.booster.backward(penalised(own, self.model.head.bias), self.optimizer)

    def accumulate(self, seeds, bomb=None):
        for number, seed in enumerate(seeds):
            tokens, targets = make_batch(seed)
            logits = self.oracle.forward(tokens, bomb=bomb if number == 0 else None)
            self.oracle.backward(loss_of(logits, targets), 1 / len(seeds))
        with self.booster.accumulate(self.model, self.optimizer, len(seeds)):
            for number, seed in enumerate(seeds):
                tokens, targets = make_batch(seed)
                logits = self.model(tokens, bomb=bomb if number == 0 else None)
                self.booster.backward(self.criterion(logits, targets), self.optimizer)

    def execute_pipeline(self, seed):
        tokens, targets = make_batch(seed)
        wanted = loss_of(self.oracle.forward(tokens), targets)
        self.oracle.backward(wanted)
        own = self.booster.execute_pipeline(iter([(tokens, targets)]), self.model, self.criterion, self.optimizer)
        self.compare_loss(own["loss"], wanted.detach())

    def has_gradients(self):
        if not self.oracle.held():
            raise Invalid  # a clip is refused

    def clip_norm(self, max_norm, norm_type=2.0):
        self.has_gradients()
        self.fresh()
        wanted = self.oracle.clip_norm(max_norm, norm_type)
        self.compare_number("norm", self.optimizer.clip_grad_by_norm(max_norm, norm_type), wanted)

    def clip_value(self, value):
        self.has_gradients()
        self.fresh()
        self.oracle.clip_value(value)
        self.optimizer.clip_grad_by_value(value)

    def unscale(self):
        self.fresh()
        self.optimizer.unscale_grads()
        held = {name: grad for name, grad in self.oracle.held().items() if not grad.is_sparse and grad.numel()}
        if self.oracle.apex or not all(bool(grad.isfinite().all()) for grad in held.values()):
            return
        largest = max((float(grad.abs().max()) for grad in held.values()), default=0.0)
        for name, wanted in held.items():
            own = self.params()[name].grad
            if own is None:
                raise Disagreement(f"{name} has no gradient after unscale_grads")
            self.near(f"gradient of {name}", own, wanted, 1e-7 + OF_PATH[self.tol_dtype] * (largest + 0.02))

    def double_grads(self):
        """As users do who edit gradients by hand."""
        self.fresh()
        self.optimizer.unscale_grads()
        self.oracle.multiply_grads(2.0)
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.mul_(2.0)

    def step(self):
        self.fresh()
        self.stepped = True
        before = {name: param.detach().clone() for name, param in self.held().items()}
        if self.setting["clip_grad_norm"]:
            self.oracle.clip_norm(self.setting["clip_grad_norm"])
        wanted = self.oracle.step()
        result = self.optimizer.step()
        if result.applied != wanted:
            raise Disagreement(f"applied is {result.applied}, wanted {wanted}")
        if not wanted:
            for name, param in self.held().items():
                if not torch.equal(param, before[name]):
                    raise Disagreement(f"{name} changed in a skipped step")
        self.applied_since = self.applied_since or wanted
        self.compare()
        self.compare_state()

    def step_closure(self, seed):
        """An optimizer that asks for the loss by itself."""
        if self.oracle.scales or self.setting["skip_nonfinite"]:
            raise Invalid  # refused
        tokens, targets = make_batch(seed)
        self.zero_grad()
        wanted = loss_of(self.oracle.forward(tokens), targets)
        self.oracle.backward(wanted)
        if self.setting["clip_grad_norm"]:
            self.oracle.clip_norm(self.setting["clip_grad_norm"])
        self.oracle.step()

        def closure():
            self.optimizer.zero_grad()
            loss = self.criterion(self.model(tokens), targets)
            self.booster.backward(loss, self.optimizer)
            return loss

        result = self.optimizer.step(closure)
        self.compare_loss(result.loss.detach(), wanted.detach())
        if not result.applied:
            raise Disagreement("a step with a closure was not applied")
        self.applied_since = self.stepped = True

    def compare_state(self):
        own, wanted = self.optimizer.state, self.oracle.optimizer.state
        for name, param in self.params().items():
            master = self.oracle.masters[name]
            entries = own.get(param, {}) if param in own else {}
            if master not in wanted or not entries:
                continue
            for key, value in wanted[master].items():
                if isinstance(value, torch.Tensor) and value.shape == master.shape and value.numel() and value.dim():
                    if not isinstance(entries.get(key), torch.Tensor):
                        raise Disagreement(f"state {key} of {name} is missing")
                    size = float(value.abs().max())
                    allowed = 1e-6 + OF_PATH[self.tol_dtype] * (3 * size + 0.02)
                    self.near(f"state {key} of {name}", entries[key], value, allowed)

    def zero_grad(self, set_to_none=True):
        self.oracle.zero_grad(set_to_none)
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def schedule_step(self):
        if self.scheduler is None:
            raise Invalid
        if self.applied_since:
            self.schedule.step()
        self.applied_since = False
        self.scheduler.step()

    def set_lr(self, factor):
        for optimizer in (self.oracle.optimizer, self.optimizer):
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * factor

    def freeze(self, number, trains):
        self.part(number)
        self.oracle.model.parts[number].requires_grad_(trains)
        self.model.parts[number].requires_grad_(trains)

    def add_group(self, number):
        if number not in self.late:
            raise Invalid
        names = self.late.pop(number)
        params = self.params()
        for name in names:  # what gathered there while no optimizer cleared it, at any scale
            params[name].grad = None
            self.oracle.grads.pop(name, None)
        self.oracle.add_group(names, lr=self.oracle.optimizer.param_groups[0]["lr"])
        self.optimizer.add_param_group(
            {"params": [params[name] for name in names], "lr": self.optimizer.param_groups[0]["lr"]}
        )
        self.groups.append(names)

    def evaluate(self, seed):
        tokens, _ = make_batch(seed)
        for model in (self.oracle.model, self.model):
            model.eval()
        with torch.no_grad():
            wanted, own = self.oracle.forward(tokens), self.model(tokens)
        for model in (self.oracle.model, self.model):
            model.train()
        size = float(wanted.abs().max())
        rel = {None: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.15}[self.tol_dtype]
        self.near("output", own, wanted, rel * (size + 0.1))

    def failing_forward(self, seed):
        tokens, _ = make_batch(seed)
        for forward in (self.oracle.forward, self.model):
            try:
                forward(tokens, fails=True)
            except ArithmeticError:
                continue
            raise Disagreement("the error of forward was lost")

    def idle_forward(self, seed):
        """Without a backward."""
        tokens, _ = make_batch(seed)
        self.oracle.forward(tokens)
        self.model(tokens)

    def write(self, number, how):
        """Weight decay by hand, clamping, EMA: the user writes to a part's weights."""
        self.part(number)
        for name, param in self.params().items():
            if not name.startswith(f"parts.{number}."):
                continue
            new = self.oracle.params[name].detach() * 0.875
            self.oracle.write(name, new)
            with torch.no_grad():
                if how == "data":
                    param.data.mul_(0.875)
                elif how == "set data":
                    param.data = param.data * 0.875
                else:
                    param.mul_(0.875)

    def load_weights(self, seed):
        torch.manual_seed(seed)
        new = {name: value.clone() for name, value in self.model.state_dict().items()}
        for name in new:
            if new[name].is_floating_point() and name in self.oracle.params:
                noise = (torch.randn(new[name].shape) * 0.05).to(self.oracle.params[name].dtype)
                new[name] = (self.oracle.params[name].detach() + noise).to(new[name].dtype)
        if self.setting["tied"]:
            new["head.weight"] = new["embedding.weight"]
        for name in self.oracle.params:
            self.oracle.write(name, new[name])
        self.model.load_state_dict(new)

    def memory_format(self, name):
        self.model.to(memory_format=getattr(torch, name))

    def reload(self):
        """The state that the objects have already."""
        model, optimizer = self.saved()
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)

    def resume(self, model_first):
        """New objects, as after a restart of the job."""
        model, optimizer = self.saved()
        schedule = self.scheduler.state_dict() if self.scheduler is not None else None
        trains = {name: param.requires_grad for name, param in self.params().items()}
        fresh = self.make_model({**self.setting, "seed": self.setting["seed"] + 1})
        for name, param in fresh.named_parameters():
            param.requires_grad_(trains[name])
        self.booster = None
        self.boost(fresh, self.groups)
        for load in (1, 0) if model_first else (0, 1):
            if load:
                self.model.load_state_dict(model)
            else:
                self.optimizer.load_state_dict(optimizer)
        if schedule is not None:
            self.scheduler.load_state_dict(schedule)
        self.oracle.zero_grad(whole_model=True)
        self.oracle.overflowed = False
        self.applied_since = False

    def saved(self):
        file = io.BytesIO()
        torch.save((self.model.state_dict(), self.optimizer.state_dict()), file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    def deepcopy(self):
        self.model, self.optimizer, self.scheduler = copy.deepcopy((self.model, self.optimizer, self.scheduler))
        self.oracle.zero_grad(whole_model=True)  # torch copies no gradients of parameters

    def autocast_cache(self):
        torch.clear_autocast_cache()


def run(program):
    """Raise what goes wrong in `program`."""
    Run(program).run(program.operations)


# ---------------------------------------------------------------------- drawing programs


def draw(seed):
    """The program of a seed."""
    rng = random.Random(f"one device {seed}")
    precision = rng.choice(PRECISIONS)
    parts = [rng.choice(PARTS[:-2]) for _ in range(rng.randint(1, 4))] + [p for p in PARTS[-2:] if rng.random() < 0.1]
    sparse = precision in ("fp32", "bf16", "fp16") and rng.random() < 0.15
    naive = precision in ("fp16_naive", "bf16_naive")
    setting = {
        "seed": rng.randrange(1000),
        "precision": precision,
        "scale": 2.0 ** rng.randint(4, 9),
        "parts": parts,
        "sparse": sparse,
        "functional": rng.random() < 0.3,
        "tied": not sparse and rng.random() < 0.2,
        "frozen": [n for n in range(len(parts)) if rng.random() < 0.15],
        "late": [n for n in range(len(parts)) if rng.random() < 0.1 and parts[n] not in ("unused",)],
        "channels_last": rng.random() < 0.2,
        "optimizer": rng.choice(SPARSE) if sparse else rng.choice(list(OPTIMIZERS)),
        "implementation": rng.choice([{}, {}, {}, {"foreach": True}, {"foreach": False}]),
        "fused_optimizer": rng.random() < 0.8,
        "skip_nonfinite": rng.random() < 0.4,
        "clip_grad_norm": rng.choice([0.0, 0.0, 0.0, 0.5]) if not sparse else 0.0,
        "masters": {"master_weights": rng.choice(["auto", "fp32", "split"])} if naive else {},
        "growth_interval": rng.choice([2, 3, 2000]) if not precision.startswith("fp16_apex") else 2000,
        "hysteresis": rng.choice([1, 1, 2]) if precision in ("fp16", "fp16_naive") else 1,
        "scheduler": rng.random() < 0.3,
        "num_groups": rng.choice([1, 1, 2, 3]),
        "cache_enabled": rng.random() < 0.8,
    }
    if sparse:
        setting["implementation"] = {}
    if setting["optimizer"] == "Adafactor":
        if naive:
            setting["masters"] = {"master_weights": rng.choice(["auto", "fp32"])}
        if "empty" in parts:  # torch's divides by the number of elements
            setting["optimizer"] = "AdamW"
    return Program("one device", setting, operations(rng, setting))


def operations(rng, setting):
    """Steps of a loop, with other things between them."""
    apex, sparse = setting["precision"].startswith("fp16_apex"), setting["sparse"]
    bombs = setting["precision"].startswith("fp16") or setting["skip_nonfinite"]
    parts = range(len(setting["parts"]))
    late = list(setting["late"])
    listed = []

    def seed():
        return rng.randrange(1000)

    def bomb():
        return (rng.choice(parts), rng.choice([float("inf"), float("nan")])) if bombs and rng.random() < 0.2 else None

    def maybe(chance, *operation):
        if rng.random() < chance:
            listed.append(operation)

    def copied():
        names = [operation[0] for operation in listed if operation[0] in ("deepcopy", "resume")]
        return bool(names) and names[-1] == "deepcopy"

    for _ in range(rng.randint(3, 8)):
        between = [
            ("evaluate", seed()),
            ("failing_forward", seed()),
            ("idle_forward", seed()),
            ("write", rng.choice(parts), rng.choice(["no_grad", "data", "set data"])),
            ("load_weights", seed()),
            ("memory_format", rng.choice(["channels_last", "contiguous_format"])),
            ("reload",),
            ("resume", rng.random() < 0.5),
            ("deepcopy",),
            ("set_lr", rng.choice([0.5, 2.0])),
            ("freeze", rng.choice(parts), rng.random() < 0.5),
            ("zero_grad", rng.random() < 0.5),
        ]
        for _ in range(rng.choice([0, 0, 1, 2])):
            listed.append(rng.choice(between))
        if late and rng.random() < 0.4:
            listed.append(("add_group", late.pop()))
        for _ in range(rng.choice([1, 1, 1, 2])):
            listed.append(
                rng.choice(
                    [
                        ("backward", seed(), bomb()),
                        ("backward", seed(), bomb()),
                        ("accumulate", [seed() for _ in range(rng.randint(1, 3))], bomb())
                        if not copied()
                        else ("backward", seed(), bomb()),
                        ("backward_method", seed()),
                        ("backward_twice", seed()),
                        ("backward_penalty", seed()),
                        # A Booster does not know a copy of what it boosted.
                        ("execute_pipeline", seed()) if not copied() else ("backward", seed()),
                    ]
                )
            )
            if not sparse and not apex:
                maybe(0.15, "clip_norm", rng.choice([0.1, 0.5, 2.0]), rng.choice([2.0, 2.0, 1.0, float("inf")]))
                maybe(0.1, "unscale")
        if not sparse:
            if apex:
                maybe(0.3, "clip_norm", rng.choice([0.1, 0.5, 2.0]))
            else:
                maybe(0.2, "clip_value", rng.choice([0.05, 0.2]))
                maybe(0.2, "clip_norm", rng.choice([0.1, 0.5]))
                maybe(0.1, "clip_value", 0.1)
                maybe(0.08, "double_grads")
                maybe(0.1, "unscale")
        listed.append(("step",))
        if not setting["precision"].startswith("fp16") and not setting["skip_nonfinite"]:
            maybe(0.1, "step_closure", seed())
        maybe(0.15 if not apex else 0.0, "evaluate", seed())
        if apex or rng.random() < 0.9:
            listed.append(("zero_grad", rng.random() < 0.8))
        if setting["scheduler"]:
            maybe(0.8, "schedule_step")
    return listed
