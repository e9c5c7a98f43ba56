"""What one training run did, step by step, as a JSON file."""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class History:
    """label: what the run was, for legends. share: of the parameters, on rank 0. loss: mean over each step's whole batch."""

    label: str
    options: dict[str, str]
    share: float = 1.0
    loss: list[float] = field(default_factory=list)
    loss_scale: list[float] = field(default_factory=list)  # carried by each step's gradients; 1.0 without a scaler
    skipped: list[bool] = field(default_factory=list)
    validation_loss: float | None = None
    seconds: float = 0.0  # of training, without validation

    def state_dict(self) -> dict[str, list]:
        """What a checkpoint keeps of it."""
        return {"loss": self.loss, "loss_scale": self.loss_scale, "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, list]) -> None:
        self.loss, self.loss_scale, self.skipped = state["loss"], state["loss_scale"], state["skipped"]

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> "History":
        """The history in a file that `save` wrote; ValueError for another file."""
        try:
            return cls(**json.loads(path.read_text()))
        except (TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is not a history that train.py wrote: {error}") from error
