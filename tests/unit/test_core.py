"""shardstore.core: the document that names a checkpoint's backends."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from shardstore.core import (
    CONFIG_FNAME,
    CheckpointingConfig,
    CheckpointingException,
    check_is_distributed_checkpoint,
    maybe_load_config,
    save_config,
)
from shardstore.errors import DamagedCheckpointError, NotACheckpointError


@pytest.mark.parametrize("kind", [str, Path])
def test_a_saved_config_is_read_back(tmp_path: Path, kind: type) -> None:
    directory = kind(tmp_path)
    assert maybe_load_config(directory) is None
    assert check_is_distributed_checkpoint(directory) is False
    save_config(CheckpointingConfig("zarr", 2), directory)
    assert maybe_load_config(directory) == CheckpointingConfig("zarr", 2, "torch", 1)
    assert check_is_distributed_checkpoint(directory) is True
    save_config(CheckpointingConfig("other", 1, "c", 3), directory)
    assert maybe_load_config(directory) == CheckpointingConfig("other", 1, "c", 3)


def test_document_is_the_one_that_megatron_reads(tmp_path: Path) -> None:
    save_config(CheckpointingConfig("zarr"), tmp_path)
    assert CONFIG_FNAME == "metadata.json"
    assert json.loads((tmp_path / "metadata.json").read_text()) == {
        "sharded_backend": "zarr",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }


def test_defaults_fill_in(tmp_path: Path) -> None:
    (tmp_path / CONFIG_FNAME).write_text('{"sharded_backend": "zarr"}')
    assert maybe_load_config(tmp_path) == CheckpointingConfig("zarr", 1, "torch", 1)


def test_an_absent_folder_has_no_config(tmp_path: Path) -> None:
    assert maybe_load_config(tmp_path / "absent") is None
    assert not check_is_distributed_checkpoint(tmp_path / "absent")
    (tmp_path / "file").write_text("")
    assert not check_is_distributed_checkpoint(tmp_path / "file")
    with pytest.raises(FileNotFoundError):
        save_config(CheckpointingConfig("zarr"), tmp_path / "absent")


@pytest.mark.parametrize("content", [b"", b"{", b'{"sharded_backend": "za', b"\xff\xfe"])
def test_a_damaged_config_is_an_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / CONFIG_FNAME).write_bytes(content)
    for read in (maybe_load_config, check_is_distributed_checkpoint):
        with pytest.raises(DamagedCheckpointError, match=r"metadata\.json") as caught:
            read(tmp_path)
        assert caught.value.url == str(tmp_path / CONFIG_FNAME)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("[]", "sharded_backend"),
        ('{"name": "somebody else\'s"}', "sharded_backend"),
        ('{"sharded_backend": "zarr", "codec": 1}', "codec"),
        ('{"sharded_backend": "zarr", "sharded_backend_version": "2"}', "'2'"),
        ('{"sharded_backend": "zarr", "sharded_backend_version": true}', "True"),
        ('{"sharded_backend": 5}', "'sharded_backend': 5"),
    ],
)
def test_a_document_of_another_program_is_no_config(
    tmp_path: Path, content: str, text: str
) -> None:
    (tmp_path / CONFIG_FNAME).write_text(content)
    assert check_is_distributed_checkpoint(tmp_path) is False
    with pytest.raises(NotACheckpointError, match=text) as caught:
        maybe_load_config(tmp_path)
    assert isinstance(caught.value, CheckpointingException)


def test_exceptions_of_programs_take_any_arguments() -> None:
    plain = CheckpointingException("what", ("and", 1))
    assert plain.args == ("what", ("and", 1))
    copied = pickle.loads(pickle.dumps(plain))
    assert (copied.args, str(copied)) == (plain.args, str(plain))
    assert "what" in str(plain)
    assert "and" in str(plain)
    assert str(CheckpointingException()) == ""
