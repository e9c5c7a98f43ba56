"""The progress bar of one run, on rank 0."""

from history import History
from report import make_console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from booster import DistCoordinator

REFRESH_STEPS = 10  # reading the loss waits for the device, so the bar does it only this often


class ProgressBar:
    """A bar with loss and images per second; where there are any, loss scale and skipped steps. Other ranks show nothing."""

    def __init__(self, title: str, num_steps: int) -> None:
        self._shown = DistCoordinator().is_master()
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            console=make_console(),
            expand=True,
            disable=not self._shown,
        )
        self._task = self._progress.add_task(title, total=num_steps, status="")
        self._num_steps = num_steps

    def __enter__(self) -> "ProgressBar":
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def show(self, history: History, loss: object, optimizer: object) -> None:
        """Move to the step that `history` has reached."""
        step = history.num_steps
        if not self._shown or (step % REFRESH_STEPS and step != self._num_steps):
            return
        status = f"loss {loss.item():.3f}  {history.images_per_second:,.0f} img/s"
        if optimizer.loss_scale != 1.0:
            status += f"  scale {optimizer.loss_scale:g}"
        if optimizer.num_skipped:
            status += f"  skips {optimizer.num_skipped}"
        self._progress.update(self._task, completed=step, status=status)
