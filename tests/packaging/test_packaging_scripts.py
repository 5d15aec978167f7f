"""scripts/demo and scripts/test: what they say when something is missing, when they install, what they run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging_helpers import REPO

TOOLS = ("bash", "cat", "cksum", "dirname", "env", "flock", "grep", "rm")


@pytest.fixture
def checkout(tmp_path) -> Path:
    root = tmp_path / "a checkout"
    shutil.copytree(REPO / "scripts", root / "scripts")
    for name in ("pyproject.toml", "setup.py"):
        shutil.copy(REPO / name, root / name)
    return root


@pytest.fixture
def bin_folder(tmp_path) -> Path:
    """A PATH with the basic tools, this python3 and a compiler, each of which a test can take away."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in TOOLS:
        if place := shutil.which(name):
            (folder / name).symlink_to(place)
    program(folder / "python3", f'exec {sys.executable} "$@"')
    program(folder / "g++", "exit 0")
    return folder


def program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def script(checkout: Path, name: str, *args: str, bin_folder: Path, **environment: str) -> subprocess.CompletedProcess:
    env = {"PATH": str(bin_folder), "HOME": os.environ.get("HOME", "/"), **environment}
    return subprocess.run([str(checkout / "scripts" / name), *args], env=env, capture_output=True, text=True,
                          timeout=60, stdin=subprocess.DEVNULL)


@pytest.mark.parametrize("name", ["demo", "test"])
@pytest.mark.parametrize(("missing", "wanted"), [
    ("compiler", "No C++20 compiler works (tried g++, clang++, c++).\nInstall one (Debian, Ubuntu: apt-get install "
                 "g++; "),
    ("python", "python3 is missing. Install it"),
    ("new python", "python3 is 3.9.2, wanted >= 3.10."),
    ("venv", "python3 -m venv does not work: its modules are missing.\nInstall them (Debian, Ubuntu: apt-get install "
             "python3-venv)."),
    ("headers", "The C headers of Python are missing (Python.h).\nInstall them (Debian, Ubuntu: apt-get install "
                "python3-dev; "),
])
def test_what_is_missing_is_named_and_nothing_is_made(name, missing, wanted, checkout, bin_folder):
    fail_on = {"new python": "version_info", "venv": "ensurepip", "headers": "Python.h"}.get(missing)
    if missing == "compiler":
        program(bin_folder / "g++", "exit 1")
    elif missing == "python":
        (bin_folder / "python3").unlink()
    else:
        program(bin_folder / "python3", f'case "$*" in *{fail_on}*) exit 1;; *python_version*) echo 3.9.2;; esac')
    done = script(checkout, name, bin_folder=bin_folder)
    assert done.returncode == 2
    assert done.stderr.startswith(wanted) and done.stdout == ""
    assert not (checkout / ".venv").exists()


def test_cxx_is_tried_first(checkout, bin_folder):
    program(bin_folder / "g++", "exit 1")
    done = script(checkout, "test", bin_folder=bin_folder, CXX="my-c++ -x")
    assert "tried CXX=my-c++ -x, g++" in done.stderr


@pytest.fixture
def log(checkout, tmp_path) -> Path:
    """A virtual environment whose programs only note what they are asked to do."""
    path = tmp_path / "log"
    path.touch()
    (checkout / ".venv" / "bin").mkdir(parents=True)
    program(checkout / ".venv" / "bin" / "python", f'echo "python $*" >>"{path}"')
    program(checkout / ".venv" / "bin" / "moe_tk", f'echo "moe_tk $*" >>"{path}"')
    return path


def steps(log: Path) -> list[str]:
    """What was done since the last look, without pip's own questions."""
    lines = log.read_text().splitlines()
    log.write_text("")
    return [line for line in lines if "pip --version" not in line and "pip show" not in line]


def test_installs_once_then_only_when_pyproject_changes(checkout, bin_folder, log):
    def test_script(*args, **environment):
        done = script(checkout, "test", *args, bin_folder=bin_folder, **environment)
        assert done.returncode == 0, done.stderr
        return steps(log)

    install = f"python -m pip install --quiet --disable-pip-version-check torch>=2.9 -e {checkout}[test]"
    assert test_script("-q", "tests/a b") == [install, "python -m pytest -q tests/a b"]
    assert test_script("-x") == ["python -m pytest -x"]
    with (checkout / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    assert test_script() == [install, "python -m pytest"]
    other = test_script(MOE_TK_TORCH_SPEC="torch==2.13.0")
    assert other == [install.replace("torch>=2.9", "torch==2.13.0"), "python -m pytest"]


def test_demo_installs_without_the_test_extra_unless_it_is_there(checkout, bin_folder, log):
    def both():
        for name in ("demo", "test", "demo"):
            assert script(checkout, name, "--world", "2", bin_folder=bin_folder).returncode == 0
        return steps(log)

    install = f"python -m pip install --quiet --disable-pip-version-check torch>=2.9 -e {checkout}"
    demo, test = "moe_tk demo --world 2", "python -m pytest --world 2"
    assert both() == [install, demo, f"{install}[test]", test, demo]
    assert both() == [demo, test, demo]


def test_failed_install_is_tried_again(checkout, bin_folder, log):
    program(checkout / ".venv" / "bin" / "python", f'echo "python $*" >>"{log}"; case "$*" in *install*) exit 1;; esac')
    for _ in range(2):
        assert script(checkout, "test", bin_folder=bin_folder).returncode != 0
        [only] = steps(log)
        assert "pip install" in only


def test_exit_status_is_that_of_the_tests(checkout, bin_folder, log):
    program(checkout / ".venv" / "bin" / "python", 'case "$*" in *pytest*) exit 5;; esac')
    assert script(checkout, "test", bin_folder=bin_folder).returncode == 5


def test_a_copied_checkout_installs_anew(checkout, bin_folder, log, tmp_path):
    assert script(checkout, "test", bin_folder=bin_folder).returncode == 0
    assert len(steps(log)) == 2
    copied = shutil.copytree(checkout, tmp_path / "copied")
    assert script(copied, "test", bin_folder=bin_folder).returncode == 0
    assert len(steps(log)) == 2  # its environment still points to the first


def test_scripts_are_valid_and_executable():
    for path in (REPO / "scripts" / "demo", REPO / "scripts" / "test", REPO / ".ci" / "run"):
        assert os.access(path, os.X_OK), path
    for path in (*(REPO / "scripts").iterdir(), REPO / ".ci" / "run"):
        if path.is_file() and path.suffix in ("", ".sh"):
            assert subprocess.run(["bash", "-n", str(path)]).returncode == 0
