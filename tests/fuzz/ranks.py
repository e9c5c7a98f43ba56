"""Random programs on several ranks, in every placement, each step of them compared with the oracle's and among ranks."""

import random
import zlib

import torch
import torch.distributed as dist
from matrix import BATCH, DIM, LENGTH, TP_PLAN, VOCABULARY, Block, loss_of
from one_device import DEFAULTS as ONE_DEVICE
from one_device import OF_PATH, OPTIMIZERS, PASSES, PRECISIONS, ROUNDING, Run, make_optimizer, make_precision
from parts import local, positions
from pool import RanksFailed
from program import Disagreement, Invalid, Program
from torch import nn

from booster import Booster
from booster.plugin import HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin


def hybrid(tp_size, pp_size, **options):
    if pp_size > 1:
        options = {"num_microbatches": 2, **options}
    plan = {name.replace("blocks", "parts"): style for name, style in TP_PLAN.items()}
    return lambda: HybridParallelPlugin(tp_size=tp_size, pp_size=pp_size, tp_plan=plan, **options)


# Ranks, and what makes the plugin on each.
PLACEMENTS = {
    "DDP": (2, TorchDDPPlugin),
    "FSDP": (2, TorchFSDPPlugin),
    "ZeRO-1": (2, lambda: LowLevelZeroPlugin(stage=1)),
    "ZeRO-2": (2, lambda: LowLevelZeroPlugin(stage=2)),
    "TP": (2, hybrid(2, 1)),
    "DP": (2, hybrid(1, 1)),
    "PP": (2, hybrid(1, 2, pp_style="1f1b")),
    "PP interleaved": (2, hybrid(1, 2, pp_style="interleaved", num_model_chunks=2)),
    "DP x TP": (4, hybrid(2, 1)),
    "PP x DP": (4, hybrid(1, 2, pp_style="1f1b")),
    "PP x TP": (4, hybrid(2, 2, pp_style="1f1b")),
    "FSDP on 4": (4, TorchFSDPPlugin),
    "ZeRO-1 on 4": (4, lambda: LowLevelZeroPlugin(stage=1)),
}

DEFAULTS = {**ONE_DEVICE, "parts": ["block"] * 2}


class Net(nn.Module):
    """Tokens to logits, by way of blocks."""

    def __init__(self, num_blocks, tied):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.position = nn.Parameter(torch.randn(LENGTH, DIM) * 0.1)
        self.parts = nn.ModuleList(Block(DIM) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCABULARY)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens, fails=False):
        x = self.embedding(tokens) + self.position
        for block in self.parts:
            x = block(x)
        if fails:
            raise ArithmeticError("as told")
        return self.head(self.norm(x))


def make_model(setting):
    torch.manual_seed(setting["seed"])
    model = Net(len(setting["parts"]), setting["tied"])
    for number in setting["frozen"]:
        model.parts[number].requires_grad_(False)
    return model


def make_batch(seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
    return tokens, torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)


def least_parts(placement):
    """How many blocks a model needs at least, one for each stage."""
    return {"PP interleaved": 4}.get(placement, 2 if placement.startswith("PP") else 1)


def is_whole(placement):
    """Whether a rank can call the model."""
    return not placement.startswith("PP")


