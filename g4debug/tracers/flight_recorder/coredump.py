"""Lets the CUDA driver write core dumps, and finds the one of this process.

The driver writes one when a kernel faults, if it was told so before this process began with CUDA.
It has the address that faulted. ``benchmarks/core_dumps.py`` measures what that costs while nothing
faults. With the flight recorder the driver is told so, unless somebody has set one of these
variables: the user, or SGLang, which sets them where ``SGLANG_CUDA_COREDUMP=1``
(``debug_utils/cuda_coredump.py``). Its file has no memory of the device, and lies beside the dumps.
Reads no device, and imports neither torch nor sglang.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path

from g4debug.dumps import patience

# In the name of the file the driver replaces these by host name, process id and Unix time.
UNNAMED = "core_%t_%h_%p.nvcudmp"
_PART = re.compile(r"(%[hpt])")
ENABLE = "CUDA_ENABLE_COREDUMP_ON_EXCEPTION"
FLAGS = "CUDA_COREDUMP_GENERATION_FLAGS"
FILE = "CUDA_COREDUMP_FILE"
LIGHTWEIGHT = "CUDA_ENABLE_LIGHTWEIGHT_COREDUMP"  # what older drivers have in place of the flags
# Core dumps that somebody asks for by a pipe go to the same file, with the same flags.
ASKED = "CUDA_ENABLE_USER_TRIGGERED_COREDUMP"
BY_SGLANG = "_SGLANG_CUDA_COREDUMP_INJECTED"  # SGLang has set them: SGLANG_CUDA_COREDUMP=1
OURS = "g4debug-core-"
SUFFIX = ".nvcudmp"
# Registers, stacks and code, but no memory: at most 209 MB so far. With skip_abort the process goes
# on, so that Python sees the error.
LIGHT = (
    "skip_nonrelocated_elf_images,skip_global_memory,skip_shared_memory,skip_local_memory,"
    "skip_constbank_memory,skip_abort"
)
MOST = 16  # of our core dumps that are kept in a folder: those of one crash of 16 ranks
LARGEST = 2 << 30  # bytes of one of ours; the driver would go on to write until the disk is full
NEW = 60.0  # seconds in which a core dump may still be written, or read by the rank that it is of
ROOM = 4 << 30  # bytes that must be free there
SECONDS = 5.0  # seconds that its disk may take to answer
# One of CUDA 12.2 does not know the flags: it would write all of the device's memory, and abort.
OLDEST = 580  # driver with which they were run
DRIVER = Path("/proc/driver/nvidia/version")
DEVICES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))  # one of them is where there is a driver
_BRANCH = re.compile(r"Kernel Module.*?\s(\d+)\.\d")


def arm(environ: MutableMapping[str, str], mode: str, folder: Path) -> None:
    """Tell the driver, by the environment of this process and of those that it starts.

    mode: see ``G4DEBUG_CORE``. folder: of the dumps; it is made by :func:`prepare`.
    """
    again = is_ours(environ)  # of the process that started this one; its folder may be another
    if again:
        for name in (ENABLE, FLAGS, FILE, LIGHTWEIGHT):
            environ.pop(name, None)
    # Beside ours it was SGLang that has set ASKED, for --crash-dump-folder.
    if mode == "off" or taken(environ, asked=not again):
        return
    if why_not(folder, forced=mode == "force"):
        return
    environ[ENABLE], environ[FLAGS] = "1", LIGHT
    if too_old():
        environ[LIGHTWEIGHT] = "1"
    environ[FILE] = os.path.abspath(folder / f"{OURS}%h-{_place()}-%p-%t{SUFFIX}")


def _place() -> str:
    """Eight digits that differ between hosts, and between containers of one host.

    In each container a server has the same process ids, and all of them may have one dump folder.
    The host's name alone does not tell them apart where containers have the name of their host.
    """
    known = [os.uname().nodename]
    with contextlib.suppress(OSError):
        known.append(Path("/proc/sys/kernel/random/boot_id").read_text())
    with contextlib.suppress(OSError):
        known.append(str(os.stat("/proc/self/ns/pid").st_ino))
    return hashlib.sha256("\n".join(known).encode(errors="replace")).hexdigest()[:8]


class LargeError(Exception):
    """A core dump of ours is larger than any that was seen. path: of the file."""

    def __init__(self, path: Path, size: int) -> None:
        super().__init__(
            f"the CUDA core dump {path} had {size >> 20:,} MiB, and at most "
            f"{LARGEST >> 20:,} are expected of one without memory of the device"
        )
        self.path = path


def refuse_large(environ: Mapping[str, str], core: Path) -> None:
    """Raise LargeError for a core dump of ours above the limit. One of the user's may be larger."""
    if is_ours(environ):
        with contextlib.suppress(OSError):
            size = core.stat().st_size
            if size > LARGEST:
                raise LargeError(core, size)


