"""The parts of the vision transformer example: its data is what the README claims, its recipes are what they say."""

import argparse
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from urllib.error import URLError

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SUBSET = EXAMPLES / "data" / "fashion_mnist_subset"
VIT_MODULES = {path.stem for path in (EXAMPLES / "vit").glob("*.py")}

Load = Callable[[str], ModuleType]


@pytest.fixture
def vit(monkeypatch: pytest.MonkeyPatch, import_package: Load) -> Iterator[Load]:
    """Import a module of the ViT example by name; the names are forgotten afterwards."""
    for package in ("torchvision", "timm"):
        import_package(package)
    monkeypatch.setattr(sys, "path", [str(EXAMPLES / "vit"), *sys.path])
    yield import_module
    for name in VIT_MODULES:
        sys.modules.pop(name, None)


def flags(**given: object) -> argparse.Namespace:
    names = ("model", "dataset", "batch_size", "lr", "steps", "epochs", "compare")
    return argparse.Namespace(**{"recipe": "default", **dict.fromkeys(names), **given})


# --------------------------------------------------------------------- the embedded images


def test_the_embedded_set_has_ten_thousand_training_and_four_thousand_test_images(vit: Load) -> None:
    images = vit("data").load_images("fashion-mnist-subset", Path("unused"), channels=1, size=28)

    assert (len(images.train), len(images.test), images.num_classes) == (10_000, 4_000, 10)
    assert images.train[0][0].shape == (1, 28, 28)


def test_the_classes_of_the_embedded_set_are_equally_frequent(vit: Load) -> None:
    images = vit("data").load_images("fashion-mnist-subset", Path("unused"), channels=1, size=28)

    assert images.train.labels.bincount().tolist() == [1000] * 10
    assert images.test.labels.bincount().tolist() == [400] * 10


def test_no_test_image_is_a_training_image(vit: Load) -> None:
    images = vit("data").load_images("fashion-mnist-subset", Path("unused"), channels=1, size=28)

    training = {image.numpy().tobytes() for image in images.train.images}
    assert not any(image.numpy().tobytes() in training for image in images.test.images)


def test_the_normalised_pixels_have_about_mean_0_and_deviation_1(vit: Load) -> None:
    train = vit("data").load_images("fashion-mnist-subset", Path("unused"), channels=1, size=28).train
    pixels = torch.stack([train[index][0] for index in range(0, 10_000, 20)])

    assert abs(pixels.mean()) < 0.05
    assert abs(pixels.std() - 1) < 0.05


def test_the_embedded_set_is_small_and_carries_its_licence() -> None:
    assert sum(path.stat().st_size for path in SUBSET.iterdir() if path.is_file()) <= 8 * 2**20
    assert "MIT License" in (SUBSET / "LICENSE").read_text()
    assert "Zalando" in (SUBSET / "LICENSE").read_text()


def test_grey_images_become_rgb_of_the_size_that_the_model_takes(vit: Load) -> None:
    image, _ = vit("data").load_images("fashion-mnist-subset", Path("unused"), channels=3, size=56).train[0]

    assert image.shape == (3, 56, 56)
    assert torch.equal(image[0], image[2])


# --------------------------------------------------------------------- the other sets


def idx(tensor: torch.Tensor) -> bytes:
    sizes = b"".join(size.to_bytes(4, "big") for size in tensor.shape)
    return bytes([0, 0, 8, tensor.ndim]) + sizes + tensor.numpy().tobytes()


def test_the_full_set_is_read_from_the_data_folder(vit: Load, tmp_path: Path) -> None:
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for split, number in (("train", 5), ("t10k", 3)):
        (raw / f"{split}-images-idx3-ubyte").write_bytes(idx(torch.full((number, 28, 28), number, dtype=torch.uint8)))
        (raw / f"{split}-labels-idx1-ubyte").write_bytes(idx(torch.arange(number, dtype=torch.uint8)))

    images = vit("data").load_images("fashion-mnist", tmp_path, channels=1, size=28)

    assert (len(images.train), len(images.test)) == (5, 3)
    assert [images.test[index][1] for index in range(3)] == [0, 1, 2]


@pytest.fixture
def caltech101(vit: Load, tmp_path: Path) -> Path:
    from PIL import Image

    for category, mode, number in (("BACKGROUND_Google", "L", 1), ("ant", "L", 12), ("bass", "RGB", 13)):
        folder = tmp_path / "caltech101" / "101_ObjectCategories" / category
        folder.mkdir(parents=True)
        for index in range(1, number + 1):
            Image.new(mode, (300, 260), 90 if mode == "L" else (200, 20, 20)).save(folder / f"image_{index:04d}.jpg")
    return tmp_path


def test_the_tutorial_trains_on_all_of_caltech101_as_rgb_crops_of_224(vit: Load, caltech101: Path) -> None:
    images = vit("data").load_images("caltech101", caltech101, channels=3, size=224, tutorial=True)

    assert (len(images.train), images.test, images.num_classes) == (25, None, 2)
    grey, label = images.train[0]
    assert (grey.shape, label) == ((3, 224, 224), 0)
    torch.testing.assert_close(grey, torch.full_like(grey, (90 / 255 - 0.5) / 0.5))
    colour, label = images.train[24]
    assert (label, colour[0].mean() > 0 > colour[1].mean()) == (1, True)


