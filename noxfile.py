"""`make versions`: the tests on each Python and torch that is supported. An interpreter that is absent is skipped.

    make versions ARGS='-s "tests(python=3.10, torch=2.11)" -- tests/unit'

Each pair has an environment of its own (about 6 GB where pip gets torch with its CUDA packages). docs/versions.md says
which pairs were run, when, and what came out.
"""

import nox

nox.options.default_venv_backend = "venv"
nox.options.error_on_missing_interpreters = False

PAIRS = [
    ("3.10", "2.11"),
    ("3.11", "2.12"),
    ("3.11", "2.13"),
    ("3.12", "2.13"),
    ("3.13", "2.13"),
    ("3.11", "2.14"),
    ("3.12", "2.15"),
    ("3.13", "2.15"),
    ("3.14", "2.15"),
]


@nox.session
@nox.parametrize("python,torch", PAIRS)
def tests(session: nox.Session, torch: str) -> None:
    """Everything but slow tests; what follows `--` goes to pytest."""
    least = ["--constraint", "constraints-min.txt"] if torch == "2.11" else []
    session.install(*least, f"torch=={torch}.*", "--editable", ".[examples,test]")
    arguments = session.posargs or ["-n", "2", "--dist", "loadfile"]
    session.run("python", "-m", "pytest", "-m", "not slow", *arguments, env={"OMP_NUM_THREADS": "1"})
