"""Random programs on several ranks, in every placement, each step of them compared with the oracle's and among ranks."""

import copy
import gc
import math
import random
import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from one_device import DEFAULTS as ONE_DEVICE
from one_device import (
    OF_PATH,
    OPTIMIZERS,
    PASSES,
    PRECISIONS,
    ROUNDING,
    SCHEDULERS,
    Run,
    loss_of,
    make_optimizer,
    make_precision,
    make_scheduler,
)
from parts import checksum, local, place, positions
from pool import RanksFailed
from program import Disagreement, Invalid, Program
from torch import nn
from torch.nn import functional as F

from booster import Booster
from booster.plugin import HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin

# torch 2.13 renamed the collective and warns about the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

DIM, HEADS, LENGTH, VOCABULARY, BATCH = 8, 2, 4, 11, 8
PARTS = ["mlp", "attention", "conv"]
TP_PLANS = {
    "mlp": {"parts.*.up": "colwise", "parts.*.down": "rowwise"},
    "attention": {
        "parts.*.q": "colwise",
        "parts.*.k": "colwise",
        "parts.*.v": "colwise",
        "parts.*.out": "rowwise",
    },
    "conv": {},
}


def hybrid(tp_size, pp_size, **options):
    def make(setting):
        plan = {name: style for part in PARTS if part in setting["parts"] for name, style in TP_PLANS[part].items()}
        micro = {"num_microbatches": 2} if pp_size > 1 else {}
        return HybridParallelPlugin(
            tp_size=tp_size, pp_size=pp_size, tp_plan=plan or None, **{**micro, **options, **setting["plugin"]}
        )

    return make


def zero(stage):
    return lambda setting: LowLevelZeroPlugin(stage=stage, **setting["plugin"])


# Ranks, and what makes the plugin on each.
PLACEMENTS = {
    "DDP": (2, lambda setting: TorchDDPPlugin(**setting["plugin"])),
    "FSDP": (2, lambda setting: TorchFSDPPlugin(**setting["plugin"])),
    "ZeRO-1": (2, zero(1)),
    "ZeRO-2": (2, zero(2)),
    "TP": (2, hybrid(2, 1)),
    "DP": (2, hybrid(1, 1)),
    "PP": (2, hybrid(1, 2, pp_style="1f1b")),
    "PP interleaved": (2, hybrid(1, 2, pp_style="interleaved", num_model_chunks=2)),
    "DP x TP": (4, hybrid(2, 1)),
    "PP x DP": (4, hybrid(1, 2, pp_style="1f1b")),
    "PP x TP": (4, hybrid(2, 2, pp_style="1f1b")),
    "FSDP on 4": (4, lambda setting: TorchFSDPPlugin(**setting["plugin"])),
    "ZeRO-1 on 4": (4, zero(1)),
}

DEFAULTS = {**ONE_DEVICE, "parts": ["mlp"] * 2, "plugin": {}}
# After which weights are looked at: what the others spoil is seen at the next of these.
CHANGES = {
    "write",
    "drift",
    "spoil",
    "evaluate",
    "load_weights",
    "reload",
    "resume",
    "restore",
    "load",
    "deepcopy",
    "freeze",
    "add_group",
    "failing_forward",
}


