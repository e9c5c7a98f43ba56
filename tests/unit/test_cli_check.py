"""booster check: a report that holds on this machine, and four things called apex are distinguished."""

import json
import sys

import pytest
import torch

from booster.cli import main
from booster.cli.machine_commands import Probe
from booster.common.installed import find_apex


@pytest.fixture(autouse=True)
def short_probes(monkeypatch):
    monkeypatch.setattr("booster.cli.machine_commands._PROBE_SECONDS", 0.01)


def test_json_report_holds_versions_devices_backends_and_a_speed_or_a_reason_for_each_precision(capsys):
    assert main(["check", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["versions"]["torch"] == torch.__version__
    assert report["versions"]["python"] == sys.version.split()[0]
    assert "gloo" in report["backends"]
    assert len(report["devices"]["cuda"]) == torch.cuda.device_count()
    probes = {(probe["precision"], probe["operation"]): probe for probe in report["precisions"]}
    assert set(probes) == {(p, o) for p in ("fp32", "bf16", "fp16") for o in ("matmul", "convolution", "attention")} | {
        ("fp8", "matmul")
    }
    for probe in probes.values():
        assert (probe["error"] is None) == (probe["gflops"] is not None)
    assert probes["fp32", "matmul"]["gflops"] > 0
    if report["probed_device"] == "cpu":
        assert probes["fp8", "matmul"]["shape"] == "128x128x128"


def test_the_table_names_each_precision_and_apex(capsys):
    assert main(["check"]) == 0
    text = capsys.readouterr().out
    for word in ("torch", "backends", "apex", "fp32", "bf16", "fp16", "fp8", "GFLOP/s"):
        assert word in text


def test_units_for_halves_are_named_with_what_onednn_uses_of_them_and_what_is_computed_in_float32(capsys, monkeypatch):
    flags = dict.fromkeys(("avx512_bf16", "avx512_fp16"), True)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: flags)
    found = []
    for limit in ("", "AVX512_CORE_BF16", "AVX2"):
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
        assert main(["check"]) == 0
        found.append(capsys.readouterr().out)
    assert "units for halves: AVX512-FP16, AVX512-BF16\n" in found[0]
    assert "units for halves: AVX512-FP16 (not used by oneDNN), AVX512-BF16\n" in found[1]
    assert "units for halves: AVX512-FP16 (not used by oneDNN), AVX512-BF16 (not used by oneDNN)\n" in found[2]
    every = "attention, convolutions, matrix products, recurrent layers"
    assert "; attention, convolutions, recurrent layers of fp16 in float32" in found[0]
    assert f"'auto' computes {every} of bf16 and fp16 in float32" in found[2]


def test_a_cpu_that_is_fast_in_half_has_no_line_of_what_is_computed_in_float32(capsys, monkeypatch):
    monkeypatch.setattr("booster.mixed_precision.hardware.slow_products", lambda dtype: frozenset())
    assert main(["check"]) == 0
    assert "half_products" not in capsys.readouterr().out


def test_a_precision_that_does_not_run_is_reported_and_the_others_are_timed(capsys, monkeypatch):
    def refuse(device):
        raise RuntimeError("no fp8 on this device\nsecond line")

    monkeypatch.setattr("booster.cli.machine_commands._fp8_matmul", refuse)
    assert main(["check"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("fp8")][0].endswith("does not run here: no fp8 on this device")
    assert any(line.startswith("fp32") and line.endswith("1.00x") for line in lines)


def test_a_precision_that_is_hundreds_of_times_slower_is_not_told_to_have_no_speed(capsys, monkeypatch):
    probes = [Probe("fp32", "convolution", "4x4", 80.0, 1.0), Probe("fp16", "convolution", "4x4", 0.3, 270.0)]
    monkeypatch.setattr("booster.cli.machine_commands.probe_all", lambda device, seconds: probes)
    assert main(["check"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines if " convolution " in line] == ["1.00x", "0.004x"]


def make_package(root, files, metadata):
    for name in files:
        (root / "apex" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "apex" / name).write_text("raise SystemExit('imported!')\n")
    info = root / "apex-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: apex\n{metadata}")


@pytest.mark.parametrize(
    ("files", "metadata", "kind"),
    [
        (["__init__.py", "amp/frontend.py", "amp/_initialize.py"], "Version: 0.1\n", "with_amp"),
        (["__init__.py", "optimizers/__init__.py", "normalization/__init__.py"], "Version: 0.1\n", "without_amp"),
        (["__init__.py", "lib/__init__.py"], "Version: 0.9.10.dev0\nRequires-Dist: pyramid>1.1.2\n", "unrelated"),
        (["__init__.py", "lib/__init__.py"], "Version: 1.0\nRequires-Dist: Velruse\n", "unrelated"),
        (["__init__.py"], "Version: 3.0\n", "unknown"),
    ],
)
def test_each_package_called_apex_is_recognised_without_importing_it(tmp_path, files, metadata, kind):
    make_package(tmp_path, files, metadata)
    finding = find_apex([str(tmp_path)])
    assert finding.kind == kind
    assert finding.location == str(tmp_path / "apex")
    assert "apex" not in sys.modules


def test_absent_apex_is_reported_as_absent(tmp_path):
    assert find_apex([str(tmp_path)]).kind == "absent"
