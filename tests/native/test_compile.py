"""Every protocol function compiles for every architecture without spills, and for hosts of either signedness of char."""

from __future__ import annotations

import re
import subprocess

import pytest
from native_tools import CUDA_FLAGS, HERE, REPO, host_compiler, nvcc, run_checked

from moe_tk.builder.toolchain import find_pybind11, find_python_headers

ARCHS = ("90a", "120a", "100a", "89")
CHECK = str(HERE / "device_check.cu")


@pytest.mark.parametrize("arch", ARCHS)
def test_protocol_compiles_for_the_device_without_spills(arch, tmp_path):
    output = run_checked([*nvcc(arch), f"-arch=sm_{arch}", "-Xptxas=-v", "-cubin", "-o", str(tmp_path / "check.cubin"), CHECK])
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", output)
    assert len(spills) == 16  # 5 kernels for each of 3 wires, and one for all
    assert set(spills) == {("0", "0")}, output


def test_every_protocol_header_is_in_the_check():
    included = set(re.findall(r'#include "tk_kernels/protocol/(\w+\.hpp)"', (HERE / "device_check.cu").read_text()))
    headers = {path.name for path in (REPO / "tk_kernels" / "protocol").glob("*.hpp")}
    assert headers - included == {"context.hpp", "control.hpp"}  # come with the others
    for name in headers | included:
        assert len((REPO / "tk_kernels" / "protocol" / name).read_text().splitlines()) < 150, name


@pytest.mark.parametrize("char", ["-funsigned-char", "-fsigned-char"])
@pytest.mark.parametrize("source", [CHECK, str(REPO / "tk_kernels/bindings/host_module.cpp")], ids=["protocol", "module"])
def test_bld_16_host_with_either_char(source, char):
    headers = [f"-isystem{find_pybind11().require()}", f"-isystem{find_python_headers().require()}"]
    flags = ("-std=c++20", "-Wall", "-Wextra", "-Werror=narrowing", "-Werror=return-type", char)
    run_checked([*host_compiler(), *flags, "-fsyntax-only", f"-I{REPO}", *headers, "-x", "c++", source])


def test_bld_16_device_with_unsigned_char(tmp_path):
    flags = [*nvcc("90a"), "-arch=sm_90a", "-Xcompiler=-funsigned-char,-Werror=narrowing"]
    assert set(CUDA_FLAGS) <= set(flags)
    run_checked([*flags, "-cubin", "-o", str(tmp_path / "check.cubin"), CHECK])


@pytest.mark.parametrize("wire, compiles", [("pcie_wire", False), ("nvlink_wire", True)])
def test_krn_06_pulling_over_pcie_does_not_compile(tmp_path, wire, compiles):
    source = tmp_path / "pull.cpp"
    source.write_text('#include "tk_kernels/patterns/mega.hpp"\n#include "tk_kernels/protocol/wire.hpp"\nusing namespace moe_tk;\n'
                      f"template patterns::launch_result patterns::mega<float, protocol::{wire}, hooks::pull_rows>("
                      "const patterns::launch_globals &);\n")
    command = [*host_compiler(), "-std=c++20", "-fsyntax-only", f"-I{REPO}", str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode == 0) == compiles, done.stderr
    assert compiles or "this wire must not read remote memory: use push_rows" in done.stderr
