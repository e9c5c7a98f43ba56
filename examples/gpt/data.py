"""Real text for the GPT and real images for the vision transformer, both from the repository."""

import lzma
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.data import Dataset, Subset, TensorDataset

FOLDER = Path(__file__).resolve().parents[1] / "data"
TEXT = FOLDER / "jargon_file" / "jargon_h_to_o.txt"
IMAGES = FOLDER / "fashion_mnist_subset"
HELD_OUT = 0.1  # the share of the text, at its end, that is for validation
MEAN, STD = 0.286, 0.353  # of the training pixels, scaled to [0, 1]

Sample = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Splits:
    """Samples are (input, target)."""

    train: Dataset[Sample]
    validation: Dataset[Sample]


class Windows(Dataset[Sample]):
    """Windows of `length` bytes of a text, each with the bytes that follow each of them: int64 (length,) twice.

    stride: from the start of one window to that of the next.
    """

    def __init__(self, text: torch.Tensor, *, length: int, stride: int) -> None:
        if len(text) <= length:
            raise ValueError(
                f"a text of {len(text)} bytes has no window of {length} and one more; give a shorter context"
            )
        self.text = text
        self.length = length
        self.stride = stride

    def __len__(self) -> int:
        return (len(self.text) - self.length - 1) // self.stride + 1

    def __getitem__(self, index: int) -> Sample:
        start = index * self.stride
        window = self.text[start : start + self.length + 1].long()
        return window[:-1], window[1:]


def load_text(context: int) -> Splits:
    """The excerpt of the Jargon File: training windows begin at every byte, those for validation do not overlap."""
    text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8)
    cut = round(len(text) * (1 - HELD_OUT))
    return Splits(Windows(text[:cut], length=context, stride=1), Windows(text[cut:], length=context, stride=context))


def load_images() -> Splits:
    """The subset of Fashion-MNIST: float32 (1, 28, 28), normalised, with the number of the class."""
    return Splits(_images("train"), _images("t10k"))


def _images(split: str) -> TensorDataset:
    pixels, labels = (
        torch.frombuffer(
            bytearray(lzma.decompress((IMAGES / f"{split}-{kind}-ubyte.xz").read_bytes())), dtype=torch.uint8
        )
        for kind in ("images-idx3", "labels-idx1")
    )
    images = (pixels[16:].reshape(-1, 1, 28, 28) / 255 - MEAN) / STD
    return TensorDataset(images, labels[8:].long())


def drawn(dataset: Dataset[Sample], num_samples: int, seed: int) -> Subset[Sample]:
    """`num_samples` of `dataset` at random: each once before any comes again.

    A loader that does not shuffle deals them to the processes in turn. So which samples a step sees together depends on
    the seed and on the size of the whole batch, not on how many processes share it.
    """
    generator = torch.Generator().manual_seed(seed)
    size = len(dataset)  # type: ignore[arg-type]
    rounds = [torch.randperm(size, generator=generator) for _ in range(-(-num_samples // size))]
    return Subset(dataset, torch.cat(rounds)[:num_samples].tolist())


def spread(dataset: Dataset[Sample], num_samples: int) -> Subset[Sample]:
    """`num_samples` of `dataset` at even distances, in order, or all if it has fewer."""
    size = len(dataset)  # type: ignore[arg-type]
    num_samples = min(num_samples, size)
    return Subset(dataset, [index * size // num_samples for index in range(num_samples)])