class RankRun(Run):
    make_model = staticmethod(make_model)
    defaults = DEFAULTS

    def __init__(self, program):
        self.placement = program.placement
        if len(program.setting.get("parts", DEFAULTS["parts"])) < least_parts(self.placement):
            raise Invalid
        super().__init__(program)

    def boost(self, model, groups):
        setting = self.setting
        if self.booster is None:
            self.booster = Booster(
                "cpu",
                make_precision(setting),
                PLACEMENTS[self.placement][1](),
                fused_optimizer=setting["fused_optimizer"],
                skip_nonfinite=setting["skip_nonfinite"],
                clip_grad_norm=setting["clip_grad_norm"],
                max_consecutive_skips=None,
            )
        params = dict(model.named_parameters())
        optimizer = make_optimizer(
            setting, [{"params": [params[name] for name in names]} for names in groups], **setting["implementation"]
        )
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) if setting["scheduler"] else None
        self.model, self.optimizer, self.criterion, _, self.scheduler = self.booster.boost(
            model, optimizer, loss_of, lr_scheduler=scheduler
        )

    def run(self, operations):
        for position, operation in enumerate(operations):
            name, *arguments = operation
            if name in PASSES or name == "no_sync":
                if self.oracle.apex and self.stepped and self.oracle.grads:
                    raise Invalid
                self.stepped = False
            failure = None
            try:
                getattr(self, name)(*arguments)
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
                told = [f"rank {rank}: {text}" for rank, text in enumerate(failures) if text]
                raise Disagreement(f"operation {position}, {operation}: {'; '.join(told)}")
            if self.diverged:
                return

    # ------------------------------------------------------------------ comparing

    def held(self):
        """What this rank holds of each parameter, flat."""
        return {name: local(param).reshape(-1) for name, param in self.params().items()}

    def compare(self):
        dtype = self.tol_dtype
        longest = max(self.oracle.path.values())
        own, wanted, allowed = [], [], []
        for (name, param), part in zip(self.params().items(), self.held().items(), strict=True):
            name, part = self.name_of(name), part[1]
            whole = self.oracle.params[name]
            if param.requires_grad != whole.requires_grad:
                raise Disagreement(f"{name}.requires_grad is {param.requires_grad}")
            if part.dtype == torch.float32 and whole.dtype != torch.float32:
                whole = self.oracle.masters[name]  # a float32 shard is the master
            limit = 1e-6 + OF_PATH[dtype] * (self.oracle.path[name] + 0.6 * longest)
            if self.oracle.half_weights:
                limit += 2.01 * ROUNDING[dtype] * float(whole.detach().abs().max())
            own.append(part.float())
            wanted.append(whole.detach().reshape(-1)[positions(param)].float())
            allowed.append(limit)
        limits = torch.tensor(allowed).repeat_interleave(torch.tensor([part.numel() for part in own]))
        own_values, wanted_values = torch.cat(own), torch.cat(wanted)
        alike = ((own_values - wanted_values).abs() <= limits) | (own_values == wanted_values)
        if not bool((alike | (own_values.isnan() & wanted_values.isnan())).all()):
            for name, a, b, limit in zip(self.params(), own, wanted, allowed, strict=True):
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

    def compare_ranks(self):
        """Ranks that hold the same part of a parameter hold the same bits."""
        sums = dict.fromkeys(self.oracle.params, (-1, -1))
        for (name, param), part in zip(self.params().items(), self.held().values(), strict=True):
            sums[self.name_of(name)] = (checksum(positions(param)), checksum(part))
        own = torch.tensor(list(sums.values()))
        each = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(each, own)
        for name, mine, *others in zip(sums, own, *each, strict=True):
            for other in others:
                if mine[0] == other[0] and mine[1] != other[1]:
                    raise Disagreement(f"{name} differs among ranks")

    def compare_state(self):
        self.compare_ranks()

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
        """bomb: (rank, where) of an inf that one rank's gradients get."""
        wanted = self.wanted(seed)
        if bomb is not None:
            self.poison(*bomb)
            self.oracle.poison()
        self.compare_reduced(self.own_backward(seed), wanted)

    def poison(self, rank, where):
        update = self.optimizer._update

        def after_backward(loss):
            del update.after_backward
            if dist.get_rank() == rank % dist.get_world_size():
                with update.shards.local():
                    held = [param for group in self.optimizer.param_groups for param in group["params"]]
                    grads = [param.grad for param in held if param.grad is not None and param.grad.numel()]
                    grads[int(where * len(grads))].view(-1)[0] = float("inf")
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

    def accumulate(self, seeds):
        if not is_whole(self.placement):
            raise Invalid
        for seed in seeds:
            self.wanted(seed, 1 / len(seeds))
        with self.booster.accumulate(self.model, self.optimizer, len(seeds)):
            for seed in seeds:
                self.own_backward(seed)

    def no_sync(self, seeds):
        if not is_whole(self.placement):
            raise Invalid
        for seed in seeds:
            self.wanted(seed)
        with self.booster.no_sync(self.model, self.optimizer):
            for seed in seeds[:-1]:
                self.own_backward(seed)
        self.own_backward(seeds[-1])

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

    def load_weights(self, seed):
        """Whole weights, as of a checkpoint of one process."""
        torch.manual_seed(seed)
        for name, param in self.oracle.params.items():
            self.oracle.write(name, param.detach() + torch.randn(param.shape) * 0.02)
        new = {name: value.detach().clone() for name, value in self.oracle.model.state_dict().items()}
        own = self.model.state_dict()
        self.model.load_state_dict({name: new[name] for name in own})

    def saved(self):
        return self.model.state_dict(), self.optimizer.state_dict()

    def resume(self, model_first):
        model, optimizer = self.saved()
        model = {name: value.detach().clone() for name, value in model.items()}
        schedule = self.scheduler.state_dict() if self.scheduler is not None else None
        fresh = self.make_model({**self.setting, "seed": self.setting["seed"] + 1})
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


