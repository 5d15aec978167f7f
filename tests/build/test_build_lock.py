"""BLD-01 and BLD-02: several processes build at once, builders die, locks are left behind."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
from build_helpers import REPO, processes_with, write_program

from moe_tk.builder.build import build_host_module, load_module
from moe_tk.builder.cache import BuildLock, publish
from moe_tk.errors import BuildError

WATCHDOG_S = 60

BUILD_AND_LOAD = """
import sys
from moe_tk.builder.build import build_host_module, load_module
root, *names = sys.argv[1:]
for name in names:
    path = build_host_module("mini", [name + ".cpp"], root=root)
    assert load_module(path, "mini").value == 7
    print(path)
"""


def start(root, *names, **kwargs) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", BUILD_AND_LOAD, str(root), *names], text=True, cwd=REPO,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, **kwargs)


def finish(processes) -> tuple[list[set[str]], str]:
    """What each printed, and all of stderr. Fails if one fails or is late; leaves none behind."""
    outputs, errors = [], ""
    try:
        for process in processes:
            out, err = process.communicate(timeout=WATCHDOG_S)
            assert process.returncode == 0, err
            outputs.append(set(out.split()))
            errors += err
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return outputs, errors


def fork_and_build(root, names, gate_fd) -> int:
    """A forked builder that starts when the gate closes: 8 of these really start together. Exit status 0 if right."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.read(gate_fd, 1)
        paths = [build_host_module("mini", [f"{name}.cpp"], root=root) for name in names]
        values = [load_module(path, "mini").value for path in paths]
        status = 0 if values == [7] * len(names) and len(set(paths)) == len(names) else 2
    finally:
        os._exit(status)


def wait_all(pids) -> list[int]:
    deadline, statuses = time.monotonic() + WATCHDOG_S, {}
    while len(statuses) < len(pids):
        for pid in set(pids) - set(statuses):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                statuses[pid] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            for pid in set(pids) - set(statuses):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            pytest.fail(f"{len(pids) - len(statuses)} of {len(pids)} builders did not end in {WATCHDOG_S} s")
        time.sleep(0.005)
    return list(statuses.values())


@pytest.mark.parametrize("names", [["mini"], ["mini", "twin"]], ids=["one_target", "two_targets"])
def test_bld_02_eight_processes_compile_once(names, mini_root, cache, copying_cxx, tmp_path, monkeypatch):
    (mini_root / "twin.cpp").write_text((mini_root / "mini.cpp").read_text())
    for repeat in range(20):
        folder = tmp_path / f"cache{repeat}"
        monkeypatch.setenv("MOE_TK_CACHE_DIR", str(folder))
        before = copying_cxx()
        gate_read, gate_write = os.pipe()
        pids = [fork_and_build(mini_root, names if rank % 2 else names[::-1], gate_read) for rank in range(8)]
        os.close(gate_read)
        os.write(gate_write, b"x" * 8)
        os.close(gate_write)
        assert wait_all(pids) == [0] * 8
        assert copying_cxx() - before == len(names)
        assert len(list(folder.glob("*.so"))) == len(names) and not list(folder.glob("building-*"))


def test_bld_02_with_the_real_compiler_and_new_interpreters(mini_root, cache, counting_cxx):
    outputs, _ = finish([start(mini_root, "mini") for _ in range(8)])
    assert counting_cxx() == 1
    assert len(set.union(*outputs)) == 1


def test_bld_01_lock_file_without_owner_holds_nobody(mini_root, cache):
    cache.mkdir()
    (cache / "build.lock").write_text("process 1 on elsewhere")
    outputs, errors = finish([start(mini_root, "mini") for _ in range(2)])
    assert outputs[0] == outputs[1] and "process 1 on elsewhere" not in errors


def test_bld_01_killed_builder_leaves_nothing_that_matters(mini_root, cache, counting_cxx, tmp_path, monkeypatch):
    slow = write_program(tmp_path / "bin" / "slow-g++", f"""#!/bin/sh
case " $* " in *" -c "*) for out; do :; done; echo half >"$out"; exec sleep 600;; esac
exec '{tmp_path}/bin/counting-g++' "$@"
""")
    victim = start(mini_root, "mini", env={**os.environ, "CXX": str(slow)}, start_new_session=True)
    try:
        deadline = time.monotonic() + WATCHDOG_S
        while not list(cache.glob("building-*/*.o")):
            assert victim.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        victim.kill()
        victim.communicate()
        outputs, _ = finish([start(mini_root, "mini") for _ in range(2)])
    finally:
        victim.kill()
        victim.communicate()
    assert outputs[0] == outputs[1] and counting_cxx() == 1
    assert not list(cache.glob("building-*"))
    while processes_with(str(slow)) and time.monotonic() < deadline:  # its compiler ends with it
        time.sleep(0.02)
    assert not processes_with(str(slow))


