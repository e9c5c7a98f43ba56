"""SECURITY.md line by line: each of its claims is held by tests, or says plainly what is not protected."""

import ast
import inspect
import json
import os
import re
import sys
from functools import cache
from ipaddress import ip_address
from pathlib import Path

import pytest
import torch
from ports import listening
from resealed import content_of, header_and_data, seal, write_safetensors
from test_checkpoint import job

from booster.checkpoint import CheckpointError
from booster.cli import main

ROOT = Path(__file__).resolve().parents[2]
NOTHING = "it says what is not protected, or what to do"  # and so there is nothing to test
FILES, FUZZED = "unit/test_hostile_files.py", "unit/test_hostile_checkpoints.py"
WEIGHTS = "unit/test_hostile_weights.py"
RECORDS, JOBS, PORTS = "unit/test_hostile_records.py", "unit/test_two_jobs.py", "distributed/test_open_ports.py"
RUN, LAUNCHER, HERE = "unit/test_cli_run.py", "distributed/test_launcher.py", "unit/test_security.py"

# Each row of the table by what it is about, and each sentence of it by how that begins: the tests that hold it, FILE NAME.
CLAIMS = {
    "a checkpoint or weights file": {
        "loading runs no code": [
            f"{FILES} a_file_that_asks_for_anything_but_its_tensors_is_refused",
            f"{HERE} no_shell_no_pickle_and_no_code_of_a_file_is_run_by_the_library",
        ],
        "Safetensors is the safe form": [
            f"{WEIGHTS} changed_weights_are_refused_with_nothing_touched_or_load_as_others_read_them",
            f"{WEIGHTS} names_of_one_tensor_whose_numbers_differ_in_a_file_are_refused",
        ],
        "Sizes that a manifest": [
            f"{FILES} a_manifest_that_claims_what_is_not_there_is_refused_by_every_reader",
            f"{FILES} chunks_are_the_whole_just_if_they_cover_each_element_once",
            f"{FILES} headers_are_read_as_strictly_as_safetensors_reads_them",
            f"{FILES} what_is_no_file_is_refused_at_once",
            f"{FILES} weights_that_are_no_file_are_refused_at_once",
        ],
        "What does not load": [
            f"{FUZZED} a_changed_and_sealed_checkpoint_is_an_error_or_loads_as_it_says_and_nothing_between",
            f"{WEIGHTS} changed_weights_are_refused_with_nothing_touched_or_load_as_others_read_them",
            "unit/test_hostile_loaders.py "
            "a_position_that_no_loader_was_in_is_refused_at_the_load_and_nothing_is_touched",
        ],
    },
    "a file of `torch.save` from": {
        "that it runs no code": [
            f"{FILES} a_file_that_asks_for_anything_but_its_tensors_is_refused",
            f"{FILES} a_file_of_something_else_than_tensors_by_name_is_refused",
        ],
        "Have it written": NOTHING,
    },
    "the memory that a checkpoint": {
        "what the model and optimizer take": [
            f"{FUZZED} a_changed_and_sealed_checkpoint_is_an_error_or_loads_as_it_says_and_nothing_between",
            f"{FILES} a_text_takes_the_size_of_the_files_and_64_mib_at_most_or_is_refused",
        ],
        "Of that, manifest and state": [
            f"{FILES} the_largest_texts_that_are_read_take_no_more",
            f"{FILES} a_text_takes_the_size_of_the_files_and_64_mib_at_most_or_is_refused",
            f"{HERE} what_texts_may_take_is_what_is_written_of_them",
        ],
    },
    "the time that such a file takes": {
        "seconds, for what is small": [
            f"{FUZZED} a_changed_and_sealed_checkpoint_is_an_error_or_loads_as_it_says_and_nothing_between",
            f"{WEIGHTS} a_conversion_reads_the_header_of_a_file_once",
        ],
        "An endless dataset": NOTHING,
    },
    "hashes in a checkpoint": {
        "find damage": ["unit/test_checkpoint_faults.py damage_is_an_error_or_the_right_state"],
        "They are no signature": [f"{HERE} hashes_find_damage_and_are_no_signature"],
    },
    "a record folder": {
        "data alone, a line at a time": [
            f"{RECORDS} a_line_without_end_is_refused_before_it_is_read",
            "unit/test_hostile_record_fuzz.py a_changed_record_is_refused_by_file_and_line_or_read_by_every_reader",
        ],
        "Names and texts are escaped": [
            f"{RECORDS} a_page_has_no_tag_that_a_text_of_the_record_brings",
            f"{RECORDS} names_reach_the_terminal_as_they_are_spelled_and_do_nothing_there",
            f"{RECORDS} names_of_files_reach_the_terminal_as_they_are_spelled",
            f"{WEIGHTS} an_error_names_what_a_file_holds_as_a_terminal_may_show_it",
            f"{HERE} checkpoint_commands_show_names_as_they_are_spelled",
        ],
    },
    "the folder that a run records into": {
        "files of it are not written through": [
            f"{RECORDS} a_record_does_not_write_through_a_link_or_into_a_pipe",
            f"{RECORDS} a_page_is_not_written_through_a_link_and_replaces_a_page",
            "unit/test_cli_estimate.py a_picture_is_not_written_through_a_link",
        ],
        "The folder itself": NOTHING,
    },
    "the folder that several jobs save into": {
        "a living job's save": [
            f"{JOBS} two_jobs_save_into_one_folder_and_lose_nothing",
            f"{JOBS} a_living_writer_is_left_alone_and_named_to_who_wants_the_same_number",
            f"{JOBS} what_a_dead_predecessor_left_is_cleared_at_once",
            f"{JOBS} a_lock_that_says_what_no_writer_says_goes_by_its_age",
            f"{JOBS} what_is_no_file_in_place_of_a_lock_is_named_at_once_and_no_other_step_minds",
        ],
        "Nothing is deleted through a link": [f"{HERE} what_links_of_a_root_lead_to_is_left_alone"],
        "Who may write the folder": NOTHING,
    },
    "hosts, paths and options": {
        "no shell reads them": [
            f"{HERE} no_shell_no_pickle_and_no_code_of_a_file_is_run_by_the_library",
            f"{LAUNCHER} arguments_with_spaces_quotes_and_dashes_reach_the_script_intact",
            f"{RUN} a_remote_shell_reads_directory_and_arguments_as_they_were_given_and_variables_from_stdin",
            f"{RUN} a_faulty_hostfile_is_refused_with_file_and_line",
        ],
    },
    "a `booster run` that is killed": {
        "leaves no process": [
            f"{LAUNCHER} a_launcher_that_is_killed_leaves_no_rank_nor_what_ranks_have_started_nor_its_folder"
        ],
        "A subprocess that made its own session": NOTHING,
    },
    "values given by `booster run --env NAME`": {
        "are in no argument list": [
            f"{RUN} a_remote_shell_reads_directory_and_arguments_as_they_were_given_and_variables_from_stdin",
            f"{RUN} each_host_gets_its_rank_its_slots_and_only_the_named_variables",
        ],
        "`--env NAME=VALUE` is": NOTHING,
    },
    "what ranks of the library tell each other": {
        "is numbers and JSON": ["unit/test_imports.py no_pickle_travels_between_ranks"],
        "What a user of the ports": [
            "unit/test_hang_watchdog.py an_answer_that_no_rank_gives_counts_as_none",
            "unit/test_hang_watchdog.py what_others_wrote_into_the_store_is_warned_of_in_one_line_that_a_terminal_may_show",
        ],
    },
    "the workflows": {
        "name the actions": ["unit/test_distribution.py every_workflow_and_form_is_yaml_and_calls_targets_that_exist"],
    },
    "the training script": {"are run": NOTHING},
    "the ports of a job on one machine": {
        "the launcher's store and the sockets": [
            f"{PORTS} on_one_machine_nothing_of_a_job_listens_but_on_loopback",
            f"{HERE} ranks_of_one_machine_are_told_the_loopback_interface_unless_the_user_names_one",
        ],
        "The launcher unpickles nothing": [
            f"{PORTS} what_another_user_writes_into_the_store_of_a_job_is_not_run_as_its_owner"
        ],
        "Other users of the same machine": NOTHING,
    },
    "the ports of a job on several machines": {
        "node 0 of `booster run` listens": [
            f"{PORTS} of_several_nodes_the_first_listens_on_the_interface_that_master_addr_names",
            f"{HERE} a_store_that_listens_on_all_interfaces_says_so",
        ],
        "Nothing asks who connects": NOTHING,
    },
    "other launchers": {
        "their own matter": NOTHING,
        "torchrun and `torch.distributed`": [f"{HERE} torch_listens_everywhere_and_its_rendezvous_unpickles"],
        "`launch`, `launch_from_slurm`": NOTHING,
    },
    "the network between ranks": {"not protected": NOTHING, "Process groups of torch": NOTHING},
    "the environment": {
        "`booster env` prints": [
            "unit/test_cli_env.py a_variable_named_as_a_secret_is_listed_without_its_value",
            "unit/test_cli_env.py variables_that_steer_training_are_reported_and_others_are_not",
        ],
        "Read it before": NOTHING,
    },
}


