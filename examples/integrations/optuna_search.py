"""Optuna: search over learning rate and precision, with trials that are pruned early.

    pip install optuna
    python examples/integrations/optuna_search.py

A Booster belongs to one trial: make model, optimizer and Booster inside the objective. A run with all steps skipped
raises LossScaleError, which Optuna may count as a failed trial.
"""

import optuna
import torch

import booster

torch.manual_seed(0)
X = torch.randn(128, 8)
Y = X[:, :3].argmax(1)


def objective(trial: optuna.Trial) -> float:
    booster.seed_everything(0)
    rate = trial.suggest_float("lr", 1e-4, 1e-1, log=True)
    precision = trial.suggest_categorical("precision", ["fp32", "bf16", "fp16"])
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3))
    b = booster.Booster(mixed_precision=precision)
    model, optimizer, criterion, _, _ = b.boost(
        model, torch.optim.AdamW(model.parameters(), rate), torch.nn.CrossEntropyLoss()
    )
    for step in range(20):
        loss = criterion(model(X), Y)
        b.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        trial.report(loss.item(), step)
        if trial.should_prune():
            raise optuna.TrialPruned
    return loss.item()


def main() -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    pruner = optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=5)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0), pruner=pruner)
    study.optimize(objective, n_trials=12, catch=(booster.LossScaleError,))
    print(f"optuna: best loss {study.best_value:.3f} with {study.best_params}")


if __name__ == "__main__":
    main()
