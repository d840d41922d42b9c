"""Environment variables: every one of them, and everything that is refused."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from g4debug import discovery
from g4debug.settings import DEFAULT_DUMP_DIR, Settings, SettingsError, fix_switch, ours

VALID = {
    "SGLANG_TRTLLM_MHA_DEBUG": ("1", "debug", True),
    "SGLANG_TRTLLM_MHA_DEBUG_DIR": ("/dumps", "debug_dir", Path("/dumps")),
    "G4DEBUG_TRACE": (" page-table ,", "trace", ("page-table",)),
    "G4DEBUG_MODE": ("contain", "mode", "contain"),
    "G4DEBUG_NOT_RUN_ON_THIS_RELEASE": ("1", "not_run_on_this_release", True),
    "G4DEBUG_FIXES": (" all ", "fixes", "all"),
    "G4DEBUG_FAULTS": ("seed=7;page-oob=1*on", "faults", "seed=7;page-oob=1*on"),
    "G4DEBUG_MAX_DUMPS": ("0", "max_dumps", 0),
    "G4DEBUG_MAX_DUMP_MB": ("64", "max_dump_mb", 64),
    "G4DEBUG_LAUNCH": ("canary-3", "launch", "canary-3"),
    "G4DEBUG_STEPS": ("1", "steps", 1),
    "G4DEBUG_TAPE": ("0", "tape", 0),
    "G4DEBUG_HANG_SECONDS": ("2", "hang_seconds", 2),
    "G4DEBUG_CORE": (" keep ", "core", "keep"),
    "G4DEBUG_BLACK_BOX": (" dumps ", "black_box", "dumps"),
    "G4DEBUG_CPU": ("off", "cpu", False),
    "G4DEBUG_STARVED_STEPS": ("0", "starved_steps", 0),
    "G4DEBUG_LEAK_STEPS": ("0", "leak_steps", 0),
    "G4DEBUG_MM_ENCODER_PERCENT": ("7", "mm_encoder_percent", 7),
    "G4DEBUG_YOCO_EAGER_ROWS": ("9", "yoco_eager_rows", 9),
}


def read(**environ: str) -> Settings:
    return Settings.from_environ(environ)


def test_this_table_has_every_variable():
    declared = {f.metadata["env"]: f.name for f in dataclasses.fields(Settings) if f.metadata}
    assert declared == {name: field for name, (_, field, _) in VALID.items()}


@pytest.mark.parametrize("name", VALID)
def test_a_value_arrives_in_its_field_and_nowhere_else(name):
    text, field, value = VALID[name]
    got = read(**{name: text})
    assert getattr(got, field) == value
    assert got == dataclasses.replace(Settings(), **{field: value})


def test_nothing_is_asked_for_by_default():
    got = read(PATH="/bin", SGLANG_LOG_LEVEL="x", G4DEBUGX="1")
    assert got == Settings()
    assert not got.asked
    assert got.tracers == ()
    assert got.debug_dir == DEFAULT_DUMP_DIR


@pytest.mark.parametrize("name", [*VALID, "G4DEBUG_FIX_SWA_STATE_SWAP"])
@pytest.mark.parametrize("empty", ["", "  "])
def test_an_empty_value_is_no_value(name, empty):
    assert read(**{name: empty}) == Settings()


@pytest.mark.parametrize(
    ("text", "value"), [(t, True) for t in ("1", "on", "TRUE", " yes ")] +
    [(t, False) for t in ("0", "Off", "false", "NO")],
)  # fmt: skip
def test_flags(text, value):
    assert read(SGLANG_TRTLLM_MHA_DEBUG=text).debug is value


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("SGLANG_TRTLLM_MHA_DEBUG", "maybe", "1 or 0"),
        ("SGLANG_TRTLLM_MHA_DEBUG", "2", "1 or 0"),
        ("G4DEBUG_CPU", "cpu", "1 or 0"),
        ("G4DEBUG_FIXES", "some", "none, needed, all"),
        ("G4DEBUG_FIXES", "1", "none, needed, all"),
        ("G4DEBUG_FIX_SWA_STATE_SWAP", "auto", "1 or 0"),
        ("G4DEBUG_MODE", "Raise", "raise, contain, log"),
        ("G4DEBUG_TRACE", "page-table,pages", "page-table"),
        ("G4DEBUG_MAX_DUMPS", "-1", "0 to 1000"),
        ("G4DEBUG_MAX_DUMPS", "1001", "0 to 1000"),
        ("G4DEBUG_MAX_DUMPS", "many", "0 to 1000"),
        ("G4DEBUG_MAX_DUMP_MB", "0", "1 to 64"),
        ("G4DEBUG_MAX_DUMP_MB", "1.5", "1 to 64"),
        ("G4DEBUG_LAUNCH", "two words", "64 letters"),
        ("G4DEBUG_STEPS", "0", "1 to 100000"),
        ("G4DEBUG_HANG_SECONDS", "1", "2 to 86400"),
        ("G4DEBUG_TRACER", "page-table", "G4DEBUG_TRACE"),
        ("G4DEBUG_", "1", "G4DEBUG_MODE"),
        ("G4DEBUG_FIX_SWA", "1", "G4DEBUG_FIX_SWA_STATE_SWAP"),
        ("SGLANG_TRTLLM_MHA_DEBUG_DIRR", "/x", "SGLANG_TRTLLM_MHA_DEBUG_DIR"),
        ("SGLANG_TRTLLM_MHA_DEBG", "1", "SGLANG_TRTLLM_MHA_DEBUG"),
        ("G4DEBUG", "1", "G4DEBUG_MODE"),
        ("G4_DEBUG_MODE", "log", "G4DEBUG_MODE"),
        ("g4debug_mode", "log", "G4DEBUG_MODE"),
        ("G4DEBUG_TRACE", ",", "page-table"),
    ],
)
def test_what_is_not_understood_is_refused_with_what_is_valid(name, text, says):
    with pytest.raises(SettingsError) as error:
        read(**{name: text})
    message = str(error.value)
    assert message.startswith(name)
    assert says in message.removeprefix(name)
    assert "\n" not in message


def test_sglangs_own_variables_are_not_taken_for_ours():
    assert read(SGLANG_TRTLLM_MHA_DECODE_SEQ_LEN_SPLITS="2") == read()


def test_the_unknown_name_itself_is_in_the_message():
    for environ, name in (({"G4DEBUG_TRACE": "page-table,pages"}, "'pages'"),):
        with pytest.raises(SettingsError, match=name):
            read(**environ)


def test_which_tracers_are_armed():
    every = discovery.names("tracer")
    assert "page-table" in every
    assert read(SGLANG_TRTLLM_MHA_DEBUG="1").tracers == every
    assert read(SGLANG_TRTLLM_MHA_DEBUG="0").tracers == ()
    assert read(G4DEBUG_TRACE="page-table").tracers == ("page-table",)
    assert read(G4DEBUG_TRACE="page-table").asked
    assert read(G4DEBUG_FAULTS="page-oob=1*on").asked
    assert read(G4DEBUG_FIX_SWA_STATE_SWAP="1").asked
    assert not read(G4DEBUG_MODE="log", G4DEBUG_FIX_SWA_STATE_SWAP="0").asked


def test_fix_switches():
    assert fix_switch("swa-state-swap") == "G4DEBUG_FIX_SWA_STATE_SWAP"
    assert read(G4DEBUG_FIX_SWA_STATE_SWAP="off").switches == {"swa-state-swap": False}
    assert read(G4DEBUG_FIX_SWA_STATE_SWAP="1").switches == {"swa-state-swap": True}


@pytest.fixture
def documented(monkeypatch):
    """The one real fix, as if its seed documented SGLANG_SEED_SWITCH."""
    from g4debug.fixes import swa_state_swap

    fix = dataclasses.replace(swa_state_swap.FIX, switch="SGLANG_SEED_SWITCH")
    monkeypatch.setattr(swa_state_swap, "FIX", fix)


@pytest.mark.parametrize(("text", "value"), [("1", True), ("off", False)])
def test_the_switch_that_a_seed_documents(documented, text, value):
    got = read(SGLANG_SEED_SWITCH=text)
    assert got.switches == {"swa-state-swap": value}
    assert got.forced_by == {"swa-state-swap": "SGLANG_SEED_SWITCH"}
    assert got.asked is value
    assert read(SGLANG_SEED_SWITCH=" ") == Settings()


def test_two_switches_that_agree(documented):
    for environ in (
        {"G4DEBUG_FIX_SWA_STATE_SWAP": "0", "SGLANG_SEED_SWITCH": "off"},
        {"SGLANG_SEED_SWITCH": "off", "G4DEBUG_FIX_SWA_STATE_SWAP": "0"},
    ):
        got = Settings.from_environ(environ)
        assert got.switches == {"swa-state-swap": False}
        assert got.forced_by == {"swa-state-swap": "G4DEBUG_FIX_SWA_STATE_SWAP"}


@pytest.mark.parametrize("turn", [1, -1])
def test_two_switches_that_contradict_each_other(documented, turn):
    environ = [("G4DEBUG_FIX_SWA_STATE_SWAP", "on"), ("SGLANG_SEED_SWITCH", "0")][::turn]
    with pytest.raises(SettingsError, match="contradict each other") as error:
        Settings.from_environ(dict(environ))
    assert "G4DEBUG_FIX_SWA_STATE_SWAP=on" in str(error.value)
    assert "SGLANG_SEED_SWITCH=0" in str(error.value)


def test_a_documented_switch_is_on_or_off(documented):
    with pytest.raises(SettingsError, match=r"^SGLANG_SEED_SWITCH='auto': expected 1 or 0"):
        read(SGLANG_SEED_SWITCH="auto")


def test_the_home_directory_is_expanded(monkeypatch):
    monkeypatch.setenv("HOME", "/h")
    assert read(SGLANG_TRTLLM_MHA_DEBUG_DIR="~/d").debug_dir == Path("/h/d")


def test_where_dumps_go_when_another_user_was_here_first(nobody):
    folder, run = nobody
    folder.chmod(0o755)
    directory = folder / "dumps"
    assert run(lambda: ours(directory)) == str(directory)  # nobody was
    directory.mkdir(mode=0o555)
    assert run(lambda: ours(directory)) == f"{directory}-{run(os.getuid)}"
    directory.rmdir()


def test_names_are_found_without_importing_torch_or_sglang():
    code = (
        "import sys; from g4debug.settings import Settings\n"
        "Settings.from_environ({'G4DEBUG_FAULTS': 'page-oob=1*on', 'SGLANG_TRTLLM_MHA_DEBUG': '1',"
        " 'G4DEBUG_TRACE': 'page-table', 'G4DEBUG_FIX_SWA_STATE_SWAP': '1'})\n"
        "print([m for m in ('torch', 'sglang', 'triton') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_item_is_what_its_file_name_says():
    for noun in discovery.FOLDERS:
        names = discovery.names(noun)
        assert len(names) > 3
        for name in names:
            assert discovery.load(noun, name).id == name


def test_an_item_of_another_id_is_its_authors_mistake(monkeypatch):
    from g4debug.tracers.page_table import tracer as page_table

    monkeypatch.setattr(
        page_table, "TRACER", dataclasses.replace(page_table.TRACER, id="something")
    )
    with pytest.raises(ValueError, match="expected 'page-table'"):
        discovery.load("tracer", "page-table")


def test_a_tracers_former_name_stays_valid():
    asked = {"G4DEBUG_TRACE": "swa-allocator, page-table, kv-allocator"}
    assert Settings.from_environ(asked).trace == ("kv-allocator", "page-table")