def rows(text):
    """What the table of SECURITY.md promises: (what it is about, sentences) of each row."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [(about, re.split(r"(?<=\.) (?=[A-Z`t])", promise)) for about, promise in lines if about != "input"]


def unheld(text, claims):
    """Yield what `text` says and no entry of `claims` is for, what is for nothing, and tests that are not there."""
    found = rows(text)
    for about, sentences in found:
        own = [each for each in claims if about.startswith(each)]
        if len(own) != 1:
            yield f"no row of CLAIMS, or several: {about}"
            continue
        for sentence in sentences:
            if sum(sentence.startswith(begin) for begin in claims[own[0]]) != 1:
                yield f"no entry of CLAIMS, or several: {about}: {sentence}"
        for begin in claims[own[0]]:
            if not any(sentence.startswith(begin) for sentence in sentences):
                yield f"SECURITY.md does not say: {own[0]}: {begin}"
    for about in claims:
        if not any(each.startswith(about) for each, _ in found):
            yield f"SECURITY.md has no row: {about}"
    for named in sorted(
        {test for own in claims.values() for tests in own.values() if tests != NOTHING for test in tests}
    ):
        if not is_there(*named.split()):
            yield f"no such test: {named}"
    for about, own in claims.items():
        for begin, tests in own.items():
            if not tests:
                yield f"no test: {about}: {begin}"


def is_there(file, name):
    return f"test_{name}" in functions_of(ROOT / "tests" / file)


@cache
def functions_of(path):
    """Names of the functions at the top of a file; none where there is no file."""
    body = ast.parse(path.read_text()).body if path.exists() else []
    return {node.name for node in body if isinstance(node, ast.FunctionDef)}


def test_each_claim_of_the_security_page_is_held_by_tests_that_exist():
    assert list(unheld((ROOT / "SECURITY.md").read_text(), CLAIMS)) == []


@pytest.mark.parametrize("fault", ["a row more", "a sentence more", "a row less", "no test", "a test that is gone"])
def test_a_claim_without_a_test_is_noticed(fault):
    text, claims = (ROOT / "SECURITY.md").read_text(), {about: dict(own) for about, own in CLAIMS.items()}
    if fault == "a row more":
        text += "| secrets | are kept |\n"
    elif fault == "a sentence more":
        text = text.replace("`--env NAME=VALUE` is", "Nobody sees them. `--env NAME=VALUE` is")
    elif fault == "a row less":
        text = "\n".join(line for line in text.splitlines() if not line.startswith("| the environment"))
    else:
        claims["the environment"]["`booster env` prints"] = [] if fault == "no test" else ["unit/test_cli_env.py gone"]
    assert len(list(unheld(text, claims))) == 1


def test_files_of_tests_that_the_page_names_exist():
    named = set(re.findall(r"test_\w+\.py", (ROOT / "SECURITY.md").read_text()))
    assert len(named) > 8
    assert named <= {path.name for path in (ROOT / "tests").rglob("test_*.py")}


# ---- claims that no other file of tests holds ----

OF_CODE = {"eval", "exec", "compile", "__import__"}
OF_OTHERS = {"pickle", "cPickle", "dill", "shelve", "marshal", "joblib", "cloudpickle", "commands"}


def runs_code(path):
    """Where a file of the library asks a shell, unpickles, or runs a text as code."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            found = OF_OTHERS & {name.partition(".")[0] for name in names}
        elif isinstance(node, ast.Call):
            called = node.func.id if isinstance(node.func, ast.Name) else ""
            attribute = ast.unparse(node.func) if isinstance(node.func, ast.Attribute) else ""
            options = {word.arg: ast.unparse(word.value) for word in node.keywords}
            found = OF_CODE & {called}
            found |= {attribute} & {"os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"}
            found |= {"shell="} if options.get("shell", "False") != "False" else set()
            found |= {"torch.load"} if attribute == "torch.load" and options.get("weights_only") != "True" else set()
            found |= {attribute} & {"numpy.load", "np.load"}
        else:
            continue
        for what in found:
            yield f"{path.name}:{node.lineno} {what}"


