"""booster env: what a bug report needs of a machine, at once, and no secret."""

import json
import sys

import torch

import booster
from booster.cli import main


def report(capsys):
    assert main(["env", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_report_holds_versions_build_machine_devices_and_backends(capsys):
    found = report(capsys)
    assert found["versions"]["booster"] == booster.__version__
    assert found["versions"]["python"] == sys.version.split()[0]
    assert found["versions"]["torch"] == torch.__version__
    assert found["machine"]["cores"] >= 1
    assert found["machine"]["memory_gib"] > 0
    assert found["machine"]["cpu"]
    assert len(found["cuda"]["devices"]) == torch.cuda.device_count()
    assert "gloo" in found["backends"]


def test_installed_optional_packages_are_listed_with_versions_and_absent_ones_are_not(capsys, monkeypatch):
    versions = {"safetensors": "0.8.0", "timm": "1.0.31"}
    monkeypatch.setattr("booster.cli.machine_commands.version_of", versions.get)
    assert report(capsys)["packages"] == {"safetensors": "0.8.0", "timm": "1.0.31"}


def test_settings_of_torch_that_change_numbers_are_reported(capsys, monkeypatch):
    assert report(capsys)["settings"]["deterministic_algorithms"] == "off"
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert report(capsys)["settings"]["deterministic_algorithms"] == "warn"
    finally:
        torch.use_deterministic_algorithms(False)


def test_variables_that_steer_training_are_reported_and_others_are_not(capsys, monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("HOME_ADDRESS", "here")
    variables = report(capsys)["variables"]
    assert variables["NCCL_DEBUG"] == "INFO"
    assert variables["SLURM_JOB_ID"] == "17"
    assert "HOME_ADDRESS" not in variables


def test_a_variable_named_as_a_secret_is_listed_without_its_value(capsys, monkeypatch):
    for name in ("SLURM_JWT", "TORCH_HUB_TOKEN", "CUDA_API_KEY", "NCCL_PASSWORD", "OMPI_MCA_secret"):
        monkeypatch.setenv(name, "swordfish")
    assert main(["env"]) == 0
    table = capsys.readouterr().out
    assert "swordfish" not in table
    assert table.count("(not shown)") == 5


def test_the_table_has_every_line_of_the_json(capsys):
    found = report(capsys)
    assert main(["env"]) == 0
    table = capsys.readouterr().out
    for group in ("versions", "packages", "machine", "settings"):
        for name, value in found[group].items():
            if value is not None:
                assert any(line.split()[0] == name and str(value) in line for line in table.splitlines()), name
