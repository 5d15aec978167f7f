"""BLD-14 and BLD-13: what a failed build says. The failures are real ones of the real compiler wherever possible."""

from __future__ import annotations

import re

import pytest
from build_helpers import write_program

from moe_tk.builder.build import build_host_module
from moe_tk.builder.hints import HINTS, hint_for
from moe_tk.builder.steps import StepFailure
from moe_tk.errors import BuildError


def failure(mini_root, **kwargs) -> str:
    with pytest.raises(BuildError) as caught:
        build_host_module("mini", ["mini.cpp"], root=mini_root, **kwargs)
    return str(caught.value)


def part(text: str, name: str) -> str:
    return re.search(rf"^{name}: (.*)$", text, re.MULTILINE)[1]


def test_bld_14_missing_header(mini_root, cache):
    (mini_root / "value.h").unlink()
    text = failure(mini_root)
    assert part(text, "command").split()[0].endswith("++") and "-c " in part(text, "command")
    assert "  " in text and 'value.h: No such file' in text
    assert "a header is missing" in part(text, "hint") and "value.h" in part(text, "hint")
    log = part(text, "log")
    assert log.startswith(str(cache)) and "value.h" in open(log).read()


def test_bld_14_killed_compiler(mini_root, tmp_path, monkeypatch):
    program = write_program(tmp_path / "bin" / "killed-g++", """#!/bin/sh
case " $* " in *" -c "*) kill -9 $$;; *) exec g++ "$@";; esac
""")
    monkeypatch.setenv("CXX", str(program))
    text = failure(mini_root)
    assert "status 137 (killed by signal 9)" in text
    assert "memory ran out: set MOE_TK_BUILD_JOBS=1" in part(text, "hint")


def test_bld_13_killed_pass_of_the_compiler(mini_root, tmp_path, monkeypatch):
    """The usual form: the driver lives, one of its passes was killed."""
    program = write_program(tmp_path / "bin" / "killed-cc1plus", """#!/bin/sh
case " $* " in *" -c "*) echo 'g++: fatal error: Killed signal terminated program cc1plus' >&2; exit 1;; esac
exec g++ "$@"
""")
    monkeypatch.setenv("CXX", str(program))
    text = failure(mini_root)
    assert "ended with status 1." in text and "memory ran out" in part(text, "hint")


def test_bld_14_linker_error(mini_root):
    text = failure(mini_root, extra_flags=["-lno_such_library_as_this"])
    assert "cannot find -lno_such_library_as_this" in text
    assert "-shared" in part(text, "command")
    assert "misses a library" in part(text, "hint") and "no_such_library_as_this" in part(text, "hint")


def test_bld_14_undefined_symbol_and_syntax_error(mini_root):
    source = mini_root / "mini.cpp"
    source.write_text(source.read_text() + "int absent();\nint use() { return absent(); }\n")
    text = failure(mini_root, extra_flags=["-Wl,--no-undefined"])
    assert "the linker failed" in part(text, "hint")
    source.write_text("int f() { return 1 }\n")
    assert "read the log from its first error on" in part(failure(mini_root), "hint")


def test_bld_14_only_the_last_20_lines_of_the_failed_command(mini_root, tmp_path, monkeypatch):
    program = write_program(tmp_path / "bin" / "loud-g++", """#!/bin/sh
case " $* " in
*" 1.o"*) i=0; while [ $i -lt 50 ]; do i=$((i + 1)); echo "line <$i>" >&2; done; echo to-stdout; exit 3;;
*" -c "*) echo innocent >&2;;
esac
exec g++ "$@"
""")
    monkeypatch.setenv("CXX", str(program))
    (mini_root / "other.cpp").write_text("\n")
    with pytest.raises(BuildError) as caught:
        build_host_module("mini", ["mini.cpp", "other.cpp"], root=mini_root)
    text = str(caught.value)
    assert "status 3" in text and "other.cpp" in part(text, "command")
    assert re.findall(r"line <(\d+)>", text) == [str(i) for i in range(31, 51)]
    assert "innocent" not in text and "to-stdout" not in text
    log = open(part(text, "log")).read()
    assert "line <1>" in log and "innocent" in log and "to-stdout" in log


