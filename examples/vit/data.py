"""The image sets of the example: the embedded Fashion-MNIST subset, full Fashion-MNIST and Caltech101."""

import lzma
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import Dataset, Subset

from booster import DistCoordinator

SUBSET_FOLDER = Path(__file__).resolve().parents[1] / "data" / "fashion_mnist_subset"
DATASETS = ("fashion-mnist-subset", "fashion-mnist", "caltech101")
MEAN, STD = 0.286, 0.353  # of Fashion-MNIST's training pixels, scaled to [0, 1]
HELD_OUT = 10  # Caltech101 has no official split: every 10th image is a test image


@dataclass(frozen=True)
class ImageSet:
    """One data set, ready to train on. `test` is None where the recipe trains on everything."""

    name: str
    train: Dataset
    test: Dataset | None
    num_classes: int


class GreyImages(Dataset):
    """Grey images in memory, given out normalised as float32 (channels, size, size) with their int label.

    images: uint8 (N, H, W); labels: int64 (N,). `channels` 3 repeats the grey channel, `size` resizes.
    """

    def __init__(self, images: torch.Tensor, labels: torch.Tensor, *, channels: int, size: int) -> None:
        self.images = images
        self.labels = labels
        self.channels = channels
        self.size = size

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = (self.images[index].float().div_(255) - MEAN).div_(STD)
        image = image.expand(self.channels, *image.shape)
        if image.shape[-1] != self.size:
            image = F.interpolate(image[None], size=(self.size, self.size), mode="bilinear", antialias=True)[0]
        return image.contiguous(), int(self.labels[index])


def load_images(name: str, root: Path, *, channels: int, size: int, tutorial: bool = False) -> ImageSet:
    """The data set `name` for a model that takes (channels, size, size); `root` is where downloads live.

    tutorial: the transforms of the well-known Caltech101 recipe, on all images, with no test set.
    Called by every rank: rank 0 downloads what is missing while the others wait.
    """
    if name == "fashion-mnist-subset":
        return _grey_set(name, *(_embedded(split) for split in ("train", "t10k")), channels=channels, size=size)
    if name == "fashion-mnist":
        return _grey_set(name, *_full_fashion_mnist(root), channels=channels, size=size)
    if name == "caltech101":
        return _caltech101(root, channels=channels, size=size, tutorial=tutorial)
    raise ValueError(f"--dataset {name!r} is unknown; choose one of {', '.join(DATASETS)}")


def read_idx(content: bytes) -> torch.Tensor:
    """The uint8 tensor in an idx file: two zero bytes, type 8, number of dimensions, big-endian sizes, data."""
    if content[:3] != b"\x00\x00\x08":
        raise ValueError(f"not an idx file of unsigned bytes: it starts with {content[:4].hex()}, expected 000008..")
    ndim = content[3]
    shape = [int.from_bytes(content[4 + 4 * d : 8 + 4 * d], "big") for d in range(ndim)]
    return torch.frombuffer(bytearray(content[4 + 4 * ndim :]), dtype=torch.uint8).reshape(shape)


def _embedded(split: str) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = (
        read_idx(lzma.decompress((SUBSET_FOLDER / f"{split}-{kind}-ubyte.xz").read_bytes()))
        for kind in ("images-idx3", "labels-idx1")
    )
    return images, labels.long()


def _grey_set(
    name: str, train: tuple[torch.Tensor, torch.Tensor], test: tuple[torch.Tensor, torch.Tensor], **shape: int
) -> ImageSet:
    return ImageSet(name, GreyImages(*train, **shape), GreyImages(*test, **shape), num_classes=10)


def _full_fashion_mnist(root: Path) -> list[tuple[torch.Tensor, torch.Tensor]]:
    from torchvision.datasets import FashionMNIST

    splits = _download(
        "fashion-mnist", root, lambda: [FashionMNIST(root, train, download=True) for train in (True, False)]
    )
    return [(split.data, split.targets) for split in splits]


def _caltech101(root: Path, *, channels: int, size: int, tutorial: bool) -> ImageSet:
    from torchvision import transforms
    from torchvision.datasets import Caltech101

    def colour(image: Any) -> Any:
        return image.convert("RGB" if channels == 3 else "L")  # some images of the set are grey, most are RGB

    to_tensor = [transforms.ToTensor(), transforms.Normalize([0.5] * channels, [0.5] * channels)]
    flip = transforms.RandomHorizontalFlip()
    if tutorial:
        # Both crops, in this order, are the recipe's; the first one alone does not make images of one size.
        augment = [transforms.Resize(256), transforms.RandomResizedCrop(224), flip]
    else:
        augment = [transforms.RandomResizedCrop(size, scale=(0.35, 1.0)), flip]
    train_view = transforms.Compose([colour, *augment, *to_tensor])
    test_view = transforms.Compose([colour, transforms.Resize(size * 8 // 7), transforms.CenterCrop(size), *to_tensor])

    train, test = _download(
        "caltech101",
        root,
        lambda: [Caltech101(root, transform=view, download=True) for view in (train_view, test_view)],
    )
    classes = len(train.categories)
    if tutorial:
        return ImageSet("caltech101", train, None, classes)
    kept = [index for index in range(len(train)) if index % HELD_OUT]
    return ImageSet("caltech101", Subset(train, kept), Subset(test, range(0, len(test), HELD_OUT)), classes)


def _download(name: str, root: Path, make: Callable[[], list[Any]]) -> list[Any]:
    """`make()` on rank 0 first, then on the others, which find the files; explains a download that failed."""
    with DistCoordinator().priority_execution():
        try:
            os.makedirs(root, exist_ok=True)
            return make()
        except (OSError, RuntimeError) as error:
            raise RuntimeError(
                f"--dataset {name} is not in the folder {root.resolve()} and cannot be downloaded there ({error}). "
                f"Point --data (default: $DATA, else ./data) at a folder that holds it, in the layout of "
                f"torchvision.datasets, or train on the images that come with the example: --dataset {DATASETS[0]}"
            ) from error
