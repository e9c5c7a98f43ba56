"""The vision transformers of the example: a small one for 28x28 grey images, and timm's by name."""

import difflib
from dataclasses import dataclass

import timm
from timm.models.vision_transformer import VisionTransformer
from torch import nn

SMALL = "vit_small_grey"


@dataclass(frozen=True)
class ModelSpec:
    """A model by name with the images that it reads, known before it is built."""

    name: str
    channels: int
    size: int

    def build(self, num_classes: int | None, drop_rate: float = 0.0) -> nn.Module:
        """The model, freshly initialised from torch's default generator. num_classes None: the model's own."""
        options = {} if num_classes is None else {"num_classes": num_classes}
        if self.name == SMALL:
            # 16 patches of 7x7 pixels; 0.8 M parameters with ten classes
            return VisionTransformer(
                img_size=self.size,
                patch_size=7,
                in_chans=self.channels,
                embed_dim=128,
                depth=4,
                num_heads=4,
                drop_rate=drop_rate,
                **options,
            )
        return timm.create_model(self.name, drop_rate=drop_rate, **options)


def find_model(name: str) -> ModelSpec:
    """The spec of `name`: the example's own small model or any model that timm lists."""
    if name == SMALL:
        return ModelSpec(name, channels=1, size=28)
    if not timm.is_model(name):
        close = difflib.get_close_matches(name, timm.list_models(), n=3)
        raise ValueError(
            f"--model {name!r} is unknown; choose {SMALL} or a name from timm.list_models()"
            + (f", for example {', '.join(close)}" if close else "")
        )
    channels, size, _ = timm.get_pretrained_cfg(name).input_size
    return ModelSpec(name, channels=channels, size=size)
