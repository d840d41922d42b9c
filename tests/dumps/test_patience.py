"""A disk that hangs costs a server some seconds once, and no finding."""

from __future__ import annotations

import contextlib
import threading

import pytest
from hung_disk import hung_disk

from g4debug.dumps import patience
from g4debug.findings.record import Finding, Location
from g4debug.findings.steps import Recorder
from g4debug.settings import Settings
from g4debug.trapping.describe import Describer
from g4debug.trapping.trap import Trap, TrapError

pytestmark = pytest.mark.once("it is g4debug's own code")


def threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "g4debug-disk"]


def wait_for_all() -> None:
    for thread in threads():
        thread.join(600)
        assert not thread.is_alive()


def test_the_result_and_the_error_are_those_of_the_work(tmp_path):
    assert patience.within(tmp_path, lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        patience.within(tmp_path, lambda: 1 // 0)
    assert threads() == []


def test_what_hangs_is_waited_for_once_and_told_when_it_ends(tmp_path, caplog, monkeypatch):
    monkeypatch.chdir(tmp_path)
    released = threading.Event()
    with pytest.raises(patience.HungDiskError, match=r"has not answered in 0 s"):
        patience.within(tmp_path, lambda: released.wait(600) and "there it is", 0.2)
    with pytest.raises(patience.HungDiskError, match="still has not answered an earlier call"):
        patience.within(tmp_path / ".." / tmp_path.name, lambda: 3, 600)
    assert patience.within(tmp_path / "other", lambda: 3) == 3
    released.set()
    wait_for_all()
    assert patience.within(tmp_path, lambda: 3) == 3
    (told,) = caplog.messages
    assert told.startswith(f"g4debug: the disk of {tmp_path} has answered after ")
    assert told.endswith("there it is")


def test_at_the_end_of_the_process_it_is_done_without_a_thread(tmp_path, monkeypatch):
    """Python 3.12 starts no thread any more in an exit handler."""

    def refuses(self):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuses)
    assert patience.within(tmp_path, lambda: 3) == 3


def test_a_finding_is_raised_although_the_disk_of_its_dump_hangs(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(patience, "SECONDS", 1.0)
    found = Finding("page-table", "out-of-range", "a.site", "it is bad", Location(), "1", "2")
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(hung_disk(tmp_path / "disk"))
        except OSError as e:
            pytest.skip(f"no file system can be mounted here: {e}")
        settings = Settings(debug=True, debug_dir=tmp_path / "disk" / "dumps")
        trap = Trap(settings, Describer(Recorder(4)))
        for problem in ("has not answered in 1 s", "still has not answered an earlier call"):
            with pytest.raises(TrapError) as error:
                trap.report(found)
            assert error.value.path is None
            assert problem in error.value.problem
            assert f"no dump:  the disk of {settings.debug_dir} " in caplog.text
        assert len(threads()) == 1
    wait_for_all()
    assert f"g4debug: the disk of {settings.debug_dir} has answered after" in caplog.text
