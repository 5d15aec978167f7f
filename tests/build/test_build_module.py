"""Building and loading one host module: what makes it new, what does not, and what is loaded."""

from __future__ import annotations

import json

import pytest

from moe_tk.builder.build import build_cuda_module, build_host_module, load_module
from moe_tk.errors import BuildError


def test_second_call_compiles_nothing(mini_root, cache, counting_cxx):
    first = build_host_module("mini", ["mini.cpp"], root=mini_root)
    second = build_host_module("mini", ["mini.cpp"], root=mini_root)
    assert first == second and first.parent == cache
    assert counting_cxx() == 1
    assert load_module(first, "mini").value == 7
    assert load_module(first, "mini") is load_module(second, "mini")


def test_only_finished_files_are_left(mini_root, cache):
    path = build_host_module("mini", ["mini.cpp"], root=mini_root)
    assert {p.name for p in cache.iterdir()} == {path.name, path.stem + ".json", path.stem + ".log", "build.lock"}
    facts = json.loads(path.with_suffix(".json").read_text())
    assert any("-std=c++20" in command for command in facts["commands"])


def test_header_flag_and_compiler_change_the_module(mini_root, monkeypatch, tmp_path, counting_cxx):
    first = build_host_module("mini", ["mini.cpp"], root=mini_root)
    (mini_root / "value.h").write_text("#define VALUE 8\n")
    second = build_host_module("mini", ["mini.cpp"], root=mini_root)
    assert load_module(first, "mini").value == 7 and load_module(second, "mini").value == 8
    third = build_host_module("mini", ["mini.cpp"], root=mini_root, extra_flags=["-DEXTRA"])
    monkeypatch.setenv("CPATH", str(tmp_path))
    fourth = build_host_module("mini", ["mini.cpp"], root=mini_root)
    assert len({first, second, third, fourth}) == 4
    assert counting_cxx() == 4


@pytest.mark.parametrize("name", ["a b", "a$b", "a:b", "a'b", "$(touch x)"])
def test_folders_with_odd_names(name, tmp_path, mini_root, monkeypatch):
    root = tmp_path / name
    mini_root.rename(root)
    monkeypatch.setenv("MOE_TK_CACHE_DIR", str(tmp_path / name / "cache"))
    assert load_module(build_host_module("mini", ["mini.cpp"], root=root), "mini").value == 7


def test_several_sources_and_a_link_flag(mini_root):
    (mini_root / "mini.cpp").write_text((mini_root / "mini.cpp").read_text().replace("VALUE)", "other())")
                                        .replace('#include "value.h"', "int other();"))
    (mini_root / "other.cpp").write_text('#include "value.h"\nint other() { return VALUE + 1; }\n')
    path = build_host_module("mini", ["mini.cpp", "other.cpp"], root=mini_root, extra_flags=["-Wl,-z,now"])
    assert load_module(path, "mini").value == 8


def test_pybind11_is_on_the_include_path(tmp_path):
    (tmp_path / "bound.cpp").write_text("#include <pybind11/pybind11.h>\n"
                                        'PYBIND11_MODULE(bound, m) { m.def("f", [](int x) { return x + 1; }); }\n')
    path = build_host_module("bound", ["bound.cpp"], root=tmp_path, extra_flags=["-O0"])
    assert load_module(path, "bound").f(4) == 5


def test_built_ahead_serves_a_machine_without_compiler(mini_root, monkeypatch):
    path = build_host_module("mini", ["mini.cpp"], root=mini_root)
    monkeypatch.setenv("PATH", "/nonexistent")
    assert build_host_module("mini", ["mini.cpp"], root=mini_root) == path
    (mini_root / "value.h").write_text("#define VALUE 9\n")  # but never one of other sources
    with pytest.raises(BuildError, match=r"no usable C\+\+20 compiler.*g\+\+.*install g\+\+"):
        build_host_module("mini", ["mini.cpp"], root=mini_root)


def test_missing_source_and_bad_name_are_named(mini_root):
    with pytest.raises(BuildError, match="absent.cpp"):
        build_host_module("mini", ["absent.cpp"], root=mini_root)
    with pytest.raises(BuildError, match="'a-b'"):
        build_host_module("a-b", ["mini.cpp"], root=mini_root)
    with pytest.raises(BuildError, match="none was named"):
        build_host_module("mini", [], root=mini_root)


def test_damaged_module_says_which_file_to_delete(mini_root):
    path = build_host_module("mini", ["mini.cpp"], root=mini_root)
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(BuildError, match=f"{path.name} does not load.*delete it"):
        load_module(path, "mini")


def test_cuda_module_is_compiled_for_exactly_its_arch(mini_root, fake_toolkit, copying_cxx, tmp_path, monkeypatch):
    root = fake_toolkit("cuda-13.0", "13.0")
    nvcc = root / "bin" / "nvcc"
    nvcc.write_text(nvcc.read_text().replace("#!/bin/sh\n", f"""#!/bin/sh
case " $* " in *" --version "*) ;; *) exec '{tmp_path}/bin/copying-g++' "$@";; esac
"""))
    monkeypatch.setenv("CUDA_HOME", str(root))
    monkeypatch.setenv("MOE_TK_ALLOW_CUDA_MISMATCH", "1")  # whatever torch is installed
    path = build_cuda_module("mini", ["mini.cpp"], arch="9.0", root=mini_root)
    assert ".sm_90a." in path.name and load_module(path, "mini").value == 7
    commands = json.loads(path.with_suffix(".json").read_text())["commands"]
    for command in commands:
        assert command[0] == str(nvcc)
        assert "-gencode=arch=compute_90a,code=sm_90a" in command
    assert build_cuda_module("mini", ["mini.cpp"], arch="sm_90a", root=mini_root) == path
    assert build_cuda_module("mini", ["mini.cpp"], arch="120", root=mini_root) != path
    assert copying_cxx() == 2