def test_bld_14_compilers_speak_english(mini_root, tmp_path, monkeypatch):
    """Hints search for English words, whatever language the person has."""
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    monkeypatch.setenv("CXX", str(write_program(tmp_path / "g++", """#!/bin/sh
case " $* " in *" -c "*) echo "locale <$LC_ALL>" >&2; exit 1;; *) echo "g++ 12.2.0";; esac
""")))
    assert "locale <C>" in failure(mini_root)


def test_a_failed_build_can_be_mended_and_tried_again(mini_root, cache):
    header = (mini_root / "value.h").read_text()
    (mini_root / "value.h").write_text("#error not yet\n")
    failure(mini_root)
    assert not list(cache.glob("*.so")) and not list(cache.glob("building-*"))
    (mini_root / "value.h").write_text(header)
    assert build_host_module("mini", ["mini.cpp"], root=mini_root).is_file()


@pytest.mark.parametrize(("value", "message"), [
    ("/no/such/compiler", "CXX='/no/such/compiler' is set, but '/no/such/compiler' is not a program"),
    ("false", "ended with status 1"),
])
def test_cxx_that_does_not_work_is_named(value, message, mini_root, monkeypatch):
    monkeypatch.setenv("CXX", value)
    text = failure(mini_root)
    assert message in text and "set CXX to a C++20 compiler" in text


@pytest.mark.parametrize(("banner", "problem"), [
    ("g++ (Debian 10.2.1-6) 10.2.1 20210110\n(C) 2020 Free Software Foundation, Inc.", "gcc 10.2.1 is too old"),
    ("Ubuntu clang version 14.0.0-1ubuntu1.1\nTarget: x86_64-pc-linux-gnu", "clang 14.0.0 is too old"),
])
def test_compiler_without_our_cpp20_is_refused_by_its_version(banner, problem, mini_root, tmp_path, monkeypatch):
    program = write_program(tmp_path / "old-c++", f"#!/bin/sh\ncat <<'END'\n{banner}\nEND\n")
    monkeypatch.setenv("CXX", str(program))
    assert problem in failure(mini_root)


def test_cxx_may_have_arguments(mini_root, monkeypatch, tmp_path):
    launcher = write_program(tmp_path / "launcher", '#!/bin/sh\nexec "$@"\n')
    monkeypatch.setenv("CXX", f"{launcher} g++")
    assert build_host_module("mini", ["mini.cpp"], root=mini_root).is_file()


@pytest.mark.parametrize(("output", "status", "advice"), [
    ("x.cpp:1:10: fatal error: Python.h: No such file or directory", 1, "python3-dev"),
    ("x.cpp:1:10: fatal error: pybind11/pybind11.h: No such file or directory", 1, "pip install"),
    ("x.cu:1:10: fatal error: cuda_runtime.h: No such file or directory", 1, "CUDA toolkit"),
    ("x.cpp:3:10: fatal error: 'kittens.cuh' file not found", 1, "kittens.cuh"),
    ("cc1plus: out of memory allocating 65536 bytes", 1, "MOE_TK_BUILD_JOBS=1"),
    ("virtual memory exhausted: Cannot allocate memory", 1, "MOE_TK_BUILD_JOBS=1"),
    ("nvcc error   : 'cicc' died due to signal 9 (Kill signal)", 9, "MOE_TK_BUILD_JOBS=1"),
    ("/tmp/a.s: Fatal error: can't write 12 bytes: No space left on device", 1, "disk is full"),
    ("error: #error -- unsupported GNU version! gcc versions later than 13 are not supported", 1, "CXX"),
    ("nvcc fatal   : Unsupported gpu architecture 'compute_120a'", 1, "newer toolkit"),
    ("ptxas error: Instruction 'wgmma' not supported on .target 'sm_90'", 255, "--arch 90a"),
    ("g++: error: unrecognized command-line option '-std=c++20'", 1, "g++ >= 11"),
    ("g++: fatal error: cannot execute 'cc1plus': execvp: No such file or directory", 1, "install g++"),
    ("", 137, "memory"),
    ("", 139, "crashed"),
    ("", 127, "not found"),
])
def test_bld_14_known_patterns_have_a_hint(output, status, advice):
    assert advice in hint_for(output, status)


def test_unknown_failures_get_no_made_up_hint():
    assert hint_for("x.cpp:1:5: error: expected ';'", 1) is None
    assert len({hint.advice for hint in HINTS}) == len(HINTS)


def test_tail_of_short_and_empty_output():
    assert StepFailure("c", 1, "").tail == ""
    assert StepFailure("c", 1, "a\nb\n\n").tail == "a\nb"