def test_outside_the_tutorial_every_tenth_image_of_caltech101_is_held_out(vit: Load, caltech101: Path) -> None:
    images = vit("data").load_images("caltech101", caltech101, channels=3, size=32)

    assert (len(images.train), len(images.test)) == (22, 3)
    assert images.train[0][0].shape == images.test[0][0].shape == (3, 32, 32)
    assert not set(images.train.indices) & set(images.test.indices)


@pytest.mark.parametrize(("name", "loader"), [("fashion-mnist", "FashionMNIST"), ("caltech101", "Caltech101")])
def test_a_download_that_fails_names_the_folder_and_the_flags(
    vit: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, loader: str
) -> None:
    def offline(*arguments: object, **options: object) -> None:
        raise URLError("no route to host")

    monkeypatch.setattr(f"torchvision.datasets.{loader}", offline)

    with pytest.raises(RuntimeError, match=f"--dataset {name} is not in the folder {re.escape(str(tmp_path))}.*--data"):
        vit("data").load_images(name, tmp_path, channels=3, size=224)


def test_a_file_that_is_not_idx_is_refused(vit: Load) -> None:
    with pytest.raises(ValueError, match="not an idx file"):
        vit("data").read_idx(b"PK\x03\x04 a zip file")


# --------------------------------------------------------------------- model and recipe


def test_the_default_model_has_0_8_million_parameters(vit: Load) -> None:
    model = vit("model").find_model("vit_small_grey").build(num_classes=10)

    assert sum(parameter.numel() for parameter in model.parameters()) == 803_338
    assert model(torch.zeros(2, 1, 28, 28)).shape == (2, 10)


def test_an_unknown_model_is_refused_with_names_that_exist(vit: Load) -> None:
    with pytest.raises(
        ValueError, match="--model 'vit_bas_patch16_224' is unknown; .*vit_small_grey.*for example vit_base_patch16_224"
    ):
        vit("model").find_model("vit_bas_patch16_224")


def test_the_tutorial_recipe_is_the_known_one(vit: Load) -> None:
    recipe = vit("recipe").choose_recipe(flags(recipe="tutorial"))

    assert (recipe.model, recipe.dataset, recipe.drop_rate) == ("vit_base_patch16_224", "caltech101", 0.1)
    assert (recipe.batch_size, recipe.num_steps(67)) == (128, 134)
    optimizer = recipe.make_optimizer([torch.nn.Parameter(torch.zeros(1))])
    assert type(optimizer) is torch.optim.SGD
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]) == (1e-2, 0.1)


def test_the_tutorial_recipe_warms_up_by_one_51st_of_the_rate_per_epoch(vit: Load) -> None:
    recipe = vit("recipe").choose_recipe(flags(recipe="tutorial"))
    optimizer = recipe.make_optimizer([torch.nn.Parameter(torch.zeros(1))])
    scheduler = recipe.make_scheduler(optimizer, 67)

    assert recipe.schedules_epochs
    rates = [scheduler.get_last_lr()[0]]
    optimizer.step()
    scheduler.step()
    rates.append(scheduler.get_last_lr()[0])
    assert rates == pytest.approx([1e-2 / 51, 2e-2 / 51])


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("model", "resnet18"),
        ("dataset", "fashion-mnist"),
        ("batch_size", 64),
        ("lr", 1e-3),
        ("steps", 5),
        ("epochs", 3),
    ],
)
def test_a_flag_that_contradicts_the_tutorial_recipe_is_an_error(vit: Load, flag: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"conflicts with --{flag.replace('_', '-')} {value}"):
        vit("recipe").choose_recipe(flags(recipe="tutorial", **{flag: value}))


def test_a_flag_that_repeats_the_tutorial_recipe_is_not(vit: Load) -> None:
    recipe = vit("recipe").choose_recipe(flags(recipe="tutorial", batch_size=128, lr=1e-2))
    assert recipe.tutorial


def test_epochs_take_the_place_of_the_default_number_of_steps(vit: Load) -> None:
    recipe = vit("recipe").choose_recipe(flags(epochs=2))
    assert recipe.num_steps(156) == 312


def test_steps_may_end_in_the_middle_of_an_epoch(vit: Load) -> None:
    recipe = vit("recipe").choose_recipe(flags(steps=160))
    assert recipe.num_steps(156) == 160


def history_of(vit: Load, precision: str, scales: list[float], skipped: list[bool]) -> object:
    history = vit("history").History(precision, accuracy=0.83, peak_bytes=40 * 2**20)
    history.loss, history.loss_scale, history.skipped = [2.0, 1.0, 0.5], scales, skipped
    history.num_images, history.seconds = 192, 2.0
    return history


def panels_of(vit: Load, histories: list[object]) -> set[str]:
    figure = vit("report").draw(histories, "a title")
    return {axes.get_title(loc="left") or axes.get_ylabel() for axes in figure.axes}


