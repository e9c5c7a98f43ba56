"""Mixed-precision training by hand, in plain torch: what random programs are compared with.

Gradients are kept unscaled in float32 apart from the model, masters of half weights are float32 parameters, the optimizer steps
tensor by tensor. Nothing of booster is in it.
"""

import copy
import math
from contextlib import nullcontext

import torch

HALF = {
    "fp16": torch.float16,
    "fp16_apex O1": torch.float16,
    "fp16_apex O2": torch.float16,
    "fp16_naive": torch.float16,
    "bf16": torch.bfloat16,
    "bf16_naive": torch.bfloat16,
}
HALF_WEIGHTS = ("fp16_naive", "bf16_naive", "fp16_apex O2")


class Oracle:
    """One process. model: float32; its half weights, if the precision has them, are made here.

    make_optimizer: from groups of parameters to a torch optimizer. groups: names of the parameters in each of its groups.
    scale: of the loss, if the precision has one; growth_interval, hysteresis: as those of `DynamicScale`.
    """

    def __init__(
        self,
        model,
        make_optimizer,
        groups,
        *,
        precision,
        scale=1.0,
        growth_interval=2000,
        hysteresis=1,
        skip_nonfinite=False,
        is_kept=lambda name: False,
    ):
        self.model, self.precision = model, precision
        self.params = dict(model.named_parameters())
        self.half_weights = precision in HALF_WEIGHTS
        self.masters = dict(self.params)
        if self.half_weights:
            for name, param in self.params.items():
                if is_kept(name):
                    continue
                self.masters[name] = torch.nn.Parameter(param.detach().clone())
                param.data = param.data.to(HALF[precision])
            for name, buffer in model.named_buffers():
                if buffer.is_floating_point() and not is_kept(name):
                    buffer.data = buffer.data.to(HALF[precision])
        self.optimizer = make_optimizer([{"params": [self.masters[name] for name in names]} for names in groups])
        self.groups = [list(names) for names in groups]
        self.scales = precision.startswith("fp16")
        self.apex = precision.startswith("fp16_apex")
        self.scale = scale if self.scales else 1.0
        self.growth_interval, self.hysteresis = growth_interval, hysteresis
        self.growth = self.overflows = 0
        self.skip_nonfinite = skip_nonfinite
        # As apex: a master that no pass has reached since zero_grad has no gradient, where others have one of zeros.
        self.forgets_zeros = precision == "fp16_apex O2"
        self.grads = {}  # unscaled, float32
        self.overflowed = False  # apex: an earlier pass did
        self.checks = False
        self.path = dict.fromkeys(self.params, 0.0)  # how far each parameter has moved, at most
        self.roundings = dict.fromkeys(self.params, 2.01)  # of each half weight, which a float32 shard does not make

    # ------------------------------------------------------------------ one pass

    def forward(self, *inputs, **options):
        if self.half_weights:
            dtype = HALF[self.precision]
            inputs = [x.to(dtype) if x.is_floating_point() else x for x in inputs]
            return self.model(*inputs, **options).float()
        half = HALF.get(self.precision)
        with torch.autocast("cpu", half) if half else nullcontext():
            output = self.model(*inputs, **options)
        return output.float()

    def backward(self, loss, factor=1.0):
        held = {name: param.grad for name, param in self.params.items()}
        for param in self.params.values():
            param.grad = None
        (loss * (self.scale * factor)).backward()
        finite = True
        for name, param in self.params.items():
            grad, param.grad = param.grad, held[name]
            if grad is None:
                continue
            grad = (grad.coalesce() if grad.is_sparse else grad).float() / self.scale
            if any(name in names for names in self.groups):
                finite = finite and bool(values_of(grad).isfinite().all())
            before = self.grads.get(name)
            self.grads[name] = grad if before is None else before + grad
        if self.apex and not finite:
            self.overflowed = True
            self.scale /= 2

    # ------------------------------------------------------------------ gradients

    def held(self):
        """The gradients of the optimizer's parameters, by name."""
        return {name: self.grads[name] for names in self.groups for name in names if self.grads.get(name) is not None}

    def norm(self, norm_type=2.0):
        grads = [values_of(grad).double() for grad in self.held().values()]
        each = [float(torch.linalg.vector_norm(g, norm_type)) for g in grads if g.numel()]
        if not each:
            return 0.0
        return float(torch.linalg.vector_norm(torch.tensor(each, dtype=torch.float64), norm_type))

    def clip_norm(self, max_norm, norm_type=2.0):
        norm = self.norm(norm_type)
        self.checks = True
        if math.isfinite(norm) and (factor := max_norm / (norm + 1e-6)) < 1:
            for name, grad in self.held().items():
                self.grads[name] = grad * factor
        return norm

    def clip_value(self, value):
        self.checks = True
        for name, grad in self.held().items():
            if bool(grad.isfinite().all()):
                self.grads[name] = grad.clamp(-value, value)

    def multiply_grads(self, factor):
        for name, grad in self.held().items():
            self.grads[name] = grad * factor

    def zero_grad(self, set_to_none=True, whole_model=False):
        names = list(self.grads) if whole_model else [name for names in self.groups for name in names]
        for name in names:
            if set_to_none or (self.forgets_zeros and self.masters[name] is not self.params[name]):
                self.grads.pop(name, None)
            elif name in self.grads:
                self.grads[name] = torch.zeros_like(self.params[name], dtype=torch.float32)
        self.checks = False

    # ------------------------------------------------------------------ the step

    def step(self):
        """Return whether it was applied."""
        held = self.held()
        finite = all(bool(values_of(grad).isfinite().all()) for grad in held.values())
        checks = self.scales or self.skip_nonfinite or self.checks
        skipped = self.overflowed if self.apex else checks and not finite
        if not skipped:
            before = {name: master.detach().clone() for name, master in self.masters.items()}
            for name, master in self.masters.items():
                master.grad = held.get(name)
            self.optimizer.step()
            with torch.no_grad():
                for name, master in self.masters.items():
                    master.grad = None
                    moved = (master.detach() - before[name]).abs()
                    self.path[name] += float(moved.max()) if moved.numel() else 0.0
                    if master is not self.params[name]:
                        self.params[name].copy_(master)
        if self.scales and not self.apex and held:
            self._update_scale(skipped)
        self.overflowed = self.checks = False
        return not skipped

    def _update_scale(self, found_inf):
        if found_inf:
            self.growth = 0
            self.overflows += 1
            if self.overflows >= self.hysteresis:
                self.scale /= 2
            return
        self.growth += 1
        if self.growth == self.growth_interval:
            self.growth = self.overflows = 0
            self.scale *= 2

    # ------------------------------------------------------------------ what users do besides

    @torch.no_grad()
    def write(self, name, value):
        """Give a parameter new values, as a user does to the model that is trained."""
        self.params[name].copy_(value)
        self.roundings[name] += 1
        if self.masters[name] is not self.params[name]:
            self.masters[name].copy_(self.params[name])

    def snapshot(self):
        """What a checkpoint keeps."""
        return {
            "weights": {name: param.detach().clone() for name, param in self.params.items()},
            "masters": {name: master.detach().clone() for name, master in self.masters.items()},
            "trained": [name for names in self.groups for name in names if self.params[name].requires_grad],
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "scale": (self.scale, self.growth, self.overflows),
        }

    @torch.no_grad()
    def restore(self, kept, *, model, optimizer, masters=True):
        """Load what `snapshot` gave. masters: whether the optimizer's state has them; weights become what they round to."""
        if model:
            for name, weight in kept["weights"].items():
                self.write(name, weight)
        if optimizer:
            self.optimizer.load_state_dict(copy.deepcopy(kept["optimizer"]))
            self.scale, self.growth, self.overflows = kept["scale"]
            if self.half_weights and (masters or model):
                for name in kept["trained"]:
                    if model or self.params[name].requires_grad:
                        self.masters[name].copy_(kept["masters"][name])
                        self.params[name].copy_(kept["masters"][name])

    def add_group(self, names, **options):
        self.optimizer.add_param_group({"params": [self.masters[name] for name in names], **options})
        self.groups.append(list(names))

    def poison(self, value=math.inf):
        """A gradient of the last pass is not finite."""
        name = next(iter(self.held()))
        self.grads[name] = torch.full_like(self.grads[name], value)
        if self.apex:
            self.overflowed = True
            self.scale /= 2


def values_of(grad):
    """The values of a gradient, sparse or not."""
    return grad.coalesce().values() if grad.is_sparse else grad
