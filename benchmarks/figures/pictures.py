"""The pictures that the library itself draws: an estimate, and a recorded run as `booster report` shows it.

python benchmarks/figures/pictures.py [estimate] [report]

It needs matplotlib, timm, rich and PyQt6-WebEngine, whose browser takes the pictures.

The run is a small transformer in float16 whose loss scale begins too large, and grows soon: it skips a few steps.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
os.environ.setdefault("QTWEBENGINE_CHROMIUM_FLAGS", "--no-sandbox --disable-gpu")

import torch
from PIL import Image
from PyQt6.QtCore import QTimer, QUrl
from PyQt6.QtWebEngineWidgets import QWebEngineView
from PyQt6.QtWidgets import QApplication
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text
from torch import nn

from booster import Booster
from booster.mixed_precision import FP16TorchMixedPrecision

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
ESTIMATE = (
    "job.py:job --precision fp32,bf16,bf16_naive,bf16_naive+8bit --plugin single,fsdp --world_size 4 --memory 0.5"
)
JOB = f"""
import sys
sys.path.insert(0, {str(IMAGES.parents[1] / "examples" / "vit")!r})
import torchvision_ops
torchvision_ops.import_torchvision()
import timm, torch
def job():
    model = timm.create_model("vit_tiny_patch16_224")
    batch = torch.randn(16, 3, 224, 224), torch.randint(0, 1000, (16,))
    return model, torch.optim.AdamW(model.parameters()), batch, torch.nn.CrossEntropyLoss()
"""
COLUMNS = 96  # of the terminal
COMMAND = [sys.executable, "-m", "booster"]
PAGE = (
    '<body style="margin:0;overflow:hidden;background:#1e2129"><pre style="margin:0;padding:16px 20px;color:#e6e8eb;'
    "font:15px/1.3 'DejaVu Sans Mono',monospace\">{code}</pre></body>"
)


class Bytes(nn.Module):
    """A transformer of two blocks that says the next of 32 letters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 64)
        self.blocks = nn.Sequential(*(nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True) for _ in range(2)))
        self.head = nn.Linear(64, 32)

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(letters)))


def record(folder: Path) -> None:
    """300 steps, sampled every tenth."""
    torch.manual_seed(0)
    b = Booster("cpu", FP16TorchMixedPrecision(init_scale=2.0**22, growth_interval=60), clip_grad_norm=2.0)
    model = Bytes()
    groups = [{"params": [each for each in model.parameters() if (each.dim() > 1) == large]} for large in (True, False)]
    model, optimizer, criterion, *_ = b.boost(model, torch.optim.AdamW(groups, lr=2e-3), nn.CrossEntropyLoss())
    text = torch.randint(0, 32, (4096,)).sort().values  # letters in order: the next one is the same, or one more
    with b.record(folder, every=10):
        for _ in range(300):
            starts = torch.randint(0, 4000, (16,))
            x = torch.stack([text[start : start + 32] for start in starts])
            y = torch.stack([text[start + 1 : start + 33] for start in starts])
            b.backward(criterion(model(x).flatten(0, 1), y.flatten()), optimizer)
            optimizer.step()
            optimizer.zero_grad()


def shoot(page: Path, picture: Path, width: int) -> None:
    """The whole of a page, so many pixels wide."""
    application = QApplication.instance() or QApplication(sys.argv[:1])
    view = QWebEngineView()
    view.resize(width, 600)
    view.show()

    def take() -> None:
        view.grab().save(str(picture))
        with Image.open(picture) as taken:  # few colours, and a tenth of the bytes
            taken.convert("RGB").quantize(64, dither=Image.Dither.NONE).save(picture, optimize=True)
        application.quit()

    def sized(height: float) -> None:
        view.resize(width, int(height) + 20)
        QTimer.singleShot(2000, take)

    view.loadFinished.connect(
        lambda _: view.page().runJavaScript("document.documentElement.getBoundingClientRect().height", sized)
    )
    view.load(QUrl.fromLocalFile(str(page)))
    application.exec()


def estimate(folder: Path) -> None:
    (folder / "job.py").write_text(JOB)
    options = [*ESTIMATE.split(), "--picture", str(IMAGES / "memory.png")]
    subprocess.run([*COMMAND, "estimate", *options], check=True, cwd=folder)


def report(folder: Path) -> None:
    record(folder / "fp16")
    subprocess.run([*COMMAND, "report", "fp16", "--html", "fp16.html"], check=True, cwd=folder)
    environment = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(COLUMNS - 2), "TERM": "xterm-256color"}
    shown = subprocess.run(
        [*COMMAND, "report", "fp16"], check=True, cwd=folder, env=environment, capture_output=True, text=True
    )
    with open(os.devnull, "w") as nowhere:
        terminal = Console(record=True, width=COLUMNS, file=nowhere)
        terminal.print(Text.from_ansi(f"$ booster report fp16\n{shown.stdout.rstrip()}"))
    (folder / "terminal.html").write_text(terminal.export_html(inline_styles=True, theme=MONOKAI, code_format=PAGE))
    shoot(folder / "terminal.html", IMAGES / "report_terminal.png", 900)
    shoot(folder / "fp16.html", IMAGES / "report_page.png", 760)


if __name__ == "__main__":
    for part in sys.argv[1:] or ("estimate", "report"):
        with tempfile.TemporaryDirectory() as name:
            {"estimate": estimate, "report": report}[part](Path(name))