def test_no_shell_no_pickle_and_no_code_of_a_file_is_run_by_the_library(tmp_path):
    assert [found for path in sorted((ROOT / "booster").rglob("*.py")) for found in runs_code(path)] == []
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        "import pickle\nfrom dill import loads\nos.system('x')\nsubprocess.run('x', shell=True)\ntorch.load(f)\neval('1')\n"
    )
    assert [int(found.split(":")[1].split()[0]) for found in runs_code(wrong)] == [1, 2, 3, 4, 5, 6]


def test_what_texts_may_take_is_what_is_written_of_them():
    from booster.checkpoint import manifest, tensor_file
    from booster.common.untrusted_files import ROOM

    text = (ROOT / "SECURITY.md").read_text()
    (row,) = (line for line in text.splitlines() if line.startswith("| the memory that a checkpoint"))
    of_text = manifest.room_for_text(0) // 2**20
    assert manifest.room_for_text(2**30) == manifest.room_for_text(0) + 2**28
    assert re.findall(r"(\d+) MiB", row) == ["64", str(of_text), str(tensor_file._ROOM // 2**20), str(ROOM // 2**20)]


def test_hashes_find_damage_and_are_no_signature(tmp_path):
    first, target = job("fp32"), job("fp32", seed=1)
    folder = first.booster.save(tmp_path, *first.parts, step=1)
    content, (path,) = content_of(folder), folder.glob("*.safetensors")
    header, data = header_and_data(path)
    header.pop("__metadata__")
    start, stop = header["models/0/0.bias"]["data_offsets"]
    write_safetensors(path, header, data[:start] + bytes(stop - start) + data[stop:])
    with pytest.raises(CheckpointError, match="bytes|hash"):
        target.booster.load(folder, *target.parts)
    seal(folder, content)
    target.booster.load_model(target.parts[0], folder)
    assert not target.parts[0].state_dict()["0.bias"].any()


def test_checkpoint_commands_show_names_as_they_are_spelled(tmp_path, capsys):
    booster, name = job().booster, "\x1b]0;pwned\x07"
    model = torch.nn.Module()
    model.register_parameter(name, torch.nn.Parameter(torch.ones(2)))
    folder = booster.save(tmp_path, booster.boost(model)[0], step=1)
    content = content_of(folder)
    seal(folder, content | {"versions": content["versions"] | {name: name}})
    for argv in (["show"], ["show", "--json"], ["verify"], ["convert"]):
        out = [str(tmp_path / "out")] if argv == ["convert"] else []
        assert main(["checkpoint", *argv, str(folder), *out]) == 0
        (folder / "state.json").rename(folder / name)  # and once more, with an error
        main(["checkpoint", *argv, str(folder), *out])
        (folder / name).rename(folder / "state.json")
    said = capsys.readouterr()
    assert "\\x1b]0;pwned" in said.out
    assert "\x1b" not in said.out + said.err


def test_what_links_of_a_root_lead_to_is_left_alone(tmp_path):
    first, precious = job(), tmp_path / "precious"
    kept = first.booster.save(precious, *first.parts, step=1)
    root = tmp_path / "root"
    root.mkdir()
    before = {path: path.read_bytes() for path in kept.iterdir()}
    for name in (
        "step-0000000001",
        "step-0000000002",
        ".step-0000000007.writing-0123456789ab",
        "step-0000000003.replaced",
    ):
        (root / name).symlink_to(kept)
    for step in (2, 3, 9):
        first.booster.save(root, *first.parts, step=step, keep_last=1)
    assert {path: path.read_bytes() for path in kept.iterdir()} == before


@pytest.mark.parametrize("own", [{}, {"GLOO_SOCKET_IFNAME": "eth7", "NCCL_SOCKET_IFNAME": "eth8"}])
def test_ranks_of_one_machine_are_told_the_loopback_interface_unless_the_user_names_one(own, tmp_path, monkeypatch):
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    script = tmp_path / "seen.py"
    seen = tmp_path / "seen.json"
    script.write_text(
        f"import json, os; json.dump({{n: os.environ.get(n) for n in {names}}}, open({str(seen)!r}, 'w'))"
    )
    assert main(["run", "--nproc_per_node", "1", str(script)]) == 0
    assert json.loads(seen.read_text()) == (own or dict.fromkeys(names, "lo" if sys.platform == "linux" else "lo0"))


def test_a_store_that_listens_on_all_interfaces_says_so(monkeypatch, capsys):
    import socket

    from booster.cli.agent import _listener

    place = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("203.0.113.7", 0))  # of documentation: no interface has it
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: [place])
    assert _listener("elsewhere", 0, is_one_machine=False) is None
    assert "elsewhere is no address of this machine's interfaces, so port 0 listens on all" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/net/tcp")
def test_torch_listens_everywhere_and_its_rendezvous_unpickles():
    from datetime import timedelta

    from torch.distributed import TCPStore
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    before = set(listening({os.getpid()}))
    store = TCPStore("localhost", 0, None, True, timedelta(seconds=5), wait_for_workers=False)
    found = set(listening({os.getpid()})) - before
    assert [address for address, port in found if port == store.port and not ip_address(str(address)).is_loopback]
    assert "pickle.loads(" in inspect.getsource(dynamic_rendezvous)
