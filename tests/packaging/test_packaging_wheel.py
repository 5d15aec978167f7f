"""What an install brings: the C++ and CUDA sources and the data, from a wheel, an sdist or a checkout."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging_helpers import REPO, build_wheel, copy_checkout, run

DATA = ("layer.safetensors", "routing.npz", "facts.json", "ORIGIN.md")
KERNEL_FILES = {f"moe_tk/native/{path.relative_to(REPO)}" for path in (REPO / "tk_kernels").rglob("*")
                if path.is_file() and path.suffix not in (".so", ".o", ".pyc") and not path.name.startswith(".")}


def make_checkout(target: Path) -> Path:
    checkout = copy_checkout(target)
    (checkout / "moe_tk" / "data").mkdir()
    for name in DATA:
        (checkout / "moe_tk" / "data" / name).write_text(name)
    (checkout / "thunderkittens" / "types").mkdir(parents=True, exist_ok=True)
    (checkout / "thunderkittens" / "types" / "tile.cuh").write_text("// a tile\n")
    return checkout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    return make_checkout(tmp_path_factory.mktemp("wheel") / "checkout")


@pytest.fixture(scope="module")
def installed(checkout, tmp_path_factory) -> Path:
    """The wheel, unpacked as an installer does it."""
    site = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(build_wheel(checkout)) as wheel:
        wheel.extractall(site)
    return site


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_wheel_has_sources_and_data(installed):
    files = files_of(installed)
    assert KERNEL_FILES and files >= KERNEL_FILES
    assert "moe_tk/native/thunderkittens/types/tile.cuh" in files
    assert files >= {f"moe_tk/data/{name}" for name in DATA}
    assert files >= {str(path.relative_to(REPO)) for path in (REPO / "moe_tk").rglob("*.py")}
    tops = {name.partition("/")[0] for name in files}
    assert tops == {"moe_tk", f"moe_tk-{installed_version()}.dist-info"}  # no tests, scripts or setup.py on sys.path


def installed_version() -> str:
    import moe_tk

    return moe_tk.__version__


def test_wheel_has_the_command_and_the_record_of_all_files(installed):
    [info] = installed.glob("*.dist-info")
    assert "moe_tk = moe_tk.cli.main:main" in (info / "entry_points.txt").read_text()
    recorded = {line.rsplit(",", 2)[0] for line in (info / "RECORD").read_text().splitlines()}
    assert recorded == files_of(installed)


def test_installed_package_finds_its_own_sources(installed, tmp_path):
    out = run(sys.executable, "-c", "from moe_tk.builder.native_root import *; print(native_root(), native_modules())",
              cwd=tmp_path, PYTHONPATH=str(installed))
    root, _, modules = out.partition(" ")
    assert root == str(installed / "moe_tk" / "native")
    assert "moe_tk_host" in modules


def test_installed_sources_are_complete(installed, tmp_path):
    """Every header that the host module includes is there: its source compiles against the installed tree alone."""
    from moe_tk.builder.build import host_flags
    from moe_tk.builder.toolchain import child_environment, find_host_compiler, find_pybind11

    compiler = find_host_compiler().require()
    native = installed / "moe_tk" / "native"
    done = subprocess.run([*compiler.command, *host_flags(compiler), "-fsyntax-only", f"-I{native}",
                           f"-I{find_pybind11().require()}", f"-I{sysconfig.get_path('include')}",
                           str(native / "tk_kernels" / "bindings" / "host_module.cpp")],
                          cwd=tmp_path, capture_output=True, text=True, timeout=300, env=child_environment())
    assert done.returncode == 0, done.stderr


def test_second_wheel_has_no_file_that_was_deleted_since(tmp_path):
    checkout = make_checkout(tmp_path / "checkout")
    extra = checkout / "tk_kernels" / "gone.hpp"
    extra.write_text("// soon deleted\n")
    with zipfile.ZipFile(build_wheel(checkout)) as wheel:
        assert "moe_tk/native/tk_kernels/gone.hpp" in wheel.namelist()
    extra.unlink()
    with zipfile.ZipFile(build_wheel(checkout)) as wheel:
        assert "moe_tk/native/tk_kernels/gone.hpp" not in wheel.namelist()


@pytest.mark.parametrize("state", ["missing", "empty"])
def test_wheel_without_the_tile_library_is_still_right(state, tmp_path):
    checkout = make_checkout(tmp_path / "checkout")
    (checkout / "thunderkittens").rename(tmp_path / "elsewhere")
    if state == "empty":
        (checkout / "thunderkittens").mkdir()
    with zipfile.ZipFile(build_wheel(checkout)) as wheel:
        names = set(wheel.namelist())
    assert names >= KERNEL_FILES and not any("thunderkittens" in name for name in names)


def test_sdist_has_all_that_a_wheel_needs(checkout):
    run(sys.executable, "-c", "import setuptools.build_meta as b; b.build_sdist('sdists')", cwd=checkout)
    [archive] = (checkout / "sdists").glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    assert names >= {name.removeprefix("moe_tk/native/") for name in KERNEL_FILES}
    assert names >= {"setup.py", "thunderkittens/types/tile.cuh", *(f"moe_tk/data/{name}" for name in DATA)}


def test_editable_install_uses_the_folders_of_the_checkout(tmp_path):
    checkout = make_checkout(tmp_path / "checkout")
    run(sys.executable, "-c", "import setuptools.build_meta as b; b.build_editable('wheels')", cwd=checkout)
    [archive] = (checkout / "wheels").glob("*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(archive) as wheel:
        wheel.extractall(site)
    assert not [name for name in files_of(site) if "native" in name]
    code = (f"import site; site.addsitedir({str(site)!r}); import moe_tk; from moe_tk.builder.native_root import *; "
            "print(native_root()); print(moe_tk.__file__)")
    lines = run(sys.executable, "-I", "-S", "-c", code, cwd=tmp_path).splitlines()
    assert lines == [str(checkout), str(checkout / "moe_tk" / "__init__.py")]
