"""What to train and how: the example's own recipe, and the tutorial's, flag by flag."""

import argparse
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from booster.nn.lr_scheduler import CosineAnnealingWarmupLR, LinearWarmupLR

COMPARE_STEPS = 300  # of each precision


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The example's own: AdamW, warmup and cosine per step. Either `steps` or `epochs` is set.

    batch_size: images per update, over all processes.
    """

    model: str = "vit_small_grey"
    dataset: str = "fashion-mnist-subset"
    batch_size: int = 64
    lr: float = 1e-3
    steps: int | None = 500
    epochs: int | None = None
    drop_rate: float = 0.0
    tutorial: bool = False

    def num_steps(self, steps_per_epoch: int) -> int:
        return self.epochs * steps_per_epoch if self.steps is None else self.steps

    def make_optimizer(self, parameters: Iterable[torch.nn.Parameter]) -> Optimizer:
        return AdamW(parameters, lr=self.lr, weight_decay=0.05)

    def make_scheduler(self, optimizer: Optimizer, steps_per_epoch: int) -> LRScheduler:
        steps = self.num_steps(steps_per_epoch)
        return CosineAnnealingWarmupLR(optimizer, total_steps=steps, warmup_steps=min(50, steps // 10))

    @property
    def schedules_epochs(self) -> bool:
        """Whether the scheduler steps once per epoch; once per update otherwise."""
        return False


@dataclass(frozen=True, kw_only=True)
class TutorialRecipe(Recipe):
    """The well-known one: ViT-B/16 on Caltech101 with SGD for two epochs, one scheduler step per epoch.

    Its schedule counts epochs but warms up over 50 of them, so both epochs train at a small fraction of the rate.
    """

    model: str = "vit_base_patch16_224"
    dataset: str = "caltech101"
    batch_size: int = 128
    lr: float = 1e-2
    steps: int | None = None
    epochs: int | None = 2
    drop_rate: float = 0.1
    tutorial: bool = True

    def make_optimizer(self, parameters: Iterable[torch.nn.Parameter]) -> Optimizer:
        return torch.optim.SGD(parameters, lr=self.lr, weight_decay=0.1)

    def make_scheduler(self, optimizer: Optimizer, steps_per_epoch: int) -> LRScheduler:
        return LinearWarmupLR(optimizer, warmup_steps=50, total_steps=self.epochs)

    @property
    def schedules_epochs(self) -> bool:
        return True


RECIPES = {"default": Recipe(), "tutorial": TutorialRecipe()}


def choose_recipe(args: argparse.Namespace) -> Recipe:
    """The recipe that `args` name, with their flags; ValueError for a flag that the tutorial's recipe contradicts."""
    recipe = RECIPES[args.recipe]
    names = ("model", "dataset", "batch_size", "lr", "steps", "epochs")
    flags = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if recipe.tutorial:
        wrong = {name: value for name, value in flags.items() if value != getattr(recipe, name)}
        if wrong:
            said = ", ".join(f"--{name.replace('_', '-')} {value}" for name, value in wrong.items())
            fixed = ", ".join(f"{name.replace('_', '-')} {getattr(recipe, name)}" for name in wrong)
            raise ValueError(f"--recipe tutorial fixes {fixed}; it conflicts with {said}: drop the flags or the recipe")
        return recipe
    if "epochs" in flags:
        flags["steps"] = None
    elif args.compare and "steps" not in flags:
        flags["steps"] = COMPARE_STEPS
    return replace(recipe, **flags)
