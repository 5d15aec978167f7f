"""The native sources as they are: BLD-16, what is found where, what takes part in the hash."""

from __future__ import annotations

import subprocess
import sysconfig

import pytest
from build_helpers import REPO

from moe_tk.builder import native_root as native_root_module
from moe_tk.builder.build import host_flags
from moe_tk.builder.native_root import NativeModule, hash_sources, native_modules, native_root
from moe_tk.builder.toolchain import child_environment, find_host_compiler, find_pybind11
from moe_tk.errors import BuildError

HOST_SOURCES = [source for module in native_modules() if module.kind == "host" for source in module.sources]


@pytest.mark.parametrize("char", ["-funsigned-char", "-fsigned-char"])
@pytest.mark.parametrize("source", HOST_SOURCES)
def test_bld_16_char_may_be_signed_or_not(source, char):
    compiler = find_host_compiler().require()
    command = [*compiler.command, *host_flags(compiler), char, "-Werror=narrowing", "-fsyntax-only", f"-I{REPO}",
               f"-I{find_pybind11().require()}", f"-I{sysconfig.get_path('include')}", str(REPO / source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=child_environment())
    assert done.returncode == 0, done.stderr


def test_the_host_module_is_among_the_modules():
    assert native_root() == REPO
    assert NativeModule("moe_tk_host", "host", ("tk_kernels/bindings/host_module.cpp",)) in native_modules()


def test_modules_are_named_after_their_binding(tmp_path):
    bindings = tmp_path / "tk_kernels" / "bindings"
    bindings.mkdir(parents=True)
    for name in ("host_module.cpp", "sm90_module.cu", "fields.hpp", "helper.cpp", "notes_module.md"):
        (bindings / name).touch()
    assert [(m.name, m.kind) for m in native_modules(tmp_path)] == [("moe_tk_host", "host"), ("moe_tk_sm90", "cuda")]


def test_root_of_an_install_comes_first_and_a_missing_one_is_named(tmp_path, monkeypatch):
    module = tmp_path / "site" / "moe_tk" / "builder" / "native_root.py"
    monkeypatch.setattr(native_root_module, "__file__", str(module))
    with pytest.raises(BuildError, match=r"no folder tk_kernels in .*site/moe_tk/native .*Reinstall"):
        native_root()
    (tmp_path / "site" / "tk_kernels").mkdir(parents=True)
    assert native_root() == tmp_path / "site"
    (tmp_path / "site" / "moe_tk" / "native" / "tk_kernels").mkdir(parents=True)
    assert native_root() == tmp_path / "site" / "moe_tk" / "native"


def test_hash_covers_both_trees_and_the_sources_but_no_leftovers(tmp_path):
    (tmp_path / "tk_kernels" / "deep").mkdir(parents=True)
    header, source = tmp_path / "tk_kernels" / "deep" / "a.inc", tmp_path / "outside.cpp"
    header.write_text("1")
    source.write_text("1")

    def now():
        return hash_sources(tmp_path, [source])

    seen = [now()]
    for path in (tmp_path / "tk_kernels" / ".a.swp", tmp_path / "tk_kernels" / "README.md", tmp_path / "unrelated.txt"):
        path.write_text("noise")
        assert now() == seen[0]
    header.write_text("2")
    seen.append(now())
    source.write_text("2")
    seen.append(now())
    header.rename(header.with_name("b.inc"))
    seen.append(now())
    (tmp_path / "thunderkittens").mkdir()
    (tmp_path / "thunderkittens" / "tile.cuh").write_text("")
    seen.append(now())
    assert len(set(seen)) == 5
