"""The closed-form model and data of the recordings in `tests/data/apex_amp.json`, and the loops that were recorded."""

import hashlib
import json
import logging
import math
from pathlib import Path

import torch
from torch import nn

from booster import Booster
from booster.mixed_precision import FP16ApexMixedPrecision
from booster.mixed_precision import apex_amp as amp

RECORDING = json.loads((Path(__file__).parents[1] / "data" / "apex_amp.json").read_text())


def det(shape, k, scale=1.0):
    count = math.prod(shape)
    values = torch.sin(torch.arange(count, dtype=torch.float64) * (12.9898 + 0.37 * k) + 0.618 * k) * scale
    return values.float().reshape(shape)


class Net(nn.Module):
    out = scaled = None  # dtypes that a run saw

    def __init__(self, k=0):
        super().__init__()
        self.fc1 = nn.Linear(8, 16)
        self.bn = nn.BatchNorm1d(16)
        self.fc2 = nn.Linear(16, 4)
        params = (self.fc1.weight, self.fc1.bias, self.fc2.weight, self.fc2.bias)
        with torch.no_grad():
            for index, param in enumerate(params):
                param.copy_(det(tuple(param.shape), 10 * k + index, 0.35))

    def forward(self, x):
        return self.fc2(torch.relu(self.bn(self.fc1(x))))


def batch(step, k=0):
    return det((32, 8), 1000 + 17 * step + k), det((32, 4), 5000 + 31 * step + k)


def make_optimizer(name, params):
    if name == "sgd":
        return torch.optim.SGD(params, lr=0.05, momentum=0.9, foreach=False)
    return torch.optim.Adam(params, lr=0.01, foreach=False, fused=False)


def strategy_of(config, **options):
    """The strategy that `config`, keywords of apex's initialize among other entries, asks for."""
    names = (
        "opt_level cast_model_type patch_torch_functions keep_batchnorm_fp32 master_weights loss_scale "
        "cast_model_outputs num_losses min_loss_scale max_loss_scale"
    )
    chosen = {name: config[name] for name in names.split() if config.get(name) is not None}
    for name in ("cast_model_type", "cast_model_outputs"):
        if isinstance(chosen.get(name), str):
            chosen[name] = getattr(torch, chosen[name].removeprefix("torch."))
    if config.get("window"):
        chosen["scale_window"] = config["window"]
    return FP16ApexMixedPrecision(**chosen, **options)


class Injection:
    """Puts a value into one element of the gradient of a parameter in the next backward pass, as it arrives."""

    def __init__(self, param, index):
        self.armed = None
        self._index = index
        param.register_post_accumulate_grad_hook(self._spoil)

    def _spoil(self, param):
        if self.armed is not None:
            param.grad.view(-1)[self._index] = self.armed
            self.armed = None


def masters_of(optimizer):
    return list(amp.master_params(optimizer))


def sha(tensors):
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().float().numpy().tobytes())
    return digest.hexdigest()[:16]


class Messages(logging.Handler):
    """What apex itself would print: what the loggers of `booster.mixed_precision.apex` say at INFO, but for the engine."""

    def __init__(self):
        super().__init__(logging.INFO)
        self.records = []

    def emit(self, record):
        self.records.append(record)

    def __enter__(self):
        self._logger = logging.getLogger("booster.mixed_precision.apex")
        self._level = self._logger.level
        self._logger.setLevel(logging.INFO)
        self._logger.addHandler(self)
        return self

    def __exit__(self, *error):
        self._logger.removeHandler(self)
        self._logger.setLevel(self._level)

    def take(self):
        records, self.records = self.records, []
        return [
            record.getMessage()
            for record in records
            if record.levelno == logging.INFO and not record.name.endswith(".real")
        ]


