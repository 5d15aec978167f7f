"""BLD-04, 05, 06, 07, 10, 15: which CUDA toolkit is used, and what is said when none can be. All nvcc are scripts."""

from __future__ import annotations

import importlib.util

import pytest
from build_helpers import write_program

from moe_tk.builder import cuda_toolkit
from moe_tk.builder.arch import parse_arch
from moe_tk.builder.build import build_cuda_module, build_host_module
from moe_tk.builder.cuda_toolkit import choose_toolkit, find_toolkits
from moe_tk.errors import BuildError


@pytest.fixture(autouse=True)
def only_fake_toolkits(monkeypatch, tmp_path):
    """PATH, /usr/local and the Python packages of this machine are out of sight."""
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setattr(cuda_toolkit, "_package_roots", list)


def find(tmp_path):
    return find_toolkits(local=str(tmp_path / "local"))


def choose(candidates, arch="90a", torch_cuda="13.0", **kwargs):
    return choose_toolkit(parse_arch(arch), candidates, torch_cuda, **kwargs)


def test_bld_04_new_toolkit_beats_the_old_nvcc_on_path(fake_toolkit, tmp_path, monkeypatch):
    old = fake_toolkit("distribution", "11.5")
    new = fake_toolkit("local/cuda", "13.0")
    monkeypatch.setenv("PATH", str(old / "bin"))
    candidates = find(tmp_path)
    choice = choose(candidates)
    assert [c.version for c in candidates] == [(11, 5), (13, 0)]
    assert choice.require().root == new
    assert choice.reason == "first that builds sm_90a and matches torch's CUDA 13.0"
    verdicts = {c.root: verdict for c, verdict in choice.verdicts}  # what a doctor prints
    assert "11.5 has no C++20" in verdicts[old] and verdicts[new] == "usable"


def test_bld_04_all_places_are_searched_and_links_count_once(fake_toolkit, tmp_path, monkeypatch):
    home = fake_toolkit("home", "12.9")
    fake_toolkit("local/cuda-12.9", "12.9")
    newest = fake_toolkit("local/cuda-13.1", "13.1")
    (tmp_path / "local" / "cuda").symlink_to(newest)
    package = fake_toolkit("site/nvidia/cu13", "13.0")
    monkeypatch.setattr(cuda_toolkit, "_package_roots", lambda: [package])
    monkeypatch.setenv("CUDA_HOME", str(home))
    monkeypatch.setenv("PATH", f"{newest}/bin::{tmp_path}/absent")
    found = [(c.source, c.version) for c in find(tmp_path)]
    local = str(tmp_path / "local")
    assert found == [("CUDA_HOME", (12, 9)), ("PATH", (13, 1)), (local, (12, 9)), ("Python package", (13, 0))]


def test_bld_04_a_wrapper_script_is_followed_to_its_toolkit(fake_toolkit, tmp_path, monkeypatch):
    root = fake_toolkit("real", "13.0")
    wrapper = tmp_path / "wrapped" / "nvcc"
    wrapper.parent.mkdir()
    wrapper.write_text(f"""#!/bin/sh
case "$*" in *--dryrun*) echo '#$ TOP={root}/bin/..' >&2;; *) exec {root}/bin/nvcc "$@";; esac
""")
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", str(wrapper.parent))
    [candidate] = find(tmp_path)
    assert candidate.root == root and candidate.problem is None


def test_bld_04_candidate_that_matches_torch_beats_an_earlier_one(fake_toolkit, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(fake_toolkit("home", "13.0")))
    match = fake_toolkit("local/cuda-12.9", "12.9")
    choice = choose(find(tmp_path), torch_cuda="12.8")
    assert choice.require().root == match
    assert any("CUDA_HOME is passed over: built for CUDA 13, but torch for CUDA 12.8" in w for w in choice.warnings)


def test_bld_05_other_major_than_torch_is_an_error_with_an_override(fake_toolkit, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(fake_toolkit("home", "13.3")))
    candidates = find(tmp_path)
    with pytest.raises(BuildError, match="torch for CUDA 12.9.*MOE_TK_ALLOW_CUDA_MISMATCH=1"):
        choose(candidates, torch_cuda="12.9").require()
    allowed = choose(candidates, torch_cuda="12.9", allow_mismatch=True)
    assert allowed.require().version == (13, 3)
    assert any("MOE_TK_ALLOW_CUDA_MISMATCH is set" in w for w in allowed.warnings)
    assert choose(candidates, torch_cuda=None).require().version == (13, 3)  # torch for CPU: nothing to match


def test_bld_05_headers_of_another_minor_version_warn(fake_toolkit, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(fake_toolkit("home", "13.3", header=13000)))
    choice = choose(find(tmp_path))
    assert choice.require().header_version == (13, 0)
    assert any("nvcc is 13.3 but its headers" in w and "13.0" in w and "install both" in w for w in choice.warnings)


def test_bld_05_headers_of_another_major_version_are_an_error(fake_toolkit, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(fake_toolkit("home", "13.0", header=12090)))
    with pytest.raises(BuildError, match="nvcc is 13.0 but its headers in .* are 12.9, another major"):
        choose(find(tmp_path)).require()


