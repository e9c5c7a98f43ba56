"""Which engine `fp16_apex` runs on, and what it says, for each of the packages that are called apex."""

import contextlib
import importlib
import importlib.util
import logging
import re
import sys
from pathlib import Path

import pytest
import torch
from programs import run
from torch import nn

import booster
from booster import Booster
from booster.common.installed import find_apex
from booster.mixed_precision import FP16ApexMixedPrecision
from booster.mixed_precision.apex import real
from booster.mixed_precision.policy import InProcess
from booster.update.context import UpdateOptions

ROOT = Path(booster.__file__).parents[1]

# What importing the web toolkit does today.
TOOLKIT = "raise ImportError(\"cannot import name 'UnencryptedCookieSessionFactoryConfig' from 'pyramid.session'\")\n"

# An apex.amp in little, which prints nothing, casts nothing and scales by 8; `{broken}` is the bug of its weight cache.
AMP = """
import contextlib, types
import torch

class Scaler:
    scale, unskipped = 8.0, 0
    def loss_scale(self):
        return self.scale

_amp_state = types.SimpleNamespace(loss_scalers=[])

def initialize(models, optimizers=None, enabled=True, opt_level="O1", cast_model_type=None, patch_torch_functions=None,
               keep_batchnorm_fp32=None, master_weights=None, loss_scale=None, cast_model_outputs=None, num_losses=1,
               verbosity=1, min_loss_scale=None, max_loss_scale=2.0**24):
    _amp_state.loss_scalers = [Scaler() for _ in range(num_losses)]
    models.initialized_with = opt_level
    if optimizers is None:
        return models
    for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
        optimizer._amp_stash = types.SimpleNamespace(already_patched=False)
        optimizer.zero_grad = lambda old=optimizer.zero_grad: old()
    return models, optimizers

@contextlib.contextmanager
def scale_loss(loss, optimizers, loss_id=0, model=None, delay_unscale=False, delay_overflow_check=False):
    scaler = _amp_state.loss_scalers[loss_id]
    yield loss.float() * scaler.loss_scale()
    if delay_unscale:
        return
    grads = [p.grad for o in optimizers for g in o.param_groups for p in g["params"] if p.grad is not None]
    for grad in grads:
        grad.div_(scaler.loss_scale())
    scaler.unskipped += 1
    if not all(bool(grad.isfinite().all()) for grad in grads):
        scaler.scale, scaler.unskipped = scaler.scale / 2, 0
        for optimizer in optimizers:
            step = optimizer.step
            def skip(closure=None, optimizer=optimizer, step=step):
                optimizer.step, optimizer._amp_stash.already_patched = step, False
            optimizer.step, optimizer._amp_stash.already_patched = skip, True

def state_dict():
    return {f"loss_scaler{i}": {"loss_scale": s.scale, "unskipped": s.unskipped} for i, s in enumerate(_amp_state.loss_scalers)}

def load_state_dict(state):
    for scaler, entry in zip(_amp_state.loss_scalers, state.values()):
        scaler.scale, scaler.unskipped = entry["loss_scale"], entry["unskipped"]
"""
UTILS = """
def maybe_half(x):
    return x.half()

def cached_cast(cast, x, cache):
    if x in cache:
        cache[x].grad_fn.next_functions[{edge}][0].variable
    else:
        cache[x] = cast(x)
    return cache[x]
"""


def install(folder, files, version="0.1", requires=""):
    for name, text in files.items():
        path = folder / "apex" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    info = folder / f"apex-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: apex\nVersion: {version}\n{requires}")


def nvidia(edge=0, amp=AMP):
    files = dict.fromkeys(("__init__.py", "amp/frontend.py", "amp/_initialize.py"), "")
    return {**files, "amp/__init__.py": amp, "amp/utils.py": UTILS.format(edge=edge)}


@pytest.fixture(autouse=True)
def no_other_apex(monkeypatch):
    """Nothing called apex is on the path, also where other tests put folders with a script of that name on it."""
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if find_apex([folder]).kind == "absent"])


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder at the front of the path; whatever is imported from it is forgotten afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "apex"]:
        del sys.modules[name]
    importlib.invalidate_caches()


def train_a_step(precision):
    model = nn.Linear(4, 2)
    booster = Booster("cpu", precision)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    booster.backward(model(torch.ones(3, 4)).float().sum(), optimizer)
    return booster, model, optimizer


def engine_line(caplog):
    lines = [record for record in caplog.records if "fp16_apex runs on" in record.getMessage()]
    assert len(lines) == 1
    return lines[0]