class Part(nn.Module):
    """One of several kinds of layers, all of one class, as pipelines want their blocks."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        if kind == "conv":
            self.conv = nn.Conv2d(DIM, DIM, 3, padding=1)
            return
        self.norm = nn.LayerNorm(DIM)
        if kind == "mlp":
            self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        else:
            self.q, self.k, self.v = (nn.Linear(DIM, DIM, bias=False) for _ in range(3))
            self.out = nn.Linear(DIM, DIM)

    def forward(self, x):
        if self.kind == "conv":
            image = x.transpose(1, 2).unflatten(-1, (2, 2))
            return x + self.conv(image).flatten(2).transpose(1, 2)
        h = self.norm(x)
        if self.kind == "mlp":
            return x + self.down(F.gelu(self.up(h)))
        q, k, v = (f(h).view(*x.shape[:2], -1, DIM // HEADS).transpose(1, 2) for f in (self.q, self.k, self.v))
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Net(nn.Module):
    """Tokens to logits, by way of parts."""

    def __init__(self, parts, tied):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.position = nn.Parameter(torch.randn(LENGTH, DIM) * 0.1)
        self.parts = nn.ModuleList(Part(kind) for kind in parts)
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCABULARY)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens, fails=False):
        x = self.embedding(tokens) + self.position
        for part in self.parts:
            x = part(x)
        if fails:
            raise ArithmeticError("as planted")
        return self.head(self.norm(x))


def make_model(setting):
    torch.manual_seed(setting["seed"])
    model = Net(setting["parts"], setting["tied"])
    if setting["channels_last"]:
        model.to(memory_format=torch.channels_last)
    for number in setting["frozen"]:
        model.parts[number].requires_grad_(False)
    return model


def make_batch(seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
    return tokens, torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)


def least_parts(placement):
    """How many parts a model needs at least, one for each stage."""
    return {"PP interleaved": 4}.get(placement, 2 if placement.startswith("PP") else 1)


def is_whole(placement):
    """Whether a rank can call the model."""
    return not placement.startswith("PP")


def is_replicated(placement):
    """Whether every rank has all weights."""
    return placement.startswith(("DDP", "ZeRO"))


class RankRun(Run):
    make_model = staticmethod(make_model)
    defaults = DEFAULTS

    def __init__(self, program):
        self.placement = program.placement
        parts = program.setting.get("parts", DEFAULTS["parts"])
        if len(parts) < least_parts(self.placement) or ("TP" in self.placement and set(parts) == {"conv"}):
            raise Invalid
        self.kept, self.folder, self.idle = None, None, False
        super().__init__(program)
        # Elsewhere masters are the shards, which keep their gradients.
        self.oracle.forgets_zeros &= is_replicated(self.placement) or self.booster.plugin.data_parallel_size == 1

    def boost(self, model, groups):
        setting = self.setting
        if self.booster is None:
            self.booster = Booster(
                "cpu",
                make_precision(setting),
                PLACEMENTS[self.placement][1](setting),
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
        self.frozen = {name for name, param in params.items() if not param.requires_grad}
        self.model, self.optimizer, self.criterion, _, self.scheduler = self.booster.boost(
            model, optimizer, loss_of, lr_scheduler=scheduler
        )

    def run(self, operations):
        try:
            self._run([*operations, ("end",)])
        finally:
            if self.folder is not None and dist.get_rank() == 0:
                shutil.rmtree(self.folder)

    def end(self):
        self.compare()

    def waiting(self):
        """Whether there are gradients that are not zero."""
        return any(bool(grad.any()) for grad in self.oracle.grads.values())

    def _run(self, operations):
        for position, operation in enumerate(operations):
            name, *arguments = operation
            if name in PASSES or name == "no_sync":
                if (self.oracle.apex or self.overwrites()) and self.stepped and self.waiting():
                    raise Invalid
                self.stepped = self.idle = False
            failure = None
            try:
                getattr(self, name)(*arguments)
                if name in CHANGES:
                    self.compare()
            except Invalid:
                raise
            except Disagreement as error:
                failure = str(error)
            except Exception as error:
                failure = f"{type(error).__name__}: {error}"
            failed = torch.tensor(failure is not None, dtype=torch.int32)
            dist.all_reduce(failed)
            if failed:
                failures = [None] * dist.get_world_size()
                dist.all_gather_object(failures, failure)
                messages = [f"rank {rank}: {text}" for rank, text in enumerate(failures) if text]
                raise Disagreement(f"operation {position}, {operation}: {'; '.join(messages)}")
            late = self.setting["plugin"].get("overlap_allgather")  # to look would be to wait for weights
            if name == "step" and not late and (different := self.different_among_ranks()):
                raise Disagreement(f"operation {position}, {operation}: {different} differs among ranks")
            if self.diverged:
                return

    # ------------------------------------------------------------------ comparing

    def held(self):
        """What this rank holds of each parameter, flat."""
        return {name: local(param).reshape(-1) for name, param in self.params().items()}

    def compare(self):
        dtype = self.tol_dtype
        longest = max(self.oracle.path.values())
        params = self.params()
        own, wanted, allowed = [], [], []
        for name, param in params.items():
            name, part = self.name_of(name), local(param).reshape(-1)
            whole = self.oracle.params[name]
            if param.requires_grad != whole.requires_grad:
                raise Disagreement(f"{name}.requires_grad is {param.requires_grad}")
            if part.dtype == torch.float32 and whole.dtype != torch.float32:
                whole = self.oracle.masters[name]  # a float32 shard is the master
            limit = 1e-6 + OF_PATH[dtype] * (self.oracle.path[name] + 0.6 * longest)
            if self.oracle.half_weights:
                limit += self.oracle.roundings[name] * ROUNDING[dtype] * float(whole.detach().abs().max())
            own.append(part)
            wanted.append(whole.detach().reshape(-1)[positions(param)])
            allowed.append(limit)
        limits = torch.tensor(allowed).repeat_interleave(torch.tensor([part.numel() for part in own]))
        own_values, wanted_values = torch.cat(own).float(), torch.cat(wanted).float()
        alike = ((own_values - wanted_values).abs() <= limits) | (own_values == wanted_values)
        if not bool((alike | (own_values.isnan() & wanted_values.isnan())).all()):
            for name, a, b, limit in zip(params, own, wanted, allowed, strict=True):
                self.near(f"weight {name}", a, b, limit)
        if self.optimizer.loss_scale != self.oracle.scale:
            raise Disagreement(f"loss scale {self.optimizer.loss_scale}, wanted {self.oracle.scale}")
        rates = {group["lr"] for group in self.optimizer.param_groups}
        rates_wanted = {group["lr"] for group in self.oracle.optimizer.param_groups}
        if any(min(abs(a - b) for b in rates_wanted) > 1e-9 for a in rates):
            raise Disagreement(f"learning rates {rates}, wanted {rates_wanted}")

    def name_of(self, name):
        """The oracle's name of a parameter: the last stage of a pipeline has no other for a tied one than its own."""
        return "embedding.weight" if self.setting["tied"] and name == "head.weight" else name

    def different_among_ranks(self):
        """The first parameter of which ranks that hold the same part hold other bits, by its name; a collective."""
        sums = dict.fromkeys(self.oracle.params, (-1, -1))
        for name, param in self.params().items():
            sums[self.name_of(name)] = (place(param), checksum(local(param)))
        own = torch.tensor(list(sums.values()))
        each = torch.empty(dist.get_world_size() * len(own), 2, dtype=own.dtype)
        _all_gather(each, own)
        each = each.view(-1, *own.shape)
        differs = ((each[..., 0] == own[..., 0]) & (each[..., 1] != own[..., 1])).any(0)
        return next((name for name, different in zip(sums, differs.tolist(), strict=True) if different), None)

    def compare_state(self):
        """Of parts of states there is nothing to compare with."""

    # ------------------------------------------------------------------ operations

    def rows(self, seed):
        """This rank's share of a batch."""
        plugin = self.booster.plugin
        share = BATCH // plugin.data_parallel_size
        first = plugin.data_parallel_rank * share
        return tuple(part[first : first + share] for part in make_batch(seed))

    def wanted(self, seed, factor=1.0):
        tokens, targets = make_batch(seed)
        loss = loss_of(self.oracle.forward(tokens), targets)
        self.oracle.backward(loss, factor)
        return loss.detach()

    def compare_reduced(self, own, wanted):
        self.compare_loss(self.booster.reduce(own.detach()), wanted)

    def own_backward(self, seed):
        tokens, targets = self.rows(seed)
        if not is_whole(self.placement):
            result = self.booster.execute_pipeline(
                iter([(tokens, targets)]), self.model, self.criterion, self.optimizer
            )
            return result["loss"]
        loss = self.criterion(self.model(tokens), targets)
        self.booster.backward(loss, self.optimizer)
        return loss

    def backward(self, seed, bomb=None):
        """bomb: (rank, where, value): one rank's gradients get an inf or NaN."""
        wanted = self.wanted(seed)
        if bomb is not None:
            self.poison(*bomb)
            self.oracle.poison(float(bomb[2]))
        self.compare_reduced(self.own_backward(seed), wanted)

    def poison(self, rank, where, value):
        update = self.optimizer._update.gradients

        def after_backward(loss):
            del update.after_backward
            with update.shards.local():
                held = [param for group in self.optimizer.param_groups for param in group["params"]]
                grads = [param.grad for param in held if param.grad is not None and param.grad.numel()]
                counts = [None] * dist.get_world_size()
                dist.all_gather_object(counts, len(grads))
                # A rank of ZeRO may hold the gradient of nothing: then the next one that holds some.
                turns = [(rank + i) % len(counts) for i in range(len(counts))]
                if dist.get_rank() == next(turn for turn in turns if counts[turn]):
                    grad = grads[int(where * len(grads))]
                    grad[(0,) * grad.dim()] = float(value)
            update.after_backward(loss)

        update.after_backward = after_backward

    def backward_method(self, seed):
        if not is_whole(self.placement):
            raise Invalid
        self.wanted(seed)
        tokens, targets = self.rows(seed)
        self.optimizer.backward(self.criterion(self.model(tokens), targets))

    def execute_pipeline(self, seed):
        wanted = self.wanted(seed)
        rows = self.rows(seed)
        own = self.booster.execute_pipeline(iter([rows]), self.model, self.criterion, self.optimizer)
        self.compare_reduced(own["loss"], wanted)

    def nan_loss(self, seed, rank):
        """The loss of one data-parallel rank is NaN."""
        if not is_whole(self.placement):
            raise Invalid
        self.wanted(seed)
        self.oracle.poison(math.nan)
        tokens, targets = self.rows(seed)
        loss = self.criterion(self.model(tokens), targets)
        plugin = self.booster.plugin
        if plugin.data_parallel_rank == rank % plugin.data_parallel_size:
            loss = loss * math.nan
        self.booster.backward(loss, self.optimizer)
        if not math.isnan(reduced := float(self.booster.reduce(loss.detach()))):
            raise Disagreement(f"the loss is {reduced}, wanted NaN")

    def accumulate(self, seeds):
        if not is_whole(self.placement):
            raise Invalid
        for seed in seeds:
            self.wanted(seed, 1 / len(seeds))
        with self.booster.accumulate(self.model, self.optimizer, len(seeds)):
            for seed in seeds:
                self.own_backward(seed)

    def accumulate_tokens(self, seeds, last):
        """Losses that are summed over tokens; the last batch has `last` rows on each data-parallel rank."""
        if not is_whole(self.placement):
            raise Invalid
        ranks = self.booster.plugin.data_parallel_size
        share = BATCH // ranks
        counts = [share] * (len(seeds) - 1) + [min(last, share)]
        num_tokens = sum(counts) * ranks * LENGTH
        for seed, count in zip(seeds, counts, strict=True):
            tokens, targets = (part.view(ranks, share, LENGTH)[:, :count].flatten(0, 1) for part in make_batch(seed))
            loss = loss_of(self.oracle.forward(tokens), targets)
            self.oracle.backward(loss * (targets.numel() / num_tokens))
        with self.booster.accumulate(self.model, self.optimizer, len(seeds), num_tokens=num_tokens):
            for seed, count in zip(seeds, counts, strict=True):
                tokens, targets = (part[:count] for part in self.rows(seed))
                loss = self.criterion(self.model(tokens), targets)
                self.booster.backward(loss * targets.numel(), self.optimizer)

    def no_sync(self, seeds):
        if not is_whole(self.placement):
            raise Invalid
        for seed in seeds:
            self.wanted(seed)
        with self.booster.no_sync(self.model, self.optimizer):
            for seed in seeds[:-1]:
                self.own_backward(seed)
        self.own_backward(seeds[-1])

    def clip_norm(self, max_norm, norm_type=2.0):
        if not self.oracle.held():
            raise Invalid  # refused
        self.fresh()
        wanted = self.oracle.clip_norm(max_norm, norm_type)
        own = self.optimizer.clip_grad_by_norm(max_norm, norm_type)
        if math.isfinite(wanted):
            self.compare_number("norm", own, wanted)
            return
        # A bomb is on one rank alone, also where all have the whole gradient.
        seen = torch.tensor(not math.isfinite(own), dtype=torch.int32)
        dist.all_reduce(seen)
        if not seen:
            raise Disagreement(f"norm {float(own)}, wanted {wanted}")

    def unscale(self):
        self.fresh()
        self.optimizer.unscale_grads()

    def write(self, number, how):
        self.part(number)
        for name in self.oracle.params:
            if name.startswith(f"parts.{number}."):
                param = self.params().get(name)
                self.oracle.write(name, self.oracle.params[name].detach() * 0.875)
                if param is None:
                    continue
                with torch.no_grad():
                    if how == "data":
                        param.data.mul_(0.875)
                    else:
                        param.mul_(0.875)

    def drift(self, rank):
        """One rank's weights move by about a rounding; no program draws this, it shows that ranks are compared."""
        if dist.get_rank() == rank:
            self.params()["norm.bias"].data.add_(1e-7)

    def spoil(self, rank):
        """One rank's weight is wrong; no program draws this either."""
        if dist.get_rank() == rank:
            name = next(name for name in self.params() if name.startswith("parts."))
            local(self.params()[name]).add_(0.1)

    def evaluate(self, seed):
        for model in (self.oracle.model, self.model):
            model.eval()
        tokens, targets = make_batch(seed)
        with torch.no_grad():
            wanted = loss_of(self.oracle.forward(tokens), targets)
        tokens, targets = self.rows(seed)
        if is_whole(self.placement):
            with torch.no_grad():
                own = self.criterion(self.model(tokens), targets)
        else:
            own = self.booster.execute_pipeline(iter([(tokens, targets)]), self.model, self.criterion)["loss"]
        self.compare_reduced(own, wanted)
        for model in (self.oracle.model, self.model):
            model.train()

    def failing_forward(self, seed):
        if not is_whole(self.placement):
            raise Invalid
        try:
            self.model(self.rows(seed)[0], fails=True)
        except ArithmeticError:
            return
        raise Disagreement("the error of forward was lost")

    def idle_forward(self, seed):
        if not is_whole(self.placement):
            raise Invalid
        self.model(self.rows(seed)[0])
        self.idle = True

    def load_weights(self, seed):
        """Whole weights, as of a checkpoint of one process."""
        torch.manual_seed(seed)
        for name, param in self.oracle.params.items():
            self.oracle.write(name, param.detach() + torch.randn(param.shape) * 0.02)
        new = {name: value.detach().clone() for name, value in self.oracle.model.state_dict().items()}
        own = self.model.state_dict()
        self.model.load_state_dict({name: new[name] for name in own})

    def set_option(self, name, value):
        """A hyperparameter of every group that has it."""
        for optimizer in (self.oracle.optimizer, self.optimizer):
            for group in optimizer.param_groups:
                if name in group:
                    group[name] = value

    def freeze(self, number, trains):
        self.part(number)
        if is_replicated(self.placement):
            if trains and any(name.startswith(f"parts.{number}.") for name in self.frozen):
                raise Invalid  # refused: ranks would not share its gradients
            if not self.setting["plugin"].get("find_unused_parameters") and self.placement != "ZeRO-2":
                raise Invalid  # torch's reducer waits for it
            if self.idle and self.placement != "ZeRO-2":
                raise Invalid  # and since that pass also within no_sync, until it raises
        self.oracle.model.parts[number].requires_grad_(trains)
        for name, param in self.params().items():
            if name.startswith(f"parts.{number}."):
                param.requires_grad_(trains)

    def add_group(self, number):
        if number not in self.late:
            raise Invalid
        names = self.late.pop(number)
        params = self.params()
        own = [params[name] for name in names if name in params]
        self.model.zero_grad()  # what gathered there while no optimizer cleared it, at any scale
        self.oracle.zero_grad(whole_model=True)
        self.oracle.add_group(names, lr=self.oracle.optimizer.param_groups[0]["lr"])
        self.optimizer.add_param_group({"params": own, "lr": self.optimizer.param_groups[0]["lr"]})
        self.groups.append(names)

    def saved(self):
        return self.model.state_dict(), self.optimizer.state_dict()

    def anew(self):
        """Objects as a new job has them."""
        trains = {name: param.requires_grad for name, param in self.oracle.model.named_parameters()}
        fresh = self.make_model({**self.setting, "seed": self.setting["seed"] + 1})
        for name, param in fresh.named_parameters():
            param.requires_grad_(trains[name])
        self.booster = None
        self.boost(fresh, self.groups)

    def forget(self):
        """A new job has no gradients."""
        self.oracle.zero_grad(whole_model=True)
        self.oracle.overflowed = False
        self.applied_since = False

    def resume(self, model_first):
        model, optimizer = self.saved()
        model = {name: value.detach().clone() for name, value in model.items()}
        schedule = self.scheduler.state_dict() if self.scheduler is not None else None
        self.anew()
        for load in (1, 0) if model_first else (0, 1):
            if load:
                self.model.load_state_dict(model)
            else:
                self.optimizer.load_state_dict(optimizer)
        if schedule is not None:
            self.scheduler.load_state_dict(schedule)
        self.forget()

    def keep(self):
        """The states as they are now, to be loaded later."""
        if self.waiting() and not self.stepped:
            raise Invalid
        self.kept = (copy.deepcopy(self.saved()), self.oracle.snapshot(), len(self.groups))

    def restore(self, what):
        """What was kept, into the objects that there are: of the model, of the optimizer, or of both."""
        if self.kept is None or self.kept[2] != len(self.groups) or self.waiting():
            raise Invalid
        (model, optimizer), snapshot, _ = copy.deepcopy(self.kept)
        frozen = any(not self.oracle.params[name].requires_grad for name in snapshot["trained"])
        if what == "optimizer" and self.oracle.half_weights and frozen:
            raise Invalid  # a master that there was when its weight was frozen is loaded, and the weight follows it
        if "model" in what:
            self.model.load_state_dict(model)
        if "optimizer" in what:
            self.optimizer.load_state_dict(optimizer)
        # Where masters are the sharded weights, the optimizer's state has none.
        masters = bool(optimizer["booster"].get("masters", {}).get("weights"))
        self.oracle.restore(snapshot, model="model" in what, optimizer="optimizer" in what, masters=masters)
        self.oracle.overflowed = False

    def save(self):
        """A checkpoint in files."""
        if self.waiting() and not self.stepped:
            raise Invalid  # refused
        if self.folder is None:
            folder = [tempfile.mkdtemp(prefix="booster-fuzz-", dir=SHARED)] if dist.get_rank() == 0 else [None]
            dist.broadcast_object_list(folder)
            self.folder = Path(folder[0])
        self.booster.save(self.folder, self.model, self.optimizer, lr_scheduler=self.scheduler, keep_last=1)
        schedule = copy.deepcopy(self.schedule.state_dict()) if self.schedule is not None else None
        self.in_files = (self.oracle.snapshot(), len(self.groups), schedule)

    def load(self, fresh):
        """The checkpoint, into new objects or those that there are."""
        if self.folder is None or self.in_files[1] != len(self.groups) or (self.waiting() and not fresh):
            raise Invalid
        if fresh:
            self.anew()
        self.booster.load(self.folder, self.model, self.optimizer, lr_scheduler=self.scheduler)
        snapshot, _, schedule = self.in_files
        self.oracle.restore(snapshot, model=True, optimizer=True)
        if self.schedule is not None:
            self.schedule.load_state_dict(schedule)
        if fresh:
            self.forget()
        self.oracle.overflowed = self.applied_since = False


