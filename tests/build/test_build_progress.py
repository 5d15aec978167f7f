"""A build that takes more than a second says so: once in a pipe, live on a terminal; a short one says nothing."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest
from build_helpers import REPO, run_python, write_program

from moe_tk.builder.progress import BuildProgress

CODE = """
from moe_tk.builder.build import build_host_module
build_host_module("mini", ["mini.cpp"], root={root!r})
"""


@pytest.fixture
def slow_cxx(tmp_path, monkeypatch):
    program = write_program(tmp_path / "bin" / "slow-g++", """#!/bin/sh
case " $* " in *" -c "*) sleep 1.5;; esac
exec g++ "$@"
""")
    monkeypatch.setenv("CXX", str(program))


def test_one_plain_line_in_a_pipe(mini_root, slow_cxx):
    done = run_python(CODE.format(root=str(mini_root)))
    assert done.returncode == 0, done.stderr
    [line] = done.stderr.splitlines()
    assert line.startswith("moe_tk: building mini (host, ") and "\x1b" not in line
    assert done.stdout == ""


def test_short_builds_are_silent(capfd):
    with BuildProgress("mini", 1, quiet_s=60.0) as progress:
        progress.update(1, 1)
    assert capfd.readouterr() == ("", "")


def test_cached_modules_are_silent(mini_root, copying_cxx):
    assert run_python(CODE.format(root=str(mini_root))).returncode == 0
    done = run_python(CODE.format(root=str(mini_root)))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert copying_cxx() == 1


def test_live_on_a_terminal(mini_root, slow_cxx):
    main, end = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", CODE.format(root=str(mini_root))], cwd=REPO, stderr=end,
                               stdout=subprocess.PIPE, stdin=subprocess.DEVNULL,
                               env={**os.environ, "TERM": "xterm", "COLUMNS": "160"})
    os.close(end)
    shown = b""
    try:
        while chunk := os.read(main, 4096):
            shown += chunk
    except OSError:  # the other end was closed
        pass
    finally:
        out, _ = process.communicate(timeout=60)
        os.close(main)
    text = shown.decode()
    assert process.returncode == 0 and out == b""
    assert "building mini (host" in text and "\x1b[" in text and "0/2" in text
    assert "moe_tk: built mini" in text.splitlines()[-1]
