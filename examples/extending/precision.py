"""A precision of your own is one file: linear layers multiply in fp8, e4m3 forward and e5m2 backward, the rest in float32.

Activations are scaled by the largest one of the step before. Products are emulated, for any device; see `torch._scaled_mm`."""

import torch
from torch import nn

from booster.mixed_precision import KeptModules, MixedPrecision, register


def fp8(x, dtype, largest):
    """Round `x` to an 8-bit format that is scaled so that `largest` is its largest number."""
    scale = torch.finfo(dtype).max / largest.clamp(min=1e-12)
    return (x * scale).clamp(torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype).to(x.dtype) / scale


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, largest):
        x, weight = fp8(x, torch.float8_e4m3fn, largest), fp8(weight, torch.float8_e4m3fn, weight.abs().amax())
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad = fp8(grad, torch.float8_e5m2, grad.abs().amax())
        return grad @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2), None


class Fp8Linear(nn.Linear):
    largest = seen = torch.tensor(0.0)  # of the inputs: in the last applied step, in this one

    def forward(self, x):
        self.seen = torch.maximum(self.seen.to(x.device), x.detach().abs().amax())
        product = Product.apply(x, self.weight, torch.where(self.largest.to(x.device) > 0, self.largest, self.seen))
        return product if self.bias is None else product + self.bias


class FP8(MixedPrecision):
    def __init__(self, keep_fp32=()):
        self.keep_fp32, self.layers = keep_fp32, []

    def convert(self, model):
        kept = KeptModules(model, self.keep_fp32)
        for name, old in [*model.named_modules()]:
            if type(old) is nn.Linear and not kept.contains(name):
                self.layers.append(layer := Fp8Linear(old.in_features, old.out_features, device="meta"))
                layer.weight, layer.bias = old.weight, old.bias
                model.set_submodule(name, layer)
        return model

    def after_step(self, applied):  # a bool, or a tensor where a device decides, which torch.where does not wait for
        for layer in self.layers:
            layer.largest = torch.where(torch.as_tensor(applied, device=layer.seen.device), layer.seen, layer.largest)
            layer.seen = torch.zeros_like(layer.seen)


register("fp8_delayed", FP8)  # "fp8" is the library's own, scaled by what it multiplies