def checksum(values):
    return zlib.crc32(values.contiguous().view(torch.uint8).numpy())


def run_on_rank(rank, world_size, program):
    """Return what goes wrong in `program`, or None, on one rank."""
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
        told = next((result for result in results if result), None)
        if told:
            raise Disagreement(told)


# ---------------------------------------------------------------------- drawing programs


def draw(placement, seed):
    rng = random.Random(f"{placement} {seed}")
    precision = rng.choice(PRECISIONS)
    num_blocks = max(least_parts(placement), rng.choice([2, 2, 3]))
    setting = {
        "seed": rng.randrange(1000),
        "precision": precision,
        "scale": 2.0 ** rng.randint(4, 9),
        "parts": ["block"] * num_blocks,
        "tied": rng.random() < 0.15,
        "frozen": [n for n in range(num_blocks) if rng.random() < 0.1],
        "optimizer": rng.choice([name for name in OPTIMIZERS if name != "Adafactor"]),
        "implementation": rng.choice([{}, {}, {"foreach": True}, {"foreach": False}]),
        "fused_optimizer": rng.random() < 0.8,
        "skip_nonfinite": rng.random() < 0.4,
        "clip_grad_norm": rng.choice([0.0, 0.0, 0.0, 0.5]),
        "growth_interval": rng.choice([2, 3, 2000]) if not precision.startswith("fp16_apex") else 2000,
        "hysteresis": rng.choice([1, 1, 2]) if precision in ("fp16", "fp16_naive") else 1,
        "scheduler": rng.random() < 0.3,
        "num_groups": rng.choice([1, 1, 2, 3]),
    }
    return Program(placement, setting, operations(rng, setting, placement))


def operations(rng, setting, placement):
    apex = setting["precision"].startswith("fp16_apex")
    bombs = setting["precision"].startswith("fp16") or setting["skip_nonfinite"]
    listed = []

    def seed():
        return rng.randrange(1000)

    def maybe(chance, *operation):
        if rng.random() < chance:
            listed.append(operation)

    for _ in range(rng.randint(2, 5)):
        between = [
            ("evaluate", seed()),
            ("write", rng.randrange(len(setting["parts"])), rng.choice(["no_grad", "data"])),
            ("load_weights", seed()),
            ("reload",),
            ("resume", rng.random() < 0.5),
            ("set_lr", rng.choice([0.5, 2.0])),
            ("zero_grad", rng.random() < 0.5),
        ]
        passes = [("backward", seed()), ("execute_pipeline", seed())]
        if is_whole(placement):
            between += [("failing_forward", seed()), ("idle_forward", seed())]
            passes += [
                ("accumulate", [seed() for _ in range(rng.randint(1, 3))]),
                ("no_sync", [seed() for _ in range(rng.randint(1, 3))]),
                ("backward_method", seed()),
            ]
        for _ in range(rng.choice([0, 0, 1, 2])):
            listed.append(rng.choice(between))
        for _ in range(rng.choice([1, 1, 2])):
            listed.append(rng.choice(passes))
            if not apex:
                maybe(0.15, "clip_norm", rng.choice([0.1, 0.5]), rng.choice([2.0, 2.0, 1.0, float("inf")]))
                maybe(0.1, "unscale")
        bomb = bombs and rng.random() < 0.2
        if bomb:
            listed.append(("backward", seed(), (rng.randrange(4), rng.random())))
        maybe(0.2, "clip_value", rng.choice([0.05, 0.2]))
        maybe(0.3, "clip_norm", rng.choice([0.1, 0.5, 2.0]))
        if not apex and not bomb:
            maybe(0.1, "unscale")
        listed.append(("step",))
        if apex or bomb or rng.random() < 0.9:
            listed.append(("zero_grad", rng.random() < 0.8))
        if setting["scheduler"]:
            maybe(0.8, "schedule_step")
    return listed