class ThroughBooster:
    """A single-model run as a user of `Booster` writes it."""

    def __init__(self, config):
        self._booster = Booster("cpu", strategy_of(config), max_consecutive_skips=None, half_products="native")
        self._accum = config["accum"]
        self._together = config["delay_unscale"]
        self.scales = self._booster.precision.scales

    def start(self, plain, optimizer):
        self._model, self._optimizer, *_ = self._booster.boost(plain, optimizer)
        return self._model, self._optimizer

    def passes(self, losses):
        """Run a backward pass for each of `losses`, which are computed one by one, not yet divided."""
        if self._together:
            with self._booster.accumulate(self._model, self._optimizer, self._accum):
                for loss in losses:
                    self._booster.backward(loss, self._optimizer)
        else:
            for loss in losses:
                self._booster.backward(loss / self._accum, self._optimizer)


class ThroughAmp:
    """The same as a script for apex has it."""

    def __init__(self, config):
        self._config = config
        self._accum = config["accum"]

    def start(self, plain, optimizer):
        names = (
            "opt_level cast_model_type patch_torch_functions keep_batchnorm_fp32 master_weights loss_scale "
            "cast_model_outputs min_loss_scale max_loss_scale"
        )
        chosen = {name: self._config[name] for name in names.split() if self._config.get(name) is not None}
        for name in ("cast_model_type", "cast_model_outputs"):
            if isinstance(chosen.get(name), str):
                chosen[name] = getattr(torch, chosen[name].removeprefix("torch."))
        model, self._optimizer = amp.initialize(plain, optimizer, verbosity=1, half_products="native", **chosen)
        self.scales = amp._session.precision.scales
        if self._config.get("window"):
            self.scales[0]._window = self._config["window"]  # as the recording did: initialize has no such argument
        return model, self._optimizer

    def passes(self, losses):
        for index, loss in enumerate(losses):
            delay = self._config["delay_unscale"] and index < self._accum - 1
            with amp.scale_loss(loss / self._accum, self._optimizer, delay_unscale=delay) as scaled:
                Net.scaled = scaled.dtype
                scaled.backward()


def run_single(config, through=ThroughBooster):
    """One recorded single-model run: what it gives has the keys of the recording."""
    Net.out = Net.scaled = None
    with Messages() as messages:
        run = through(config)
        plain = Net()
        model, optimizer = run.start(plain, make_optimizer(config["opt"], plain.parameters()))
        got = {"init_log": "\n".join(messages.take()).split("\n")}
        injection = Injection(plain.fc1.weight, 3)
        series = ("loss", "scale", "unskipped", "skipped", "master_sum", "master_norm", "grad_norm")
        got |= {name: [] for name in series} | {"messages": []}
        accum = config["accum"]
        for step in range(config["steps"]):
            optimizer.zero_grad()
            values = []

            def losses(step=step, values=values):
                for a in range(accum):
                    x, y = batch(step * accum + a)
                    out = model(x)
                    Net.out = out.dtype
                    loss = nn.functional.mse_loss(out.float(), y)
                    values.append(loss.item())
                    injection.armed = float(config["overflow_kind"]) if step in config["inf_at"] and a == 0 else None
                    yield loss

            run.passes(losses())
            if step == 0:
                got["dtypes"] = dtypes_of(model, plain, optimizer)
            norm = torch.stack([p.grad.detach().double().norm() for p in masters_of(optimizer)]).norm().item()
            result = optimizer.step()
            got["messages"] += [f"step {step}: {text}" for text in messages.take()]
            masters = [p.detach().double() for p in masters_of(optimizer)]
            row = {
                "loss": values[-1],
                "scale": run.scales[0].scale,
                "unskipped": run.scales[0].unskipped,
                "skipped": not result.applied,
                "master_sum": sum(m.sum().item() for m in masters),
                "master_norm": torch.stack([m.norm() for m in masters]).norm().item(),
                "grad_norm": norm,
            }
            for name in series:
                got[name].append(row[name])
    got["final_master"] = [x for m in masters_of(optimizer) for x in m.detach().float().flatten().tolist()]
    got["final_model_sha"] = sha(plain.parameters())
    got["final_master_sha"] = sha(masters_of(optimizer))
    got["amp_state_dict"] = run.scales.amp_state_dict()
    got["bn_running_mean_sum"] = plain.bn.running_mean.double().sum().item()
    got["bn_running_var_sum"] = plain.bn.running_var.double().sum().item()
    states = {f"{k}:{v.dtype}" for s in optimizer.state.values() for k, v in s.items() if isinstance(v, torch.Tensor)}
    got["opt_state_dtypes"] = sorted(states)
    return got