def remove(environ: Mapping[str, str], core: Path, seconds: float, grows: bool = False) -> bool:
    """Remove a core dump if it is one of ours; True if that was done.

    seconds: that its disk may take. grows: the driver may still write it. Then it is emptied first,
    because a file that is open keeps its disk space though it has no name any more.
    """
    if is_ours(environ):
        with contextlib.suppress(OSError, patience.HungDiskError):
            return patience.within(core.parent, lambda: _remove(core, grows), seconds)
    return False


def _remove(core: Path, grows: bool) -> bool:
    if not _is_mine(core):
        return False
    if grows:
        file = os.open(core, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            os.ftruncate(file, 0)
        finally:
            os.close(file)
    core.unlink(missing_ok=True)
    return True


def _is_mine(core: Path) -> bool:
    """True for a file of this user with a name of ours; a link to one is none."""
    named = core.name.startswith(OURS) and core.name.endswith(SUFFIX)
    status = os.lstat(core)
    return named and stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


def prepare(environ: Mapping[str, str], folder: Path) -> None:
    """Make the folder, which the driver does not, and remove older core dumps of ours there."""
    _look_after(environ, folder, _prepare)


def prune(environ: Mapping[str, str], folder: Path) -> None:
    """Remove older core dumps of ours there. A folder that is not there has none."""
    _look_after(environ, folder, _prune)


def _look_after(environ: Mapping[str, str], folder: Path, work: Callable[[Path], None]) -> None:
    if is_ours(environ):
        with contextlib.suppress(OSError, patience.HungDiskError):
            patience.within(folder, lambda: work(folder), SECONDS)


def _prepare(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    _prune(folder)


def _prune(folder: Path) -> None:
    now, mine = time.time(), []
    for core in folder.glob(f"{OURS}*{SUFFIX}"):
        with contextlib.suppress(OSError):  # each rank does this, at the same time
            if _is_mine(core):
                mine.append((_time(str(core)), core))
    for written, old in sorted(mine)[: max(0, len(mine) - MOST)]:
        if now - written > NEW:  # of another crash: the other ranks of this one may still read
            old.unlink(missing_ok=True)


def is_ours(environ: Mapping[str, str]) -> bool:
    """True if we have told the driver to write core dumps, and not somebody else."""
    return os.path.basename(environ.get(FILE, "")).startswith(OURS)


def taken(environ: Mapping[str, str], asked: bool = True) -> str:
    """The first variable by which somebody else has told the driver what to do, '' if none is set.

    asked: whether ``ASKED`` is one.
    """
    found = [name for name in (ENABLE, FLAGS, FILE, LIGHTWEIGHT) if name in environ]
    if asked and environ.get(ASKED) == "1":
        found.append(ASKED)
    return found[0] if found else ""


def why_not(folder: Path, forced: bool = False) -> str:
    """Why no core dump can be written there, '' if one can. forced: with any driver."""
    old = too_old()
    if old and not forced:
        return f"{old}; G4DEBUG_CORE=force switches them on all the same"
    there = folder.absolute()
    if "%" in str(there):
        return f"the driver would replace the % in {there}"
    try:  # a disk may hang, for example one of the network, and the server would not start
        return patience.within(there, lambda: _of_folder(there), SECONDS)
    except patience.HungDiskError as e:
        return str(e)


def _of_folder(folder: Path) -> str:
    there = folder
    try:
        while not there.exists():
            there = there.parent
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            return f"{there} cannot be written"
        for path in (there, *there.parents):
            if _is_strangers(path):
                return f"{path} was made by another user, where anybody may make a folder"
        free = shutil.disk_usage(there).free
    except OSError as e:  # a folder that may not be looked into, or a file system that is gone
        return f"{there} cannot be looked at ({e.strerror})"
    if free < ROOM:
        return f"{folder} has {free >> 20:,} MiB free, and a core dump may need {ROOM >> 20:,}"
    return ""


def _is_strangers(path: Path) -> bool:
    """True for a folder or link of another user in a folder such as ``/tmp``.

    The driver follows links: whoever guesses the name of a core dump would have it written over any
    file of this user.
    """
    anybody, parent = stat.S_ISVTX | stat.S_IWOTH, os.stat(path.parent).st_mode
    return parent & anybody == anybody and os.lstat(path).st_uid not in (0, os.geteuid())


def too_old() -> str:
    """Why the driver may not know the flags, '' if it does, or if there is none."""
    try:
        found = _BRANCH.search(DRIVER.read_text())
    except (OSError, ValueError):
        found = None
    if found is None and not any(map(os.path.exists, DEVICES)):
        return ""
    if found is not None and int(found[1]) >= OLDEST:
        return ""
    is_ = f"is {found[1]}" if found else "is not known"
    return (
        f"the version of the GPU's driver {is_}: core dumps were never run with one before "
        f"{OLDEST}, which may write all of the device's memory, and abort the process"
    )


def core_dump(environ: Mapping[str, str], pid: int, since: float) -> str:
    """Where the CUDA core dump is, in a sentence. '' if the driver was not told to write one.

    since: as of :func:`find`.
    """
    if not is_enabled(environ):
        return ""
    try:  # not sooner than the dump itself is given up, whose disk it mostly is
        found = patience.within(folder(environ), lambda: find(environ, pid, since))
    except patience.HungDiskError as e:
        return f"CUDA core dump: not looked for, because {e}"
    if found is not None:
        return f"CUDA core dump: {found}"
    named = os.path.abspath(environ.get(FILE) or UNNAMED)
    return f"CUDA core dump: none yet; the driver was told to write it to {named}"


def is_enabled(environ: Mapping[str, str]) -> bool:
    return environ.get(ENABLE) == "1"


def folder(environ: Mapping[str, str]) -> Path:
    """Where the driver was told to write core dumps."""
    return Path(os.path.abspath(environ.get(FILE) or UNNAMED)).parent


def find(environ: Mapping[str, str], pid: int, since: float) -> Path | None:
    """The core dump of a process, None if there is none.

    since: the Unix time at which that process was armed. Older files are of another process that
    had the same number, which is common in containers. A core dump of another host is not taken:
    ours have the place in their name, and in the user's %h must be this host, with or without its
    domain.
    """
    named = environ.get(FILE) or UNNAMED
    host = glob.escape(os.uname().nodename)
    hosts = ("*",) if is_ours(environ) else {host, f"{host}.*", host.partition(".")[0]}
    found = [
        (written, path)
        for of in (hosts if "%h" in named else ("",))
        for path in glob.glob(_pattern(named, of, pid))
        if (written := _time(path)) >= since
    ]
    return Path(os.path.abspath(max(found)[1])) if found else None


def _pattern(named: str, host: str, pid: int) -> str:
    parts = {"%h": host, "%p": str(pid), "%t": "*"}
    return "".join(parts[p] if p in parts else glob.escape(p) for p in _PART.split(named))


def ends_the_process(environ: Mapping[str, str]) -> bool:
    """True if the driver was told to write a core dump, and to abort the process right after it.

    Then no exception reaches Python. SGLang sets such flags unless there are some already.
    """
    flags = environ.get(FLAGS, "").replace(" ", "").split(",")
    return is_enabled(environ) and "skip_abort" not in flags


def abort_words(environ: Mapping[str, str]) -> str:
    """Who has told the driver to abort the process behind a core dump, and what gives both."""
    if BY_SGLANG in environ:
        return (
            "SGLANG_CUDA_COREDUMP=1 tells the CUDA driver to write a core dump, and to abort the "
            "process behind it; without it g4debug lets the driver write one, and go on"
        )
    memory = "" if FLAGS in environ else "; without flags it also writes all of the device's memory"
    return (
        "the CUDA driver was told to write a core dump, and aborts the process behind it; add "
        f"skip_abort to {FLAGS} to have both{memory}"
    )


def _time(path: str) -> float:
    """When a file was last written, in Unix time. -1 if it cannot be read, or is no file."""
    try:
        return os.stat(path).st_mtime if os.path.isfile(path) else -1
    except OSError:
        return -1
