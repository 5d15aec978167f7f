"""The folder of built modules: which one, the lock that lets one process build, publishing by rename.

Looking for a built module never creates a folder. A lock is an flock, so the system drops it when its owner dies,
and a lock file left behind means nothing.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
import stat
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from moe_tk.config import env
from moe_tk.errors import BuildError

LOCK_NAME = "build.lock"
WORK_PREFIX = "building-"
POLL_S = 0.05
QUIET_S = 1.0  # a wait shorter than this is not worth a line
_NO_LOCKS_HERE = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@dataclass(frozen=True, slots=True)
class CacheFolder:
    """One place where built modules may be. `source` is the variable or rule that names it."""

    source: str
    path: Path

    @property
    def problem(self) -> str | None:
        """Why modules from here would not be loaded or cannot be written here, or None. Creates nothing."""
        if self.source == "temp" and (reason := _foreign_folder(self.path)):
            return reason
        place = self.path
        while not os.path.lexists(place) and place != place.parent:
            place = place.parent
        if not place.is_dir():
            return f"{place} is not a folder"
        return None if _may_write(place) else f"{place} is read-only for this user"


def cache_folders() -> list[CacheFolder]:
    """All places in order of preference: MOE_TK_CACHE_DIR, XDG_CACHE_HOME, home, temp. Nothing is created."""
    folders = []
    if own := env("MOE_TK_CACHE_DIR"):
        folders.append(CacheFolder("MOE_TK_CACHE_DIR", Path(own).expanduser().absolute()))
    xdg = env("XDG_CACHE_HOME")
    if xdg and os.path.isabs(xdg):  # the XDG rules say that a relative one is ignored
        folders.append(CacheFolder("XDG_CACHE_HOME", Path(xdg) / "moe_tk"))
    home = os.path.expanduser("~")
    if os.path.isabs(home):
        folders.append(CacheFolder("home", Path(home) / ".cache" / "moe_tk"))
    try:
        folders.append(CacheFolder("temp", Path(tempfile.gettempdir()) / f"moe_tk-{os.geteuid()}"))
    except OSError:  # no usable temp folder at all
        pass
    return folders


def find_built(pattern: str) -> Path | None:
    """The newest file that matches `pattern` in the first usable cache folder or in an unusable one before it.

    A read-only folder with the wanted module in it is as good as any; a later folder is only looked at when all
    before it cannot be written, so that a fresh MOE_TK_CACHE_DIR is really fresh.
    """
    for folder in cache_folders():
        problem = folder.problem
        if not (folder.source == "temp" and problem):
            found = [path for path in folder.path.glob(pattern) if path.is_file()] if folder.path.is_dir() else []
            if found:
                return max(found, key=lambda path: path.stat().st_mtime_ns)
        if problem is None:
            return None
    return None


def make_cache_folder() -> Path:
    """Create and return the first cache folder that really takes a file.

    Warns when it is not the first choice. Raises BuildError listing each place and its reason when none does.
    """
    refused = []
    for folder in cache_folders():
        try:
            folder.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            if folder.source == "temp" and (reason := _foreign_folder(folder.path)):
                raise OSError(errno.EPERM, reason)
            with tempfile.TemporaryFile(dir=folder.path):  # os.access lies to root and on read-only mounts
                pass
        except OSError as error:
            refused.append(f"{folder.source}: {folder.path} ({error.strerror})")
            continue
        if refused or folder.source == "temp":
            warnings.warn(f"moe_tk keeps its built modules in {folder.path}, because no better place can be written: "
                          f"{'; '.join(refused) or 'no home folder'}. Set MOE_TK_CACHE_DIR to a folder that can.",
                          RuntimeWarning, stacklevel=2)
        return folder.path
    raise BuildError(f"no folder can take the built modules: {'; '.join(refused)}. "
                     "Set MOE_TK_CACHE_DIR to a folder that can be written and has space.")


def _may_write(folder: Path) -> bool:
    return os.access(folder, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids)


def _foreign_folder(path: Path) -> str | None:
    """Why a folder in a shared temp folder cannot be trusted to hold code that we load, or None."""
    try:
        info = path.lstat()
    except OSError:
        return None
    if not stat.S_ISDIR(info.st_mode):
        return f"{path} is a link or a file"
    if info.st_uid != os.geteuid() or info.st_mode & 0o022:
        return f"{path} belongs to, or can be written by, another user"
    return None


class BuildLock:
    """The lock of one cache folder: its owner is the only process that builds into it.

    `acquire` returns True when this process owns it, or False as soon as `done()` is true, which means that
    somebody else has made what is wanted. It says once what it waits for, and raises BuildError after `limit_s`.
    """

    def __init__(self, folder: Path, wanted: str) -> None:
        self.path = folder / LOCK_NAME
        self.wanted = wanted
        self.exclusive = True  # False on a file system without locks
        self._fd: int | None = None

    def acquire(self, done: Callable[[], bool], limit_s: float, quiet_s: float = QUIET_S) -> bool:
        start, said = time.monotonic(), False
        while not self._try():
            if done():
                return False
            waited = time.monotonic() - start
            if waited > limit_s:
                raise BuildError(
                    f"waited {waited:.0f} s for {self._owner()}, which holds {self.path}, to build {self.wanted}. "
                    "If that process hangs, end it (the lock goes with it); if it is only slow, raise "
                    f"MOE_TK_BUILD_TIMEOUT_S (now {limit_s:g}).")
            if not said and waited >= quiet_s:
                print(f"moe_tk: waiting for {self._owner()} before building {self.wanted} "
                      f"(lock {self.path}, at most {limit_s:g} s)", file=sys.stderr, flush=True)
                said = True
            time.sleep(POLL_S)
        if done():
            self.release()
            return False
        return True

    def release(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _try(self) -> bool:
        fd = self._open()
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        except OSError as error:
            os.close(fd)
            if error.errno not in _NO_LOCKS_HERE:
                raise BuildError(f"cannot lock {self.path}: {error.strerror}") from error
            self.exclusive = False  # private folders and atomic renames keep this right; work may be done twice
            return True
        if not self._is_current(fd):  # the cache folder was deleted and made again while we waited
            os.close(fd)
            return False
        self._fd = fd
        self._sign()
        return True

    def _open(self) -> int:
        flags = os.O_CREAT | os.O_CLOEXEC
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            try:
                return os.open(self.path, flags | os.O_RDWR, 0o600)
            except PermissionError:
                return os.open(self.path, flags | os.O_RDONLY)
        except OSError as error:
            raise BuildError(f"cannot open the lock file {self.path}: {error.strerror}. "
                             "Set MOE_TK_CACHE_DIR to a folder that can be written.") from error

    def _is_current(self, fd: int) -> bool:
        try:
            return os.path.samestat(os.fstat(fd), os.stat(self.path))
        except FileNotFoundError:
            return False

    def _sign(self) -> None:
        assert self._fd is not None
        try:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        except OSError:  # only a courtesy to those who wait; a full disk is reported by the build itself
            pass

    def _owner(self) -> str:
        try:
            return self.path.read_text().strip() or "another process"
        except OSError:
            return "another process"


def make_work_folder(folder: Path, lock: BuildLock) -> Path:
    """A new private folder beside the final place, on the same file system. Removes what killed builders left."""
    if lock.exclusive:
        for left in folder.glob(WORK_PREFIX + "*"):
            shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=WORK_PREFIX, dir=folder))


def publish(built: Path, final: Path) -> None:
    """Give a complete file its final name in one step: others see all of it or nothing."""
    fd = os.open(built, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    os.replace(built, final)
