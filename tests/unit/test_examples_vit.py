"""The parts of the vision transformer example: its data is what the README claims, its recipes are what they say."""

import argparse
import os
import re
import signal
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from urllib.error import URLError

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SUBSET = EXAMPLES / "data" / "fashion_mnist_subset"
VIT_MODULES = {path.stem for path in (EXAMPLES / "vit").glob("*.py")}


@pytest.fixture
def vit(monkeypatch, import_package):
    """Import a module of the ViT example by name; the names are forgotten afterwards."""
    for package in ("torchvision", "timm"):
        import_package(package)
    monkeypatch.setattr(sys, "path", [str(EXAMPLES / "vit"), *sys.path])
    yield import_module
    for name in VIT_MODULES:
        sys.modules.pop(name, None)


def flags(**given):
    names = ("model", "dataset", "batch_size", "lr", "steps", "epochs", "compare")
    return argparse.Namespace(**{"recipe": "default", **dict.fromkeys(names), **given})


# ---- data


def test_the_embedded_images_are_what_the_readme_says(vit):
    images = vit("data").load_images("fashion-mnist-subset", Path("unused"), channels=1, size=28)
    assert (len(images.train), len(images.test), images.num_classes) == (10_000, 4_000, 10)
    assert images.train.labels.bincount().tolist() == [1000] * 10
    assert images.test.labels.bincount().tolist() == [400] * 10
    training = {image.numpy().tobytes() for image in images.train.images}
    assert not any(image.numpy().tobytes() in training for image in images.test.images)
    pixels = torch.stack([images.train[index][0] for index in range(0, 10_000, 20)])
    assert pixels.shape[1:] == (1, 28, 28)
    assert abs(pixels.mean()) < 0.05
    assert abs(pixels.std() - 1) < 0.05
    assert sum(path.stat().st_size for path in SUBSET.iterdir() if path.is_file()) <= 8 * 2**20
    assert {"MIT License", "Zalando"} <= set(re.findall("MIT License|Zalando", (SUBSET / "LICENSE").read_text()))


def test_grey_images_become_rgb_of_the_size_that_the_model_takes(vit):
    image, _ = vit("data").load_images("fashion-mnist-subset", Path("unused"), channels=3, size=56).train[0]
    assert image.shape == (3, 56, 56)
    assert torch.equal(image[0], image[2])


def idx(tensor):
    sizes = b"".join(size.to_bytes(4, "big") for size in tensor.shape)
    return bytes([0, 0, 8, tensor.ndim]) + sizes + tensor.numpy().tobytes()


def test_the_full_set_is_read_from_the_data_folder(vit, tmp_path):
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for split, number in (("train", 5), ("t10k", 3)):
        (raw / f"{split}-images-idx3-ubyte").write_bytes(idx(torch.full((number, 28, 28), number, dtype=torch.uint8)))
        (raw / f"{split}-labels-idx1-ubyte").write_bytes(idx(torch.arange(number, dtype=torch.uint8)))
    images = vit("data").load_images("fashion-mnist", tmp_path, channels=1, size=28)
    assert (len(images.train), len(images.test)) == (5, 3)
    assert [images.test[index][1] for index in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="not an idx file"):
        vit("data").read_idx(b"PK\x03\x04 a zip file")


def test_caltech101_is_cropped_for_the_tutorial_and_otherwise_every_tenth_image_is_held_out(vit, tmp_path):
    pytest.importorskip("scipy", reason="torchvision reads Caltech101 by scipy, of the extra examples")
    from PIL import Image

    for category, mode, number in (("BACKGROUND_Google", "L", 1), ("ant", "L", 12), ("bass", "RGB", 13)):
        folder = tmp_path / "caltech101" / "101_ObjectCategories" / category
        folder.mkdir(parents=True)
        for index in range(1, number + 1):
            Image.new(mode, (300, 260), 90 if mode == "L" else (200, 20, 20)).save(folder / f"image_{index:04d}.jpg")
    images = vit("data").load_images("caltech101", tmp_path, channels=3, size=224, tutorial=True)
    assert (len(images.train), images.test, images.num_classes) == (25, None, 2)
    grey, label = images.train[0]
    assert (grey.shape, label) == ((3, 224, 224), 0)
    torch.testing.assert_close(grey, torch.full_like(grey, (90 / 255 - 0.5) / 0.5))
    colour, label = images.train[24]
    assert (label, colour[0].mean() > 0 > colour[1].mean()) == (1, True)
    images = vit("data").load_images("caltech101", tmp_path, channels=3, size=32)
    assert (len(images.train), len(images.test)) == (22, 3)
    assert images.train[0][0].shape == images.test[0][0].shape == (3, 32, 32)
    assert not set(images.train.indices) & set(images.test.indices)