def test_bld_05_the_warning_is_given_when_building(fake_toolkit, mini_root, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_HOME", str(fake_toolkit("home", "13.3", header=13000)))
    monkeypatch.setattr(cuda_toolkit, "torch_cuda_version", lambda: "13.0")
    monkeypatch.setenv("CXX", str(write_program(tmp_path / "g++", "#!/bin/sh\necho 'g++ (fake) 12.2.0'\n")))
    with pytest.warns(RuntimeWarning, match="nvcc is 13.3"), pytest.raises(BuildError):
        build_cuda_module("mini", ["mini.cpp"], arch="90a", root=mini_root)  # this nvcc makes nothing


def test_bld_05_torch_version_is_read_without_importing_it(tmp_path, monkeypatch):
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    version = package / "version.py"

    class Spec:
        origin = str(package / "__init__.py")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: Spec)
    for text, wanted in (("cuda: Optional[str] = '12.9'\n", "12.9"), ('cuda = "13.0"\n', "13.0"),
                         ("cuda: Optional[str] = None\nhip = '6.0'\n", None)):
        version.write_text(f"debug = False\n{text}")
        assert cuda_toolkit.torch_cuda_version() == wanted
    version.unlink()
    assert cuda_toolkit.torch_cuda_version() is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cuda_toolkit.torch_cuda_version() is None


@pytest.mark.parametrize("shape", [":{root}", "{root}:/other", "~/cuda", "{root}/bin/nvcc", "{root}/absent", "cuda",
                                   "/tmp"])
def test_bld_06_malformed_cuda_home_is_named(shape, fake_toolkit, tmp_path, monkeypatch):
    good = fake_toolkit("local/cuda", "13.0")  # a good one elsewhere does not hide it
    value = shape.format(root=good)
    monkeypatch.setenv("CUDA_HOME", value)
    candidates = find(tmp_path)
    with pytest.raises(BuildError) as caught:
        choose(candidates).require()
    assert f"CUDA_HOME={value!r} is not an absolute folder with bin/nvcc" in str(caught.value)
    assert candidates[0].problem and len(candidates) == 2  # a doctor still sees all


@pytest.mark.parametrize("shape", ["{root}/", "  {root} ", "{root}//"])
def test_bld_06_slash_and_blanks_around_it_do_no_harm(shape, fake_toolkit, tmp_path, monkeypatch):
    root = fake_toolkit("a folder", "13.0")
    monkeypatch.setenv("CUDA_HOME", shape.format(root=root))
    assert choose(find(tmp_path)).require().nvcc == root / "bin" / "nvcc"


def test_bld_06_blank_cuda_home_is_unset(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_HOME", "  ")
    assert find(tmp_path) == []


def test_bld_07_no_toolkit_says_what_is_missing_and_where_it_was_sought(mini_root, monkeypatch):
    monkeypatch.setattr(cuda_toolkit, "find_toolkits", list)
    with pytest.raises(BuildError, match=r"no nvcc found in CUDA_HOME, PATH, /usr/local/cuda\*, .*package.*the CPU b"):
        build_cuda_module("mini", ["mini.cpp"], arch="90a", root=mini_root)


def test_bld_07_host_modules_need_no_toolkit(mini_root, monkeypatch):
    monkeypatch.setattr(cuda_toolkit, "find_toolkits", lambda: pytest.fail("looked for CUDA"))
    monkeypatch.setenv("PATH", "/usr/local/bin:/usr/bin:/bin")
    assert build_host_module("mini", ["mini.cpp"], root=mini_root).is_file()


@pytest.mark.parametrize(("version", "arch", "message"), [
    ("12.8", (10, 3), "SM103 needs CUDA >= 12.9, found 12.8 at"),
    ("12.8", "100f", "SM100f (family) needs CUDA >= 12.9, found 12.8 at"),
    ("12.4", (12, 0), "SM120 needs CUDA >= 12.8, found 12.4 at"),
])
def test_bld_10_too_old_for_the_gpu_is_said_first(version, arch, message, fake_toolkit, tmp_path, monkeypatch):
    root = fake_toolkit("home", version)
    monkeypatch.setenv("CUDA_HOME", str(root))
    with pytest.raises(BuildError) as caught:
        choose(find(tmp_path), arch=arch, torch_cuda=None).require()
    assert f"{message} {root}/bin/nvcc" in str(caught.value)
    assert choose(find(tmp_path), arch="90a", torch_cuda=None).require().root == root


def test_bld_15_incomplete_toolkit_lists_what_is_missing(fake_toolkit, tmp_path, monkeypatch):
    fake_toolkit("runtime-image", "13.0", nvcc_only=True)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "runtime-image"))
    [candidate] = find(tmp_path)
    assert candidate.files["bin/nvcc"] and not candidate.files["include/cuda_runtime.h"]
    assert set(candidate.files) == set(cuda_toolkit.USED_FILES)  # each program and header that a build uses
    with pytest.raises(BuildError, match="incomplete, missing: bin/ptxas, .*include/cuda_runtime.h"):
        choose([candidate]).require()


def test_bld_15_nothing_beyond_the_list_is_needed(fake_toolkit, tmp_path, monkeypatch):
    root = fake_toolkit("toolkit", "13.0")
    monkeypatch.setenv("CUDA_HOME", str(root))
    assert not (root / "bin" / "cuobjdump").exists() and not (root / "bin" / "nvdisasm").exists()
    assert choose(find(tmp_path)).require().problem is None


def test_nvcc_that_does_not_run_is_a_verdict_not_a_crash(fake_toolkit, tmp_path, monkeypatch):
    root = fake_toolkit("home", "13.0")
    (root / "bin" / "nvcc").write_text("#!/bin/sh\necho broken >&2; exit 3\n")
    monkeypatch.setenv("PATH", str(root / "bin"))
    with pytest.raises(BuildError, match="ended with status 3: broken"):
        choose(find(tmp_path)).require()
