"""Files that must not be read: pipes, devices, folders, and more bytes than asked for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tokenmill.regular_files import UnfitFile, check_regular, open_parquet, open_regular, read_regular


def test_a_regular_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_regular(path, 5) == b"12345"
    assert check_regular(path, 5).st_size == 5
    with pytest.raises(UnfitFile, match="5 bytes, and at most 4 are read"):
        read_regular(path, 4)


def test_a_pipe_a_device_and_a_folder_are_refused_at_once_and_no_descriptor_stays_open(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    before = len(list(Path("/proc/self/fd").iterdir()))
    for read in (read_regular, open_regular, check_regular, open_parquet):
        with pytest.raises(UnfitFile, match="named pipe, not a regular file"):
            read(tmp_path / "pipe")
        with pytest.raises(UnfitFile, match="a device, not a regular file"):
            read("/dev/zero")
        with pytest.raises(IsADirectoryError):
            read(tmp_path)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