def test_the_comparison_is_drawn(vit: Load, tmp_path: Path) -> None:
    history = history_of(vit, "fp16", [4.0, 4.0, 2.0], [False, True, False])
    path = tmp_path / "new folder" / "picture.png"

    vit("report").save_plot([history], "a title", path)

    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000


def test_a_picture_of_several_precisions_compares_accuracy_speed_and_memory(vit: Load) -> None:
    histories = [history_of(vit, name, [1.0] * 3, [False] * 3) for name in ("fp32", "bf16")]

    assert panels_of(vit, histories) == {
        "training loss",
        "accuracy on test images, %",
        "images a second",
        "peak of a step, MiB",
    }


def test_loss_scale_and_skips_are_drawn_only_where_there_are_any(vit: Load) -> None:
    still = history_of(vit, "bf16", [1.0] * 3, [False] * 3)
    moving = history_of(vit, "fp16", [4.0, 4.0, 2.0], [False] * 3)
    skipping = history_of(vit, "fp16", [1.0] * 3, [False, True, False])

    assert {"loss scale", "skipped steps"} & panels_of(vit, [still]) == set()
    assert {"loss scale", "skipped steps"} & panels_of(vit, [moving]) == {"loss scale"}
    assert {"loss scale", "skipped steps"} & panels_of(vit, [skipping]) == {"skipped steps"}


def test_the_table_has_a_loss_scale_only_where_there_is_one(vit: Load, capsys: pytest.CaptureFixture[str]) -> None:
    vit("report").print_table([history_of(vit, "bf16", [1.0] * 3, [False] * 3)], "a title")
    still = capsys.readouterr().out
    vit("report").print_table([history_of(vit, "fp16", [4.0, 4.0, 2.0], [False, True, False])], "a title")
    moving = capsys.readouterr().out

    assert "peak MiB" in still
    assert "40" in still
    assert "scale" not in still
    assert "scale" in moving
    assert "skips" in moving


def test_table_and_bar_of_a_comparison_fit_into_80_columns(
    vit: Load, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    histories = [history_of(vit, name, [1.0] * 3, [False] * 3) for name in ("fp32", "bf16", "bf16_naive")]
    histories.append(history_of(vit, "fp16", [65536.0, 65536.0, 32768.0], [False, True, False]))
    vit("report").print_table(histories, "vit_small_grey on fashion-mnist-subset, 2 processes")
    out = capsys.readouterr().out
    for heading in ("precision", "steps", "loss", "accuracy", "images/s", "seconds", "peak MiB", "scale", "skips"):
        assert heading in out
    history = histories[0]
    monkeypatch.setattr(type(history), "num_steps", 300)
    monkeypatch.setattr(type(history), "images_per_second", 12345.0)
    with vit("progress").ProgressBar("fp16_naive", 300) as bar:
        bar.show(history, torch.tensor(2.345), SimpleNamespace(loss_scale=65536.0, num_skipped=12))
    bar_line = capsys.readouterr().out
    assert "300/300 loss 2.345  12,345 img/s  scale 65536  skips 12" in bar_line
    assert [line for line in (out + bar_line).splitlines() if len(line) > 80] == []
    with vit("progress").ProgressBar("fp32", 300) as bar:
        bar.show(history, torch.tensor(2.345), SimpleNamespace(loss_scale=1.0, num_skipped=0))
    assert "scale" not in capsys.readouterr().out


# --------------------------------------------------------------------- checkpoints


@pytest.mark.slow
def test_a_run_that_stops_on_a_signal_is_resumed_and_ends_the_same(
    vit: Load, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    script, histories = vit("train"), []
    monkeypatch.setattr(script, "evaluate", lambda *args: 0.0)
    monkeypatch.setattr(script, "print_table", lambda found, title: histories.append(found[0].state_dict()))
    monkeypatch.setattr(script, "save_plot", lambda *args: None)

    def run(folder: str, *options: str) -> None:
        given = ["--steps", "4", "--batch-size", "2", "--plugin", "none", "--output", str(tmp_path / folder), *options]
        monkeypatch.setattr(sys, "argv", ["train.py", *given])
        try:
            script.main()
        finally:
            if torch.distributed.is_initialized():  # as the end of the process does
                torch.distributed.destroy_process_group()

    try:
        run("unbroken")
        show = script.ProgressBar.show

        def signalled(bar: object, history: object, *args: object) -> None:
            show(bar, history, *args)
            if history.num_steps == 3:
                os.kill(os.getpid(), signal.SIGUSR1)

        monkeypatch.setattr(script.ProgressBar, "show", signalled)
        with pytest.raises(SystemExit) as stopped:
            run("broken", "--resume", "--save-every", "2")
        assert stopped.value.code == 75
        monkeypatch.setattr(script.ProgressBar, "show", show)
        (checkpoints,) = (tmp_path / "broken").glob("*-checkpoints")
        assert sorted(path.name for path in checkpoints.iterdir()) == ["step-0000000002", "step-0000000003"]
        run("broken", "--resume")
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for history in histories:
        history.pop("seconds")
    assert histories[0] == histories[1]
