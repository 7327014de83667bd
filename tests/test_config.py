"""Settings: precedence, origins, and that a bad value is named and refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from gradsum.config import Settings, load, options, suggestion
from gradsum.errors import ConfigError

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_defaults_know_that_they_are_defaults() -> None:
    settings = load({}, {})
    assert settings == Settings()
    assert (settings.slice_bytes, settings.origin("slice_bytes")) == (None, "default")
    assert load({}, {"GRADSUM_SLICE_BYTES": "Auto"}).slice_bytes is None
    assert settings.job == "default"
    assert settings.rank is None


def test_flag_beats_variable_beats_file(tmp_path: Path) -> None:
    (tmp_path / "gradsum.toml").write_text("slice_bytes = 1\ncredit_bytes = '2K'\nlease = 30\n")
    env = {"GRADSUM_SLICE_BYTES": "2", "GRADSUM_CREDIT_BYTES": "3"}
    settings = load({"slice_bytes": "4", "lease": None}, env)
    found = {k: (getattr(settings, k), settings.origin(k)) for k in
             ("slice_bytes", "credit_bytes", "lease", "bind")}  # fmt: skip
    assert found == {
        "slice_bytes": (4, "flag --slice-bytes"),
        "credit_bytes": (3, "GRADSUM_CREDIT_BYTES"),
        "lease": (30.0, "gradsum.toml"),
        "bind": ("127.0.0.1", "default"),
    }


def test_file_is_named_by_flag_variable_or_argument(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        (tmp_path / f"{number}.toml").write_text(f"max_tensors = {number}")
    env = {"GRADSUM_CONFIG": "2.toml"}
    assert load({}, env).max_tensors == 2
    assert load({"config": "1.toml"}, env).max_tensors == 1
    assert load({"config": "1.toml"}, env, Path("3.toml")).max_tensors == 3


@pytest.mark.parametrize(
    ("text", "value"),
    [("4e6", 4_000_000), ("4097", 4097), ("64KiB", 65_536), ("1.5M", 3 * MIB // 2), ("2G", 1 << 31),
     ("1GiB", 1 << 30), (" 8 MiB ", 8 * MIB), ("3", 3), ("1e18", 10**18)],
)  # fmt: skip
def test_c35_sizes_are_read_exactly(text: str, value: int) -> None:
    assert load({}, {"GRADSUM_SLICE_BYTES": text}).slice_bytes == value


@pytest.mark.parametrize(
    "text", ["0", "-1", "abc", "4.5", "0x10", "nan", "inf", "1e99", "1KB", "1 000", "²"]
)
def test_c35_bad_sizes_are_refused_with_the_variables_name(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load({}, {"GRADSUM_SLICE_BYTES": text})
    assert "GRADSUM_SLICE_BYTES" in str(caught.value)
    assert repr(text) in str(caught.value)
    assert "number of bytes from 1" in (caught.value.hint or "")


def test_c61_credit_zero_is_refused_from_every_source(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("credit_bytes = 0")
    cases: list[tuple[dict[str, str], dict[str, str], Path | None, str]] = [
        ({"credit_bytes": "0"}, {}, None, "--credit-bytes"),
        ({}, {"GRADSUM_CREDIT_BYTES": "0"}, None, "GRADSUM_CREDIT_BYTES"),
        ({}, {}, tmp_path / "a.toml", "a.toml"),
    ]
    for flags, env, file, name in cases:
        with pytest.raises(ConfigError, match=name):
            load(flags, env, file)


def test_c61_credit_below_a_slice_and_huge_are_both_accepted() -> None:
    small = load({"credit_bytes": "1K", "slice_bytes": "64K"}, {})
    assert (small.credit_bytes, small.slice_bytes) == (1024, 65_536)
    assert load({}, {"GRADSUM_CREDIT_BYTES": "1e18"}).credit_bytes == 10**18


@pytest.mark.parametrize("text", ["0", "-1", "soon", "nan", "inf", "5s"])
def test_times_are_finite_and_positive(text: str) -> None:
    with pytest.raises(ConfigError, match="GRADSUM_CONNECT_TIMEOUT"):
        load({}, {"GRADSUM_CONNECT_TIMEOUT": text})


@pytest.mark.parametrize(("text", "value"), [("1", True), ("off", False), ("TRUE", True)])
def test_flags_are_words(text: str, value: bool) -> None:
    assert load({}, {"GRADSUM_DETERMINISTIC": text}).deterministic is value


def test_other_words_are_no_flags() -> None:
    with pytest.raises(ConfigError, match="GRADSUM_DETERMINISTIC"):
        load({}, {"GRADSUM_DETERMINISTIC": "2"})


@pytest.mark.parametrize(("value", "fine"), [
    ("localhost:7700", True), ("[::1]:7700", True), ("::1:7700", False), ("host", False),
    ("host:70000", False), (":7700", False), ("host:port", False),
])  # fmt: skip
def test_addresses(value: str, fine: bool) -> None:
    if fine:
        assert load({"coordinator": value}, {}).coordinator == value
    else:
        with pytest.raises(ConfigError, match="--coordinator"):
            load({"coordinator": value}, {})


def test_torchrun_variables() -> None:
    env = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
           "TORCHELASTIC_RESTART_COUNT": "5", "TORCHELASTIC_RUN_ID": "none"}  # fmt: skip
    settings = load({}, env)
    assert (settings.rank, settings.world_size) == (3, 4)
    assert (settings.local_rank, settings.local_size) == (1, 2)
    assert (settings.restart_count, settings.origin("rank")) == (5, "RANK")
    assert settings.job == "default", "torchrun's 'none' is not a name"
    assert load({}, env | {"TORCHELASTIC_RUN_ID": "exp7"}).job == "exp7"


def test_slurm_variables_come_after_torchrun_and_own_ones() -> None:
    slurm = {"SLURM_PROCID": "2", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "991", "SLURM_LOCALID": "0",
             "SLURM_NTASKS_PER_NODE": "4"}  # fmt: skip
    settings = load({}, slurm)
    assert (settings.rank, settings.world_size, settings.job) == (2, 8, "991")
    assert settings.local_size == 4
    assert load({}, slurm | {"RANK": "1"}).rank == 1
    assert load({}, slurm | {"RANK": "1", "GRADSUM_RANK": "0"}).rank == 0


def test_empty_variable_is_not_set() -> None:
    settings = load({}, {"GRADSUM_COORDINATOR": "", "RANK": "", "SLURM_PROCID": "6"})
    assert (settings.coordinator, settings.rank) == (None, 6)


def test_rank_beyond_world_size_names_both() -> None:
    with pytest.raises(ConfigError) as caught:
        load({}, {"RANK": "4", "WORLD_SIZE": "4"})
    assert "rank 4 (RANK)" in str(caught.value)
    assert "world_size 4 (WORLD_SIZE)" in str(caught.value)


def test_times_that_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match=r"suspect 20.0 \(flag --suspect\) is not below lease"):
        load({"suspect": 20}, {})


def test_c101_missing_settings_are_listed_all_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load({}, {"RANK": "0"}).require("coordinator", "rank", "world_size")
    text = str(caught.value)
    assert "coordinator, world_size" in text
    for name in ("GRADSUM_COORDINATOR", "WORLD_SIZE", "--coordinator"):
        assert name in text
    assert "SLURM_PROCID" not in text, "the rank is known"


def test_unknown_variable_is_reported_with_the_one_that_was_meant() -> None:
    settings = load({}, {"GRADSUM_SLICE_BYTE": "7", "GRADSUM_CONFIG": "", "OTHER": "1"})
    assert settings.unknown == ("GRADSUM_SLICE_BYTE",)
    assert suggestion("GRADSUM_SLICE_BYTE") == "GRADSUM_SLICE_BYTES"
    assert suggestion("GRADSUM_QQQQQQQQ") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [("slice_byte = 1", "did you mean slice_bytes"), ("= 3", "not TOML"),
     ("nan_guard = 'maybe'", "maybe"), ("rank = 1.5", "1.5"), ("[slice_bytes]\na = 1", "{'a'")],
)  # fmt: skip
def test_bad_file(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "job.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load({}, {}, path)
    assert message in str(caught.value)
    assert "job.toml" in str(caught.value)


def test_missing_file_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml"):
        load({"config": "nowhere.toml"}, {})


def test_table_shows_every_setting_with_its_doc() -> None:
    rows = {name: (value, origin, doc) for name, value, origin, doc in load({}, {}).table()}
    fields = {f.name for f in dataclasses.fields(Settings)} - {"origins", "unknown"}
    assert set(rows) == fields
    assert all(doc for _, _, doc in rows.values())
    assert rows["stall_timeout"][:2] == (1800.0, "default")


def test_every_default_is_a_value_that_its_own_kind_accepts() -> None:
    for option in options():
        if option.default is not None:
            assert option.kind.read(option.default) == option.default, option.name


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        load({}, {}).slice_bytes = 3  # type: ignore[misc]