# Files that last as long as a program.
SHARED = "/dev/shm" if Path("/dev/shm").is_dir() else None


def run_on_rank(rank, world_size, program):
    """Return what goes wrong in `program`, or None, on one rank."""
    if not gc.get_freeze_count():
        gc.freeze()  # modules that stay need not be looked through for garbage
    try:
        RankRun(program).run(program.operations)
    except Invalid:
        return "invalid"
    except Disagreement as error:
        return str(error)
    return None


class OnRanks:
    """Runs programs on pools of ranks, one pool at a time."""

    def __init__(self, run):
        self._run = run  # (function, world size, argument) -> results

    def __call__(self, program):
        try:
            results = self._run(run_on_rank, PLACEMENTS[program.placement][0], program)
        except RanksFailed as error:
            last = [f"rank {rank}: {text.strip().splitlines()[-1]}" for rank, text in error.tracebacks.items()]
            raise Disagreement(f"Error: {'; '.join(last)}") from error
        if "invalid" in results:
            raise Invalid
        messages = next((result for result in results if result), None)
        if messages:
            raise Disagreement(messages)


# ---------------------------------------------------------------------- drawing programs


def draw(placement, seed):
    rng = random.Random(f"{placement} {seed}")
    precision = rng.choice(PRECISIONS)
    naive = precision in ("fp16_naive", "bf16_naive")
    num_parts = max(least_parts(placement), rng.choice([1, 2, 2, 3]))
    parts = [rng.choice(PARTS) for _ in range(num_parts)]
    if "TP" in placement and set(parts) == {"conv"}:
        parts[0] = rng.choice(PARTS[:2])
    late = [n for n in range(num_parts) if rng.random() < 0.1]
    optimizers = [name for name in OPTIMIZERS if name != "Adafactor" or is_replicated(placement)]
    setting = {
        "seed": rng.randrange(1000),
        "precision": precision,
        "scale": 2.0 ** rng.randint(4, 9),
        "parts": parts,
        "tied": rng.random() < 0.15,
        "frozen": [n for n in range(num_parts) if rng.random() < 0.1],
        "late": late,
        "channels_last": rng.random() < 0.2,
        "plugin": plugin_options(rng, placement),
        "optimizer": rng.choice(optimizers),
        "implementation": rng.choice([{}, {}, {"foreach": True}, {"foreach": False}]),
        "fused_optimizer": rng.random() < 0.8,
        "skip_nonfinite": rng.random() < 0.4,
        "clip_grad_norm": rng.choice([0.0, 0.0, 0.0, 0.5]),
        "masters": {"master_weights": rng.choice(["auto", "fp32", "split"])} if naive else {},
        "growth_interval": rng.choice([2, 3, 2000]) if not precision.startswith("fp16_apex") else 2000,
        "hysteresis": rng.choice([1, 1, 2]) if precision in ("fp16", "fp16_naive") else 1,
        # The others number the groups that they began with.
        "scheduler": rng.random() < 0.4 and (rng.choice([True, "exponential"]) if late else rng.choice([*SCHEDULERS])),
        "num_groups": rng.choice([1, 1, 2, 3]),
    }
    if setting["optimizer"] == "Adafactor" and naive:
        setting["masters"] = {"master_weights": rng.choice(["auto", "fp32"])}
    listed = operations(rng, setting, placement)
    if placement.startswith("ZeRO"):  # drawn last, so that a seed keeps what it drew before there were these
        setting["plugin"]["overlap_allgather"] = rng.random() < 0.4
        if placement != "ZeRO-2":
            setting["plugin"]["reduce_scatter"] = rng.random() < 0.5
    return Program(placement, setting, listed)


