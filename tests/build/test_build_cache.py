"""BLD-12: where built modules go when the usual places cannot be written; nothing is created when nothing is built."""

from __future__ import annotations

import errno
import os
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest

from moe_tk.builder import build as build_module
from moe_tk.builder.build import build_host_module
from moe_tk.builder.cache import cache_folders, find_built, make_cache_folder
from moe_tk.errors import BuildError

NOBODY = 65534


@pytest.fixture
def places(tmp_path, monkeypatch) -> dict[str, Path]:
    """One folder for each source of a cache place; the variables are not set yet."""
    found = {name: tmp_path / name for name in ("own", "xdg", "home", "temp")}
    for folder in found.values():
        folder.mkdir()
    monkeypatch.delenv("MOE_TK_CACHE_DIR")
    monkeypatch.setenv("HOME", str(found["home"]))
    monkeypatch.setattr(tempfile, "tempdir", str(found["temp"]))
    return found


@contextmanager
def as_ordinary_user(root: Path):
    """File modes mean nothing to root: take another user's identity for a moment."""
    if os.geteuid() != 0:
        yield
        return
    for folder in (root, *root.parents):
        if folder.stat().st_uid == 0 and folder != folder.parent:
            folder.chmod(folder.stat().st_mode | 0o011)
    for path in [p for p in root.rglob("*") if not p.is_symlink()]:
        os.chown(path, NOBODY, NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def unwritable(place: Path) -> Path:
    """A folder that nobody can make, root included: its parent is a file."""
    (place / "file").write_text("")
    return place / "file" / "cache"


def test_bld_12_order_of_places(places, monkeypatch):
    assert [f.source for f in cache_folders()] == ["home", "temp"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(places["xdg"]))
    monkeypatch.setenv("MOE_TK_CACHE_DIR", str(places["own"]))
    assert [(f.source, f.path) for f in cache_folders()] == [
        ("MOE_TK_CACHE_DIR", places["own"]), ("XDG_CACHE_HOME", places["xdg"] / "moe_tk"),
        ("home", places["home"] / ".cache" / "moe_tk"), ("temp", places["temp"] / f"moe_tk-{os.geteuid()}")]
    assert [list(folder.iterdir()) for folder in places.values()] == [[]] * 4  # looking creates nothing
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/xdg")
    assert "XDG_CACHE_HOME" not in [f.source for f in cache_folders()]


def test_bld_12_first_choice_is_taken_without_a_warning(places, monkeypatch, recwarn):
    assert make_cache_folder() == places["home"] / ".cache" / "moe_tk"
    monkeypatch.setenv("XDG_CACHE_HOME", str(places["xdg"]))
    assert make_cache_folder() == places["xdg"] / "moe_tk"
    monkeypatch.setenv("MOE_TK_CACHE_DIR", str(places["own"] / "deep" / "er"))
    assert make_cache_folder() == places["own"] / "deep" / "er"
    assert not recwarn.list


def test_bld_12_each_place_that_fails_gives_way_to_the_next_with_a_warning(places, monkeypatch):
    monkeypatch.setenv("MOE_TK_CACHE_DIR", str(unwritable(places["own"])))
    monkeypatch.setenv("XDG_CACHE_HOME", str(places["xdg"]))
    with pytest.warns(RuntimeWarning, match="MOE_TK_CACHE_DIR: .*Not a directory.*Set MOE_TK_CACHE_DIR"):
        assert make_cache_folder() == places["xdg"] / "moe_tk"
    monkeypatch.setenv("XDG_CACHE_HOME", str(unwritable(places["xdg"])))
    monkeypatch.setenv("HOME", str(unwritable(places["home"])))
    with pytest.warns(RuntimeWarning, match="MOE_TK_CACHE_DIR: .*XDG_CACHE_HOME: .*home: "):
        folder = make_cache_folder()
    assert folder.parent == places["temp"] and folder.stat().st_mode & 0o777 == 0o700


def test_bld_12_home_that_is_read_only(places, tmp_path):
    places["home"].chmod(0o555)
    with as_ordinary_user(tmp_path):
        assert "read-only" in cache_folders()[0].problem
        with pytest.warns(RuntimeWarning, match="home: .*Permission denied"):
            assert make_cache_folder().parent == places["temp"]


def test_bld_12_nowhere_to_write_lists_every_place(places, monkeypatch):
    monkeypatch.setenv("HOME", str(unwritable(places["home"])))
    monkeypatch.setattr(tempfile, "tempdir", str(unwritable(places["temp"])))
    with pytest.raises(BuildError, match="no folder can take the built modules: home: .*; temp: .*MOE_TK_CACHE_DIR"):
        make_cache_folder()


def test_bld_12_prebuilt_in_a_read_only_folder_is_used_and_nothing_is_created(places, tmp_path, mini_root, monkeypatch):
    monkeypatch.setenv("MOE_TK_CACHE_DIR", str(places["own"]))
    built = build_host_module("mini", ["mini.cpp"], root=mini_root)
    before = sorted(tmp_path.rglob("*"))
    places["own"].chmod(0o555)
    monkeypatch.setattr(build_module, "make_cache_folder", lambda: pytest.fail("made a folder"))
    with as_ordinary_user(tmp_path):
        assert build_host_module("mini", ["mini.cpp"], root=mini_root) == built
    assert sorted(tmp_path.rglob("*")) == before


def test_bld_12_module_that_went_to_a_later_place_is_found_there(places, mini_root, monkeypatch, counting_cxx):
    monkeypatch.setenv("MOE_TK_CACHE_DIR", str(unwritable(places["own"])))
    with pytest.warns(RuntimeWarning, match="MOE_TK_CACHE_DIR"):
        built = build_host_module("mini", ["mini.cpp"], root=mini_root)
    assert built.is_relative_to(places["home"])
    assert build_host_module("mini", ["mini.cpp"], root=mini_root) == built and counting_cxx() == 1


def test_a_new_own_folder_does_not_see_what_others_hold(places, monkeypatch):
    (places["home"] / ".cache" / "moe_tk").mkdir(parents=True)
    (places["home"] / ".cache" / "moe_tk" / "x.so").touch()
    assert find_built("x.so") is not None
    monkeypatch.setenv("MOE_TK_CACHE_DIR", str(places["own"] / "new"))
    assert find_built("x.so") is None and not (places["own"] / "new").exists()


@pytest.mark.parametrize("trick", ["link", "open", "other"])
def test_code_is_never_loaded_from_a_temp_folder_of_somebody_else(trick, places, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(unwritable(places["home"])))
    planted = places["temp"] / f"moe_tk-{os.geteuid()}"
    real = tmp_path / "planted" if trick == "link" else planted
    real.mkdir()
    (real / "x.so").touch()
    if trick == "link":
        planted.symlink_to(real)
    elif trick == "open":
        real.chmod(0o777)
    else:
        stranger = real.stat().st_uid + 1
        monkeypatch.setattr(os, "geteuid", lambda: stranger)  # whoever asks is not the owner
        real.rename(places["temp"] / f"moe_tk-{stranger}")
    assert find_built("x.so") is None
    with pytest.raises(BuildError, match="link or a file|another user"):
        make_cache_folder()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_bld_12_disk_full_while_writing_our_files(number, mini_root, cache, monkeypatch):
    def full(built, final):
        raise OSError(number, os.strerror(number), str(built))

    monkeypatch.setattr(build_module, "publish", full)
    with pytest.raises(BuildError, match=f"building mini in {cache} failed: {os.strerror(number)}.*disk is full: free"):
        build_host_module("mini", ["mini.cpp"], root=mini_root)
    assert not list(cache.glob("*.so")) and not list(cache.glob("building-*"))


def test_bld_12_disk_full_in_the_compiler(mini_root, tmp_path, cache, monkeypatch):
    """A real limit: no file may grow beyond one block, as on a disk that has just that left."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(BuildError, match="disk is full: free some space"):
            build_host_module("mini", ["mini.cpp"], root=mini_root)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(cache.glob("*.so")) and not list(cache.glob("building-*"))