@pytest.mark.parametrize(("name", "loader"), [("fashion-mnist", "FashionMNIST"), ("caltech101", "Caltech101")])
def test_a_download_that_fails_names_the_folder_and_the_flags(vit, tmp_path, monkeypatch, name, loader):
    def offline(*arguments, **options):
        raise URLError("no route to host")

    monkeypatch.setattr(f"torchvision.datasets.{loader}", offline)
    with pytest.raises(RuntimeError, match=f"--dataset {name} is not in the folder {re.escape(str(tmp_path))}.*--data"):
        vit("data").load_images(name, tmp_path, channels=3, size=224)


# ---- model and recipe


def test_the_default_model_has_0_8_million_parameters_and_an_unknown_one_is_answered_with_names(vit):
    model = vit("model").find_model("vit_small_grey").build(num_classes=10)
    assert sum(parameter.numel() for parameter in model.parameters()) == 803_338
    assert model(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
    with pytest.raises(
        ValueError, match="--model 'vit_bas_patch16_224' is unknown; .*vit_small_grey.*for example vit_base_patch16_224"
    ):
        vit("model").find_model("vit_bas_patch16_224")


def test_the_tutorial_recipe_is_the_known_one(vit):
    recipe = vit("recipe").choose_recipe(flags(recipe="tutorial", batch_size=128, lr=1e-2))  # as it says itself
    assert (recipe.model, recipe.dataset, recipe.drop_rate) == ("vit_base_patch16_224", "caltech101", 0.1)
    assert (recipe.tutorial, recipe.batch_size, recipe.num_steps(67)) == (True, 128, 134)
    optimizer = recipe.make_optimizer([torch.nn.Parameter(torch.zeros(1))])
    assert type(optimizer) is torch.optim.SGD
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]) == (1e-2, 0.1)
    scheduler = recipe.make_scheduler(optimizer, 67)
    assert recipe.schedules_epochs
    rates = [scheduler.get_last_lr()[0]]
    optimizer.step()
    scheduler.step()
    assert [*rates, scheduler.get_last_lr()[0]] == pytest.approx([1e-2 / 51, 2e-2 / 51])


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
def test_a_flag_that_contradicts_the_tutorial_recipe_is_an_error(vit, flag, value):
    with pytest.raises(ValueError, match=f"conflicts with --{flag.replace('_', '-')} {value}"):
        vit("recipe").choose_recipe(flags(recipe="tutorial", **{flag: value}))


@pytest.mark.parametrize(("given", "steps"), [({"epochs": 2}, 312), ({"steps": 160}, 160)])
def test_epochs_or_steps_take_the_place_of_the_default_number_of_steps(vit, given, steps):
    assert vit("recipe").choose_recipe(flags(**given)).num_steps(156) == steps


# ---- reports


def history_of(vit, precision, scales=(1.0, 1.0, 1.0), skipped=(False, False, False)):
    history = vit("history").History(precision, accuracy=0.83, peak_bytes=40 * 2**20)
    history.loss, history.loss_scale, history.skipped = [2.0, 1.0, 0.5], list(scales), list(skipped)
    history.num_images, history.seconds = 192, 2.0
    return history


def panels_of(vit, *histories):
    figure = vit("report").draw(list(histories), "a title")
    return {axes.get_title(loc="left") or axes.get_ylabel() for axes in figure.axes}


def test_a_picture_has_panels_of_what_there_is(vit, tmp_path):
    still, moving = history_of(vit, "bf16"), history_of(vit, "fp16", (4.0, 4.0, 2.0))
    skipping = history_of(vit, "fp16", skipped=(False, True, False))
    compared = {"training loss", "accuracy on test images, %", "images a second", "peak of a step, MiB"}
    assert panels_of(vit, still, history_of(vit, "fp32")) == compared
    only = {"loss scale", "skipped steps"}
    assert [only & panels_of(vit, one) for one in (still, moving, skipping)] == [
        set(),
        {"loss scale"},
        {"skipped steps"},
    ]
    vit("report").save_plot([moving], "a title", path := tmp_path / "new folder" / "picture.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000


def test_table_and_bar_of_a_comparison_fit_into_80_columns(vit, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    histories = [history_of(vit, name) for name in ("fp32", "bf16", "bf16_naive")]
    vit("report").print_table(histories[:1], "a title")
    assert "scale" not in capsys.readouterr().out
    histories.append(history_of(vit, "fp16", (65536.0, 65536.0, 32768.0), (False, True, False)))
    vit("report").print_table(histories, "vit_small_grey on fashion-mnist-subset, 2 processes")
    out = capsys.readouterr().out
    for heading in (
        "precision",
        "steps",
        "loss",
        "accuracy",
        "images/s",
        "seconds",
        "peak MiB",
        "scale",
        "skips",
        "40",
    ):
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


# ---- checkpoints


@pytest.mark.slow
def test_a_run_that_stops_on_a_signal_is_resumed_and_ends_the_same(vit, monkeypatch, tmp_path):
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    script, histories = vit("train"), []
    monkeypatch.setattr(script, "evaluate", lambda *args: 0.0)
    monkeypatch.setattr(script, "print_table", lambda found, title: histories.append(found[0].state_dict()))
    monkeypatch.setattr(script, "save_plot", lambda *args: None)

    def run(folder, *options):
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

        def signalled(bar, history, *args):
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