class TwoThroughBooster:
    """A run of two models as a user of `Booster` writes it."""

    def __init__(self, config, nets, made):
        self._booster = Booster("cpu", strategy_of(config), max_consecutive_skips=None, half_products="native")
        self.scales = self._booster.precision.scales
        if len(made) == 2:
            pairs = [self._booster.boost(net, optimizer)[:2] for net, optimizer in zip(nets, made, strict=True)]
            self.models, self.optimizers = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        else:
            second = self._booster.boost(nets[1])[0]
            first, optimizer, *_ = self._booster.boost(nets[0], made[0])
            self.models, self.optimizers = [first, second], [optimizer]

    def backward(self, loss, optimizer, loss_id):
        self._booster.backward(loss, optimizer, loss_id=loss_id)


class TwoThroughAmp:
    """The same as a script for apex has it."""

    def __init__(self, config, nets, made):
        options = {"opt_level": config["opt_level"], "num_losses": config["num_losses"]}
        self.models, self.optimizers = amp.initialize(nets, made, half_products="native", **options)
        self.scales = amp._session.precision.scales

    def backward(self, loss, optimizer, loss_id):
        with amp.scale_loss(loss, optimizer, loss_id=loss_id) as scaled:
            scaled.backward()


def run_multi(config, through=TwoThroughBooster):
    """One recorded run of two models and two losses."""
    count, separate = config["num_losses"], config["separate_opts"]
    got = {"loss": [], "scales": [], "unskipped": [], "skipped": [], "sums": [], "messages": []}
    with Messages() as messages:
        plain = [Net(0), Net(1)]
        if separate:
            made = [make_optimizer("sgd", plain[0].parameters()), make_optimizer("adam", plain[1].parameters())]
        else:
            made = [make_optimizer("sgd", [p for net in plain for p in net.parameters()])]
        run = through(config, plain, made)
        models, optimizers = run.models, run.optimizers
        messages.take()
        injection = Injection(plain[config["inf_loss"]].fc1.weight, 0)
        for step in range(config["steps"]):
            for optimizer in optimizers:
                optimizer.zero_grad()
            losses = []
            for i, model in enumerate(models):
                x, y = batch(step, i)
                loss = nn.functional.mse_loss(model(x).float(), y)
                injection.armed = math.inf if step in config["inf_at"] and i == config["inf_loss"] else None
                run.backward(loss, optimizers[i % len(optimizers)], i % count)
                losses.append(loss.item())
            got["skipped"].append([not optimizer.step().applied for optimizer in optimizers])
            got["messages"] += [f"step {step}: {text}" for text in messages.take()]
            got["loss"].append(losses)
            scales = [run.scales[i] for i in range(count)]
            got["scales"].append([scale.scale for scale in scales])
            got["unskipped"].append([scale.unskipped for scale in scales])
            got["sums"].append([sum(m.detach().double().sum().item() for m in masters_of(o)) for o in optimizers])
    return got | {"amp_state_dict": run.scales.amp_state_dict()}


def dtypes_of(model, plain, optimizer):
    params = dict(plain.named_parameters())
    masters = masters_of(optimizer)
    return {
        "out": str(Net.out),
        **({} if Net.scaled is None else {"scaled": str(Net.scaled)}),
        "model": {name: str(param.dtype) for name, param in params.items()},
        "model_grad": {name: str(param.grad.dtype) for name, param in params.items()},
        "buffers": {name: str(buffer.dtype) for name, buffer in plain.named_buffers()},
        "master": [str(master.dtype) for master in masters],
        "master_is_model": [master is param for master, param in zip(masters, params.values(), strict=True)],
        "state_dict": {name: str(value.dtype) for name, value in model.state_dict().items()},
    }