@pytest.mark.parametrize(
    ("files", "version", "requires", "message", "level"),
    [
        (None, None, None, "its own engine: apex is not installed", logging.INFO),
        (
            {"__init__.py": "", "optimizers/__init__.py": "", "normalization/__init__.py": ""},
            "0.1",
            "",
            "its own engine: the apex at .* has no apex.amp: NVIDIA removed it on 2025-05-08.*e13873de",
            logging.INFO,
        ),
        (
            {"__init__.py": TOOLKIT},
            "0.9.10.dev0",
            "Requires-Dist: pyramid>1.1.2\nRequires-Dist: velruse\n",
            "its own engine: the package called apex at .* is a web toolkit from PyPI.*pip uninstall apex",
            logging.WARNING,
        ),
        (
            {"__init__.py": TOOLKIT},
            "3.0",
            "",
            "its own engine: the package called apex at .* is not NVIDIA's",
            logging.INFO,
        ),
        (nvidia(), "0.1", "", "its own engine: the apex.amp that is installed runs on CUDA only", logging.INFO),
    ],
    ids=["absent", "without amp", "web toolkit", "unknown", "with amp, on CPU"],
)
def test_auto_runs_natively_and_says_why_without_importing_a_wrong_apex(
    site, caplog, files, version, requires, message, level
):
    if files is not None:
        install(site, files, version, requires)
    with caplog.at_level(logging.INFO):
        _, _, optimizer = train_a_step(FP16ApexMixedPrecision(max_loss_scale=8.0, verbosity=0))
    assert optimizer.step()
    line = engine_line(caplog)
    assert line.levelno == level
    assert re.search(message, line.getMessage())
    assert "apex" not in sys.modules


def test_the_web_toolkit_in_a_fresh_process_does_no_harm(tmp_path):
    install(tmp_path, {"__init__.py": TOOLKIT}, "0.9.10.dev0", "Requires-Dist: pyramid>1.1.2\n")
    script = (
        "import logging, torch; logging.basicConfig()\n"
        "from booster import Booster\n"
        "booster = Booster('cpu', 'fp16_apex')\n"
        "model = torch.nn.Linear(4, 2)\n"
        "model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))\n"
        "booster.backward(model(torch.ones(3, 4)).float().mean() / 4, optimizer)\n"
        "print(optimizer.step().applied)\n"
    )
    path = f"{tmp_path}:{ROOT}"
    done = run("-c", script, environment={"PYTHONPATH": path, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True"]
    assert "web toolkit from PyPI" in done.stderr


def test_native_does_not_even_look(site, caplog):
    install(site, nvidia())
    with caplog.at_level(logging.INFO):
        train_a_step(FP16ApexMixedPrecision(backend="native", verbosity=0))
    assert "its own engine: as backend='native' asks" in engine_line(caplog).getMessage()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (None, "apex is not installed.*e13873de.*PyPI is another project.*backend='native'"),
        (nvidia(edge=1), "fails with this torch when a weight is used twice: IndexError"),
        (nvidia(amp="def initialize(models): pass\n"), "has no .*'cast_model_outputs'"),
        (nvidia(amp="raise OSError('undefined symbol: _ZN3c10')\n"), "does not import: OSError: undefined symbol"),
    ],
    ids=["absent", "cache bug", "another initialize", "broken build"],
)
def test_a_forced_apex_that_cannot_work_raises_import_error_with_the_reason(site, files, message):
    if files is not None:
        install(site, files)
    with pytest.raises(ImportError, match=f"(?s)backend='apex' needs an apex with apex.amp.*{message}"):
        train_a_step(FP16ApexMixedPrecision(backend="apex", verbosity=0))


def test_the_cache_bug_matters_only_where_functions_are_patched(site, caplog):
    install(site, nvidia(edge=1))
    with caplog.at_level(logging.INFO):
        train_a_step(FP16ApexMixedPrecision("O2", backend="apex", verbosity=0))
    assert "runs on the real apex.amp: found at" in engine_line(caplog).getMessage()


def test_a_forced_apex_scales_skips_and_reports_through_booster(site):
    install(site, nvidia())
    booster, model, optimizer = train_a_step(FP16ApexMixedPrecision(backend="apex", num_losses=2, verbosity=0))
    plain = model.unwrap()
    assert plain.initialized_with == "O1"
    torch.testing.assert_close(plain.weight.grad, torch.full((2, 4), 3.0))
    assert optimizer.clip_grad_by_norm(1.0) > 1.0
    before = plain.weight.detach().clone()
    assert optimizer.step()
    step = (before - plain.weight) / 0.1  # the clipped gradient; the bias has 18 / 90 of its square
    torch.testing.assert_close(step.norm() ** 2, torch.tensor(0.8), rtol=1e-3, atol=0)
    optimizer.zero_grad(set_to_none=True)
    with booster.no_sync(model):
        booster.backward(model(torch.ones(3, 4)).sum(), optimizer)
    torch.testing.assert_close(plain.weight.grad, torch.full((2, 4), 24.0))  # delayed, so still scaled
    optimizer.zero_grad()
    booster.backward(model(torch.ones(3, 4)).sum() * torch.inf, optimizer, loss_id=1)
    before = plain.weight.detach().clone()
    assert not optimizer.step()
    assert torch.equal(plain.weight, before)
    state = optimizer.state_dict()["booster"]["loss_scaler"]
    assert [entry["loss_scale"] for entry in state.values()] == [8.0, 4.0]
    with pytest.raises(RuntimeError, match="initialises once.*backend='native' for several"):
        booster.boost(nn.Linear(2, 2))


