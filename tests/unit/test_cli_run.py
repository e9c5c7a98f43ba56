"""The command line up to the start of a process: options, hostfiles, ssh commands. Real jobs: tests/distributed."""

import json
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from importlib import import_module

import pytest

import booster
from booster.cli import main
from booster.cli import run_command as run
from booster.cli.agent import Stopped
from booster.cli.hosts import Host, chosen_hosts, is_local, read_hostfile, ssh_command
from booster.cli.run_command import parse


@pytest.fixture
def script(tmp_path, monkeypatch):
    """An existing script in the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    return "train.py"


@pytest.fixture
def attempts(monkeypatch):
    """Record what would be started, and end well."""
    recorded = []

    def record(attempt):
        recorded.append(attempt)
        return 0

    monkeypatch.setattr(run, "run_attempt", record)
    return recorded


@pytest.fixture
def hostfile(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("# the cluster\nnode1 slots=4\n\nuser@node2   # no slots\n10.0.0.3 slots=2\n")
    return str(file)


def refused(capsys, *arguments):
    """Run a command line that must be a usage error; return the reason."""
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    return output.err


def test_help_and_version_succeed(capsys):
    assert main(["--help"]) == main(["run", "--help"]) == main(["check", "--help"]) == 0
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"booster {booster.__version__}"


@pytest.mark.slow
def test_the_command_line_itself_imports_nothing_beyond_what_the_package_does():
    code = (
        "import sys, booster; before = set(sys.modules); from booster.cli import main; main(['--help'])\n"
        "main(['run', '--no_such_option'])\n"
        "heavy = {m for m in set(sys.modules) - before if m.startswith(('torch', 'numpy'))}\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=600)


def test_a_missing_or_unknown_command_is_a_usage_error(capsys):
    assert "no command given; choose one of run, check" in refused(capsys)
    assert "fly" in refused(capsys, "fly")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "required: script"),
        (["--nproc_per_node"], "expected one argument"),
        (["--nproc", "2", "train.py"], "--nproc"),
        (["nothing_here.py"], "script 'nothing_here.py' is not a file"),
        (["-m", "no_such_package.train"], "no package 'no_such_package'"),
        (["--nnodes", "2", "train.py"], "--nnodes 2 needs --node_rank"),
        (["--nnodes", "2", "--node_rank", "0", "train.py"], "--nnodes 2 needs --master_addr"),
        (["--nnodes", "2", "--node_rank", "2", "--master_addr", "a", "train.py"], "--node_rank 2 must be less than"),
        (["--host", "a,b", "--hostfile", "f", "train.py"], "--host and --hostfile were both given"),
        (["--include", "a", "--exclude", "b", "train.py"], "--include and --exclude were both given"),
        (["--include", "a", "train.py"], "--include selects from a hostfile"),
        (["--exclude", "a", "--host", "b", "train.py"], "--exclude selects from a hostfile"),
        (["--host", "a,a", "train.py"], "'a' is given twice"),
        (["--host", "-oProxyCommand=evil", "train.py"], "expected one argument"),
        (["--host=-oProxyCommand=evil", "train.py"], "'-oProxyCommand=evil' is not a host"),
        (["--host", "a", "--nnodes", "2", "train.py"], "--nnodes follows from the list of hosts"),
        (["--hostfile", "no_such_file", "train.py"], "hostfile 'no_such_file' cannot be read"),
        (["--ssh_port", "22", "train.py"], "--ssh_port is for --host and --hostfile"),
        (["--env", "1X=2", "train.py"], "'1X' is not a variable name"),
        (["--env", "BOOSTER_TEST_UNSET", "train.py"], "the variable is not set here"),
    ],
)
def test_a_bad_or_missing_option_exits_2_with_the_reason(capsys, script, arguments, reason):
    assert reason in refused(capsys, "run", *arguments)


def test_gpu_processes_without_a_gpu_are_refused(capsys, script, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert "no CUDA device is visible" in refused(capsys, "run", "--nproc_per_node", "gpu", script)


@pytest.mark.parametrize(("gpus", "given", "expected"), [(0, [], 1), (3, [], 3), (3, ["gpu"], 3), (3, ["2"], 2)])
def test_the_process_count_defaults_to_the_gpus_or_one(script, attempts, monkeypatch, gpus, given, expected):
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    option = ["--nproc_per_node", *given] if given else []
    assert main(["run", *option, script]) == 0
    assert [attempt.nproc_per_node for attempt in attempts] == [expected]


def test_hyphens_and_underscores_are_the_same_option(script):
    words = [("nproc-per-node", "2"), ("max-restarts", "3"), ("log-dir", "logs"), ("master-port", "1234"), ("tee", "1")]
    hyphens = [text for name, value in words for text in (f"--{name}", value)]
    underscores = [text for name, value in words for text in (f"--{name.replace('-', '_')}", value)]
    assert hyphens != underscores
    assert parse([*hyphens, script])[1] == parse([*underscores, script])[1]


@pytest.mark.parametrize("before", [[], ["--"]])
@pytest.mark.parametrize("rest", [["--nproc_per_node", "9", "--", "-m", "two words", ""], ["--", "--help"], ["-h"], []])
def test_everything_after_the_script_is_the_scripts(script, before, rest):
    options = parse(["--nproc_per_node", "2", *before, script, *rest])[1]
    assert (options.nproc_per_node, options.script, options.args, options.module) == ("2", script, rest, False)


def test_one_node_lets_the_system_choose_the_port_and_several_have_a_documented_one(script, attempts, capsys):
    assert main(["run", "--nproc_per_node", "1", script]) == 0
    joined = ["--nnodes", "2", "--node_rank", "1", "--master_addr", "localhost"]
    assert main(["run", "--nproc_per_node", "1", *joined, script]) == 0
    assert [(a.nnodes, a.node_rank, a.master_addr, a.master_port) for a in attempts] == [
        (1, 0, None, None),
        (2, 1, "localhost", 29500),
    ]
    assert "meets the others at localhost port 29500" in capsys.readouterr().err


def test_a_master_address_that_nobody_knows_is_said_before_anything_starts(script, attempts, capsys, monkeypatch):
    monkeypatch.setattr(import_module("booster.launch"), "_RESOLVE_SECONDS", 0)
    several = ["--nnodes", "2", "--node_rank", "1", "--master_addr"]
    for address, reason in (
        ("no.such.host.invalid", "does not resolve on .* that all machines"),
        ("1.5", "not an address"),
    ):
        assert main(["run", *several, address, script]) == 1
        assert re.search(f"error: --master_addr='{address}' .*{reason}", capsys.readouterr().err)
    assert attempts == []


def test_a_port_in_use_is_an_error_that_names_the_port_and_the_way_out(script, attempts, capsys):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert main(["run", "--nproc_per_node", "1", "--master_port", str(port), script]) == 1
    error = capsys.readouterr().err
    assert f"port {port} is in use" in error
    assert "choose another --master_port, or leave it out" in error
    assert attempts == []


def test_a_folder_of_logs_that_cannot_be_made_is_an_error_that_names_it(script, attempts, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["run", "--log_dir", str(tmp_path / "file" / "logs"), script]) == 1
    assert f"--log_dir {tmp_path / 'file' / 'logs'} cannot be made" in capsys.readouterr().err
    assert main(["run", "--log_dir", str(tmp_path / "new" / "logs"), script]) == 0
    assert [attempt.log_dir for attempt in attempts] == [str(tmp_path / "new" / "logs")]


def test_threads_are_shared_among_the_ranks_unless_the_user_says_otherwise(script, monkeypatch):
    seen = []
    monkeypatch.setattr(run, "run_attempt", lambda attempt: seen.append(run.os.environ["OMP_NUM_THREADS"]) or 0)
    monkeypatch.setattr(run, "_num_cores", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    main(["run", "--nproc_per_node", "2", script])
    monkeypatch.delenv("OMP_NUM_THREADS")
    main(["run", "--nproc_per_node", "2", script])
    main(["run", "--nproc_per_node", "cpu", script])
    assert seen == ["5", "4", "1"]
    assert "OMP_NUM_THREADS" not in run.os.environ


def test_a_failing_job_is_relaunched_as_often_as_asked_and_its_last_status_is_returned(script, monkeypatch, capsys):
    statuses = [3, 4, 5]
    monkeypatch.setattr(run, "run_attempt", lambda attempt: statuses.pop(0))
    assert main(["run", "--nproc_per_node", "1", "--max_restarts", "1", script]) == 4
    assert statuses == [5]
    assert capsys.readouterr().err.count("attempt 1 of 2 failed with status 3; relaunching the whole job") == 1


def test_a_job_that_stopped_on_request_is_not_relaunched(script, monkeypatch):
    statuses = [75, 0]
    monkeypatch.setattr(run, "run_attempt", lambda attempt: statuses.pop(0))
    assert main(["run", "--nproc_per_node", "1", "--max_restarts", "1", script]) == 75
    assert statuses == [0]


@pytest.mark.parametrize(("number", "status", "expected"), [(signal.SIGTERM, None, 143), (signal.SIGUSR1, 0, 0)])
def test_nor_is_one_that_the_launcher_was_told_to_stop(script, monkeypatch, capsys, number, status, expected):
    def stop(attempt):
        assert attempt.grace_seconds == 7
        raise Stopped(number, status)

    monkeypatch.setattr(run, "run_attempt", stop)
    options = ["--nproc_per_node", "1", "--max_restarts", "1", "--grace_seconds", "7"]
    assert main(["run", *options, script]) == expected
    assert f"stopped by {number.name}; all processes of the job have ended" in capsys.readouterr().err


def test_a_hostfile_of_many_hosts_is_read_in_time_that_goes_with_its_length(tmp_path):
    (tmp_path / "hosts").write_text("\n".join(f"node{number}" for number in range(300_000)))
    began = time.process_time()
    assert len(read_hostfile(str(tmp_path / "hosts"))) == 300_000
    assert time.process_time() - began < 60  # to compare each with each takes a quarter of an hour


def test_the_hostfile_has_a_host_a_line_with_optional_slots_and_comments(hostfile):
    assert read_hostfile(hostfile) == [Host("node1", 4), Host("user@node2"), Host("10.0.0.3", 2)]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a\na slots=2\n", "line 2: 'a' was listed before"),
        ("a gpus=2\n", "line 1: 'gpus=2' is not understood"),
        ("a slots=0\n", "'slots=0' is not understood"),
        ("a slots=1 slots=2\n", "'slots=2' is not understood"),
        ("a\nb slots=" + "9" * 5000, "line 2: 'slots=999"),
        ("a\n-oProxyCommand=x\n", "line 2: '-oProxyCommand=x' is not a host"),
        ("-G\n", "line 1: '-G' is not a host"),
        ("a;reboot\n", "'a;reboot' is not a host"),
        ("# no host\n\n", "lists no host"),
    ],
)
def test_a_faulty_hostfile_is_refused_with_file_and_line(tmp_path, text, reason):
    file = tmp_path / "hosts"
    file.write_text(text)
    with pytest.raises(ValueError, match="hostfile") as caught:
        read_hostfile(str(file))
    assert reason in str(caught.value)
    assert str(file) in str(caught.value)


def test_include_and_exclude_select_from_the_hostfile_in_its_order(hostfile):
    def names(**options):
        given = {"host": None, "hostfile": hostfile, "include": None, "exclude": None, **options}
        return [host.name for host in chosen_hosts(**given)]

    assert names() == ["node1", "user@node2", "10.0.0.3"]
    assert names(include="10.0.0.3,node1") == ["node1", "10.0.0.3"]
    assert names(exclude="node1") == ["user@node2", "10.0.0.3"]
    with pytest.raises(ValueError, match="--include: 'node9' is not in the hostfile"):
        names(include="node9")
    with pytest.raises(ValueError, match="leaves no host"):
        names(exclude="node1,user@node2,10.0.0.3")


def test_the_own_machine_needs_no_ssh():
    assert is_local("localhost")
    assert is_local(socket.gethostname())
    assert not is_local("some-other-node")


def test_each_host_gets_its_rank_its_slots_and_only_the_named_variables(script, hostfile, monkeypatch):
    started = []
    monkeypatch.setattr(run, "run_nodes", lambda commands, grace_seconds: started.extend(commands) or 0)
    monkeypatch.setenv("PYTHONPATH", "/my libs")
    monkeypatch.setenv("SECRET_TOKEN", "s3cret")
    monkeypatch.setenv("WANTED", "it's")
    arguments = ["--hostfile", hostfile, "--ssh_port", "2222", "--env", "WANTED", "--env", "MORE=a=b"]
    assert main(["run", *arguments, script, "two words"]) == 0
    for node_rank, (command, nproc) in enumerate(zip(started, ("4", None, "2"), strict=True)):
        ssh, dash_p, port, host, remote = command.argv
        assert (ssh, dash_p, port, host) == ("ssh", "-p", "2222", ["node1", "user@node2", "10.0.0.3"][node_rank])
        words = shlex.split(remote)
        assert words[:5] == ["cd", run.os.getcwd(), "&&", "exec", sys.executable]
        assert words[9:13] == [sys.executable, "-m", "booster", "run"]
        assert words[-2:] == [script, "two words"]
        assert command.environment == {"WANTED": "it's", "MORE": "a=b", "PYTHONPATH": "/my libs"}
        assert command.is_remote
        # What is in the arguments of a process can be read by every user of its machine.
        assert not any(value in remote for value in ("it's", "WANTED", "a=b", "/my libs", "s3cret"))
        options = parse(words[13:])[1]
        assert (options.nnodes, options.node_rank, options.nproc_per_node) == (3, node_rank, nproc)
        assert (options.master_addr, options.master_port) == ("node1", 29500)


def test_a_remote_shell_reads_directory_and_arguments_as_they_were_given_and_variables_from_stdin(tmp_path):
    directory = tmp_path / "a dir; true"
    directory.mkdir()
    code = "import os, sys; print([os.getcwd(), os.environ['X'], *sys.argv[1:], sys.stdin.read()])"
    words = ["it's", "a;b", "$HOME", 'say "hi"', ""]
    argv = ssh_command("node1", 22, str(directory), [sys.executable, "-c", code, *words])
    assert argv[:4] == ["ssh", "-p", "22", "node1"]
    sent = json.dumps({"X": "$(exit 1)\n"}) + "\nstop\n"  # what follows the variables is the node's to read
    shown = subprocess.run(["sh", "-c", argv[4]], input=sent, capture_output=True, text=True, check=True).stdout
    assert shown.strip() == repr([str(directory), "$(exit 1)\n", *words, "stop\n"])
    nothing = subprocess.run(
        ["sh", "-c", argv[4]], stdin=subprocess.DEVNULL, capture_output=True, timeout=600, check=False
    )
    assert nothing.returncode == 255
