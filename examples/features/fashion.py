"""The data of the features: 10,000 photographs of clothes for training and 4,000 for testing, in the folder of the examples."""

import lzma
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

_FOLDER = Path(__file__).resolve().parents[1] / "data/fashion_mnist_subset"


def read(split: str) -> TensorDataset:
    """Return the images, (N, 784) float32 in [0, 1], and labels, (N,) int64, of "train" or "t10k"."""
    images, labels = (
        lzma.decompress((_FOLDER / f"{split}-{k}-ubyte.xz").read_bytes()) for k in ("images-idx3", "labels-idx1")
    )
    pixels = torch.frombuffer(bytearray(images[16:]), dtype=torch.uint8).reshape(-1, 784) / 255
    return TensorDataset(pixels, torch.frombuffer(bytearray(labels[8:]), dtype=torch.uint8).long())