def plugin_options(rng, placement):
    if is_replicated(placement):
        options = {"bucket_cap_mb": rng.choice([25, 0.001])}
        if placement != "ZeRO-2":
            options["find_unused_parameters"] = rng.random() < 0.5
            options["gradient_as_bucket_view"] = rng.random() < 0.3
        return options
    if placement.startswith("FSDP"):
        return {"reshard_after_forward": rng.random() < 0.7}
    options = {"zero_stage": rng.choice([0, 1, 2])} if "DP" in placement else {}
    if placement.startswith("PP"):
        options["num_microbatches"] = rng.choice([2, 4])
        if placement != "PP interleaved":
            options["pp_style"] = rng.choice(["1f1b", "gpipe"])
    return options


def operations(rng, setting, placement):
    apex = setting["precision"].startswith("fp16_apex")
    bombs = setting["precision"].startswith("fp16") or setting["skip_nonfinite"]
    parts = range(len(setting["parts"]))
    late = list(setting["late"])
    waits = setting["plugin"].get("find_unused_parameters") is False  # torch's reducer, for what is frozen
    listed = []

    def seed():
        return rng.randrange(1000)

    def maybe(chance, *operation):
        if rng.random() < chance:
            listed.append(operation)

    for _ in range(rng.randint(2, 4)):
        between = [
            ("evaluate", seed()),
            ("write", rng.choice(parts), rng.choice(["no_grad", "data"])),
            ("load_weights", seed()),
            ("reload",),
            ("resume", rng.random() < 0.5),
            ("set_lr", rng.choice([0.5, 2.0])),
            ("set_option", *rng.choice([("weight_decay", 0.3), ("weight_decay", 0.0), ("betas", (0.8, 0.95))])),
            ("zero_grad", rng.random() < 0.5),
        ]
        if not waits:
            number = rng.choice(parts)
            refused = is_replicated(placement) and number in setting["frozen"]  # to be unfrozen
            between += [("freeze", number, rng.random() < 0.5 and not refused)]
        passes = [("backward", seed()), ("execute_pipeline", seed())]
        if is_whole(placement):
            between += [("failing_forward", seed()), ("idle_forward", seed())]
            passes += [
                ("accumulate", [seed() for _ in range(rng.randint(1, 3))]),
                ("accumulate_tokens", [seed() for _ in range(rng.randint(1, 3))], rng.randint(1, 2)),
                ("no_sync", [seed() for _ in range(rng.randint(1, 3))]),
                ("backward_method", seed()),
            ]
        kept = [operation[0] for operation in listed]
        if "keep" in kept:
            maybe(0.4, "restore", rng.choice(["model", "optimizer", "model and optimizer"]))
        if "save" in kept:
            maybe(0.5, "load", rng.random() < 0.5)
        for _ in range(rng.choice([0, 0, 1, 2])):
            listed.append(rng.choice(between))
        if late and rng.random() < 0.4:
            listed.append(("add_group", late.pop()))
        for _ in range(rng.choice([1, 1, 2])):
            listed.append(rng.choice(passes))
            if not apex:
                maybe(0.15, "clip_norm", rng.choice([0.1, 0.5]), rng.choice([2.0, 2.0, 1.0, float("inf")]))
                maybe(0.1, "unscale")
        bomb = bombs and rng.random() < 0.2
        if bomb and is_whole(placement) and rng.random() < 0.3:
            listed.append(("nan_loss", seed(), rng.randrange(4)))
        elif bomb:
            listed.append(("backward", seed(), (rng.randrange(4), rng.random(), rng.choice(["inf", "nan"]))))
        maybe(0.2, "clip_value", rng.choice([0.05, 0.2]))
        maybe(0.3, "clip_norm", rng.choice([0.1, 0.5, 2.0]))
        if not apex and not bomb:
            maybe(0.1, "unscale")
        listed.append(("step",))
        if apex or bomb or rng.random() < 0.9:
            listed.append(("zero_grad", rng.random() < 0.8))
            maybe(0.15, "keep")
            maybe(0.08, "save")
        if setting["scheduler"]:
            maybe(0.8, "schedule_step")
    return listed