def test_a_forced_apex_takes_several_optimizers_of_one_model(site):
    install(site, nvidia())
    booster = Booster("cpu", FP16ApexMixedPrecision(backend="apex", verbosity=0))
    plain = nn.Linear(4, 2)
    before = [param.detach().clone() for param in plain.parameters()]
    optimizers = [torch.optim.SGD([plain.weight], lr=0.1), torch.optim.SGD([plain.bias], lr=0.01)]
    model, optimizers, *_ = booster.boost(plain, optimizers)
    booster.backward(model(torch.ones(3, 4)).sum(), optimizers)
    assert all(optimizer.step() for optimizer in optimizers)
    for optimizer in optimizers:
        optimizer.zero_grad()
    torch.testing.assert_close(plain.weight, before[0] - 0.3)
    torch.testing.assert_close(plain.bias, before[1] - 0.03)


class FlatShard(InProcess):
    is_whole = False


def test_the_real_apex_is_refused_where_parameters_are_divided_among_ranks():
    with pytest.raises(ValueError, match="backend='native'"):
        real.configure(
            None,
            torch.nn.Linear(2, 2),
            None,
            None,
            arguments={},
            scale_window=1,
            placement=FlatShard(),
            device=torch.device("cpu"),
            options=UpdateOptions(),
        )


def test_a_pass_that_raises_leaves_the_context_of_the_real_apex(site):
    install(site, nvidia())
    booster, model, optimizer = train_a_step(FP16ApexMixedPrecision(backend="apex", verbosity=0))
    left = []
    scale_loss = optimizer._update.gradients._amp.scale_loss

    @contextlib.contextmanager
    def watched(*args, **options):
        with scale_loss(*args, **options) as scaled:
            try:
                yield scaled
            except RuntimeError as error:
                left.append(str(error))
                raise

    optimizer._update.gradients._amp.scale_loss = watched
    loss = model(torch.ones(3, 4)).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        booster.backward(loss * 1.0, optimizer)
    assert left == ["the backward pass raised"]
    booster.backward(model(torch.ones(3, 4)).sum(), optimizer)
    assert optimizer.step()


class Editable:
    """What an editable install puts into `sys.meta_path`."""

    def __init__(self, folder):
        self.folder = folder

    def find_spec(self, name, path=None, target=None):
        if name != "apex":
            return None
        where = self.folder / "apex"
        return importlib.util.spec_from_file_location(
            name, where / "__init__.py", submodule_search_locations=[str(where)]
        )


def test_an_editable_install_is_found_without_importing_it(tmp_path, monkeypatch):
    install(tmp_path, {**nvidia(), "__init__.py": TOOLKIT})
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Editable(tmp_path)])
    finding = find_apex()
    assert (finding.kind, finding.location) == ("with_amp", str(tmp_path / "apex"))
    assert "apex" not in sys.modules


@pytest.mark.parametrize(
    ("missing", "version", "requires", "kind"),
    [
        ("amp/_initialize.py", "0.1", "", "unknown"),
        ("amp/frontend.py", "0.1", "", "unknown"),
        (None, "0.9.10.dev0", "", "unrelated"),
        (None, "3.0", "Requires-Dist: pyramid>1.1.2\n", "unrelated"),
        (None, "0.1", "", "with_amp"),
    ],
)
def test_an_apex_with_amp_is_told_by_its_files_and_the_web_toolkit_by_its_metadata(
    tmp_path, missing, version, requires, kind
):
    files = nvidia()
    files.pop(missing, None)
    install(tmp_path, files, version, requires)
    assert find_apex([str(tmp_path)]).kind == kind


def test_registered_functions_are_refused_where_the_real_apex_would_ignore_them(site):
    install(site, nvidia())
    precision = FP16ApexMixedPrecision(backend="apex", verbosity=0)
    precision.register_half_function(torch, "sigmoid")
    with pytest.raises(RuntimeError, match="functions are registered.*backend='native'"):
        train_a_step(precision)