def test_interrupted_builder_stops_its_compiler(mini_root, cache, tmp_path):
    slow = write_program(tmp_path / "bin" / "slow-g++", """#!/bin/sh
case " $* " in *" -c "*) sleep 600;; *) exec g++ "$@";; esac
""")
    victim = start(mini_root, "mini", env={**os.environ, "CXX": str(slow)})
    deadline = time.monotonic() + WATCHDOG_S
    while not list(cache.glob("building-*/*.stderr")) and time.monotonic() < deadline:
        time.sleep(0.02)
    victim.send_signal(signal.SIGINT)
    _, errors = victim.communicate(timeout=WATCHDOG_S)
    assert "KeyboardInterrupt" in errors
    assert not processes_with(str(slow)) and not list(cache.glob("building-*"))


def test_bld_01_half_built_output_is_never_loaded(mini_root, cache, counting_cxx):
    path = build_host_module("mini", ["mini.cpp"], root=mini_root)
    left = cache / "building-left"
    left.mkdir()
    (left / path.name).write_bytes(path.read_bytes()[:100])
    path.unlink()
    assert load_module(build_host_module("mini", ["mini.cpp"], root=mini_root), "mini").value == 7
    assert counting_cxx() == 2 and not left.exists()


def test_bld_01_waiting_says_once_for_whom_and_ends(mini_root, cache, monkeypatch):
    cache.mkdir()
    with open(cache / "build.lock", "w") as owner:
        owner.write("process 4242 on somewhere")
        owner.flush()
        fcntl.flock(owner, fcntl.LOCK_EX)
        waiter = start(mini_root, "mini", env={**os.environ, "MOE_TK_BUILD_TIMEOUT_S": "2"})
        _, errors = waiter.communicate(timeout=WATCHDOG_S)
    assert waiter.returncode == 1
    assert errors.count("waiting for process 4242 on somewhere") == 1
    assert re.search(r"BuildError: waited \d+ s for process 4242", errors)
    assert "MOE_TK_BUILD_TIMEOUT_S (now 2)" in errors


def test_bld_01_waiter_goes_on_when_the_owner_dies(mini_root, cache):
    cache.mkdir()
    hold = (f"import fcntl, time; f = open({str(cache / 'build.lock')!r}, 'w'); fcntl.flock(f, fcntl.LOCK_EX); "
            "print('held', flush=True); time.sleep(600)")
    owner = subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout.readline() == "held\n"
        waiter = start(mini_root, "mini")
        time.sleep(0.5)
        assert waiter.poll() is None
    finally:
        owner.kill()
        owner.communicate()
    finish([waiter])


def test_waiter_stops_as_soon_as_the_module_is_there(tmp_path):
    owner, waiter = BuildLock(tmp_path, "a"), BuildLock(tmp_path, "a")
    assert owner.acquire(lambda: False, 1.0)
    assert waiter.acquire(lambda: True, 1.0) is False  # somebody made it: no lock taken, no wait
    owner.release()
    assert waiter.acquire(lambda: True, 1.0) is False
    assert owner.acquire(lambda: False, 1.0)  # and the waiter did not keep it
    owner.release()


def test_lock_survives_that_the_cache_is_deleted(tmp_path):
    owner, other = BuildLock(tmp_path / "c", "a"), BuildLock(tmp_path / "c", "a")
    assert owner.acquire(lambda: False, 1.0)
    (tmp_path / "c" / "build.lock").unlink()
    assert other.acquire(lambda: False, 1.0)  # a new file is a new lock
    owner.release()
    with pytest.raises(BuildError, match="waited"):
        owner.acquire(lambda: False, 0.1)
    other.release()


def test_a_lock_on_a_deleted_file_does_not_count(tmp_path):
    """Between opening and locking, somebody deletes the cache and another builder locks the new file."""
    first, second = BuildLock(tmp_path, "a"), BuildLock(tmp_path, "a")
    really_open = first._open

    def open_then_lose_it():
        fd = really_open()
        first.path.unlink()
        first._open = really_open
        assert second.acquire(lambda: False, 1.0)
        return fd

    first._open = open_then_lose_it
    with pytest.raises(BuildError, match="waited"):
        first.acquire(lambda: False, 0.2)
    second.release()


def test_bld_02_published_file_is_never_seen_in_part(tmp_path):
    size = 50_000_000
    (tmp_path / "built").write_bytes(bytes(size))
    final, seen = tmp_path / "final", set()

    def watch():
        while seen != {size}:
            if final.exists():
                seen.add(final.stat().st_size)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    publish(tmp_path / "built", final)
    watcher.join(timeout=WATCHDOG_S)
    assert seen == {size} and not (tmp_path / "built").exists()


def test_file_system_without_locks_still_builds(mini_root, cache, monkeypatch):
    def no_locks(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    left = cache / "building-of-another-builder"
    left.mkdir(parents=True)
    assert load_module(build_host_module("mini", ["mini.cpp"], root=mini_root), "mini").value == 7
    assert left.exists()  # without a lock nobody can know that its builder is dead
