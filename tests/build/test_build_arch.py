"""BLD-08, BLD-10, BLD-11: names of architectures, what builds them, what runs where."""

from __future__ import annotations

import argparse

import pytest

from moe_tk.builder.arch import (
    ArchUnknown,
    check_image,
    check_toolkit,
    image_runs_on,
    parse_arch,
    parse_arch_list,
    resolve_archs,
)
from moe_tk.builder.native_root import native_modules
from moe_tk.cli import build as cli_build
from moe_tk.errors import BuildError


def no_gpu():
    return []


def never():
    pytest.fail("a GPU was looked for although a list says what to build")


@pytest.mark.parametrize(("written", "name"), [
    ("9.0", "90a"), ("9.0+PTX", "90a"), ("9.0a", "90a"), ("90", "90a"), ("sm_90a", "90a"), ("compute_90", "90a"),
    ("SM90", "90a"), ((9, 0), "90a"), ("12.0", "120a"), ((12, 1), "121a"), ("12.1", "121a"), ("120a", "120a"),
    ("10.0", "100a"), ("100f", "100f"), ("10.3", "103a"), ("8.9", "89"), ("8.0+PTX", "80"), ("86", "86"),
])
def test_bld_08_names_are_normalised(written, name):
    arch = parse_arch(written)
    assert arch.name == name
    assert arch.nvcc_flags == (f"-gencode=arch=compute_{name},code=sm_{name}",)


def test_bld_08_the_user_is_told_what_was_changed():
    assert parse_arch("9.0a").note is None and parse_arch("8.9").note is None
    assert "9.0 is built as 90a" in parse_arch("9.0").note
    note = parse_arch("9.0+PTX").note
    assert "built as 90a" in note and "+PTX" in note and "left out" in note


@pytest.mark.parametrize("text", ["", "9.0.0", "hopper", "7.5", "99a", "9.0b", "90a90a", "-1", "89a", "90f"])
def test_bld_08_unknown_names_are_refused_with_the_valid_ones(text):
    with pytest.raises(BuildError) as caught:
        parse_arch(text)
    assert repr(text) in str(caught.value) and ("90a" in str(caught.value) or "use 89" in str(caught.value))


def test_bld_08_image_of_another_gpu_is_refused_with_both_names():
    with pytest.raises(BuildError, match=r"12\.1 and needs sm_121a, but built is sm_120a.*moe_tk build --arch 121a"):
        check_image(["120a"], (12, 1))
    with pytest.raises(BuildError, match="built is nothing"):
        check_image([], (9, 0))
    check_image(["90a", "121a"], (12, 1))


@pytest.mark.parametrize(("image", "capability", "runs"), [
    ("90a", (9, 0), True), ("120a", (12, 1), False), ("100f", (10, 3), True), ("103f", (10, 0), False),
    ("80", (8, 6), True), ("89", (8, 6), False), ("80", (9, 0), False),
])
def test_bld_08_which_image_runs_where(image, capability, runs):
    assert image_runs_on(parse_arch(image), capability) is runs


@pytest.mark.parametrize(("arch", "first"), [
    ("80", (12, 0)), ("90a", (12, 0)), ("100a", (12, 8)), ("120a", (12, 8)), ("100f", (12, 9)), ("103a", (12, 9)),
    ("121a", (12, 9)), ("110a", (13, 0)),
])
def test_bld_10_first_toolkit_of_each_arch(arch, first):
    parsed = parse_arch(arch)
    older = (first[0], first[1] - 1) if first[1] else (first[0] - 1, 9)
    assert check_toolkit(parsed, first, "x") is None and check_toolkit(parsed, (99, 0), "x") is None
    assert f"needs CUDA >= {first[0]}.{first[1]}, found {older[0]}.{older[1]} at x" in check_toolkit(parsed, older, "x")


def test_bld_11_nothing_named_and_no_gpu_names_the_variable():
    with pytest.raises(ArchUnknown, match="TORCH_CUDA_ARCH_LIST"):
        resolve_archs([], None, no_gpu)
    with pytest.raises(ArchUnknown, match="TORCH_CUDA_ARCH_LIST"):
        resolve_archs([], " ; ", no_gpu)


@pytest.mark.parametrize("text", ["9.0a;12.0a", "9.0a 12.0a", "9.0a, 12.0a", "9.0;90a;12.0+PTX"])
def test_bld_11_a_list_builds_without_touching_a_device(text):
    assert [a.name for a in resolve_archs([], text, never)] == ["90a", "120a"]
    assert [a.name for a in resolve_archs(["120a"], text, never)] == ["120a"]
    assert [a.name for a in parse_arch_list(text)] == ["90a", "120a"]


def test_bld_11_without_a_list_the_gpus_seen_decide():
    assert [a.name for a in resolve_archs([], None, lambda: [(9, 0), (9, 0), (12, 1)])] == ["90a", "121a"]


def test_bld_11_the_command_builds_each_arch_of_the_list(monkeypatch, tmp_path, capsys):
    bindings = tmp_path / "tk_kernels" / "bindings"
    bindings.mkdir(parents=True)
    (bindings / "moe_module.cu").touch()
    built = []
    monkeypatch.setattr(cli_build, "native_modules", lambda: native_modules(tmp_path))
    monkeypatch.setattr(cli_build, "_capabilities", never)
    monkeypatch.setattr(cli_build, "build_cuda_module",
                        lambda name, sources, arch: built.append((name, tuple(sources), arch)) or "PATH")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0;12.0a")
    parser = argparse.ArgumentParser()
    cli_build.add_arguments(parser)
    assert cli_build.run(parser.parse_args([])) == 0
    source = ("tk_kernels/bindings/moe_module.cu",)
    assert built == [("moe_tk_moe", source, "90a"), ("moe_tk_moe", source, "120a")]
    assert "9.0 is built as 90a" in capsys.readouterr().out

    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST")
    monkeypatch.setattr(cli_build, "_capabilities", no_gpu)
    assert cli_build.run(parser.parse_args([])) == 0 and len(built) == 2
    assert "no CUDA modules are built" in (out := capsys.readouterr().out) and "TORCH_CUDA_ARCH_LIST" in out
