"""Decompressing inputs down to the last readable byte, and replacing files."""

from __future__ import annotations

import gzip
import os
import random
import stat
from pathlib import Path

import pytest
import xxhash
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.errors import DataError
from tokenmill.files import (
    DamagedInput,
    InputStream,
    detect_compression,
    fingerprint,
    sync_directory,
    write_durably,
)

LINES = b"".join(b"line %d of %d\n" % (number, number * 7919 % 10007) for number in range(120))
SKIPPABLE = b"\x53\x2a\x4d\x18\x05\0\0\0abcde"


def zstd(data: bytes, *, checksum: bool = True) -> bytes:
    return zstandard.ZstdCompressor(level=3, write_checksum=checksum).compress(data)


def zstd_in_blocks(data: bytes, step: int) -> bytes:
    """One frame with a block per `step` bytes, as a writer that flushes makes it."""
    compressor = zstandard.ZstdCompressor(write_checksum=True).compressobj()
    pieces = []
    for start in range(0, len(data), step):
        pieces.append(compressor.compress(data[start : start + step]))
        pieces.append(compressor.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK))
    return b"".join(pieces) + compressor.flush()


def read_all(path: Path, compression: str, size: int = 700) -> tuple[bytes, str | None]:
    """Everything a stream hands over, and the damage at its end."""
    pieces = []
    with InputStream(path, compression) as stream:
        try:
            while data := stream.read(size):
                assert len(data) <= size
                pieces.append(data)
        except DamagedInput as damage:
            with pytest.raises(DamagedInput):
                stream.read(size)
            return b"".join(pieces), damage.reason
    return b"".join(pieces), None


def test_compression_is_detected_by_content() -> None:
    assert detect_compression(gzip.compress(b""), "x.zst") == "gzip"
    assert detect_compression(zstd(b""), "x.gz") == "zstd"
    assert detect_compression(SKIPPABLE + zstd(b""), "x") == "zstd"
    assert detect_compression(b'{"text": "a"}', "x.jsonl.gz") == "none"
    assert detect_compression(b"", "x.zst") == "none"
    assert detect_compression(b"BZh9 is a text", "x") == "none"


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        (b"BZh91AY&SY....", "a bzip2 file"),
        (b"\xfd7zXZ\x00....", "an xz file"),
        (b"\x04\x22\x4d\x18....", "an lz4 file"),
        (b"PK\x03\x04....", "a zip archive"),
        (b"7z\xbc\xaf\x27\x1c....", "a 7z archive"),
    ],
)
def test_compression_that_is_not_read_is_refused_by_name(head: bytes, kind: str) -> None:
    with pytest.raises(DataError, match=rf"^web-07\.jsonl: is {kind}; gzip and zstd are read"):
        detect_compression(head, "web-07.jsonl")


@pytest.mark.parametrize(
    ("compression", "content"),
    [
        ("none", LINES),
        ("gzip", gzip.compress(LINES)),
        ("gzip", gzip.compress(LINES[:1000]) + gzip.compress(b"") + gzip.compress(LINES[1000:])),
        ("gzip", gzip.compress(LINES) + b"\0" * 1000),
        ("gzip", gzip.compress(LINES[:100]) + b"\0" * 512 + gzip.compress(LINES[100:])),
        ("zstd", zstd(LINES)),
        ("zstd", zstd(LINES[:1000]) + SKIPPABLE + zstd(b"") + zstd(LINES[1000:], checksum=False) + SKIPPABLE),
        ("zstd", SKIPPABLE + zstd_in_blocks(LINES, 100)),
    ],
)
@pytest.mark.parametrize("size", [1, 700, 1 << 20])
def test_members_and_frames_are_joined(tmp_path: Path, compression: str, content: bytes, size: int) -> None:
    path = tmp_path / "x"
    path.write_bytes(content)
    assert read_all(path, compression, size) == (LINES, None)


@pytest.mark.parametrize(
    ("compression", "content", "ends"),
    [
        ("gzip", gzip.compress(LINES[:1500]) + gzip.compress(LINES[1500:]), {len(gzip.compress(LINES[:1500]))}),
        (
            "zstd",
            zstd(LINES[:1500]) + SKIPPABLE + zstd_in_blocks(LINES[1500:], 200),
            {len(zstd(LINES[:1500])), len(zstd(LINES[:1500]) + SKIPPABLE)},
        ),
    ],
)
def test_a_file_cut_anywhere_gives_a_prefix_and_then_reports_damage(
    tmp_path: Path, compression: str, content: bytes, ends: set[int]
) -> None:
    path = tmp_path / "x"
    path.write_bytes(content)
    shortest = LINES
    for length in range(len(content) - 1, 0, -1):
        os.truncate(path, length)
        data, damage = read_all(path, compression)
        assert shortest.startswith(data)
        assert length < len(content) - 1 or len(data) >= len(LINES) - 10
        assert (damage is None) == (length in ends), length
        shortest = data


@pytest.mark.parametrize(
    ("compression", "content"), [("gzip", gzip.compress(LINES[:1500])), ("zstd", zstd_in_blocks(LINES[:1500], 200))]
)
def test_a_flipped_bit_never_passes_in_silence(tmp_path: Path, compression: str, content: bytes) -> None:
    path = tmp_path / "x"
    path.write_bytes(content)
    with path.open("r+b", buffering=0) as file:
        for offset, byte in enumerate(content):
            os.pwrite(file.fileno(), bytes([byte ^ 0x10]), offset)
            data, damage = read_all(path, compression)
            os.pwrite(file.fileno(), bytes([byte]), offset)
            assert data == LINES[:1500] or damage is not None, offset
    assert read_all(path, compression) == (LINES[:1500], None)


def test_every_block_before_the_damage_is_returned(tmp_path: Path) -> None:
    words = random.Random(0)
    text = b"".join(b"%d\n" % words.randrange(10**12) for _ in range(40_000))
    content = bytearray(zstd_in_blocks(text, 5000))
    content[len(content) // 2] ^= 0xFF
    path = tmp_path / "x.zst"
    path.write_bytes(content)
    data, damage = read_all(path, "zstd", 1 << 20)
    assert damage is not None
    assert text.startswith(data)
    assert len(data) % 5000 == 0
    assert abs(len(data) - len(text) // 2) < 10_000

    content = bytearray(gzip.compress(text))
    content[-6] ^= 1
    path.write_bytes(content)
    assert read_all(path, "gzip", 1 << 20) == (text, "the gzip data cannot be read: incorrect checksum found")


def test_a_gzip_member_with_reserved_flags_is_damage_wherever_it_is(tmp_path: Path) -> None:
    path, odd = tmp_path / "x.gz", bytearray(gzip.compress(LINES))
    odd[3] |= 0x40
    for before in (b"", gzip.compress(LINES), gzip.compress(LINES) + b"\0\0"):
        path.write_bytes(before + odd)
        data, damage = read_all(path, "gzip")
        assert data == (LINES if before else b"")
        assert damage is not None
        assert "flags" in damage


@pytest.mark.parametrize("garbage", [b"x", b"xyz", b"garbage!", b"{}\n" * 100])
@pytest.mark.parametrize("compression", ["gzip", "zstd"])
def test_garbage_after_the_data_is_damage(tmp_path: Path, compression: str, garbage: bytes) -> None:
    path = tmp_path / "x"
    path.write_bytes((gzip.compress(LINES) if compression == "gzip" else zstd(LINES)) + garbage)
    data, damage = read_all(path, compression)
    assert data == LINES
    assert damage is not None


def test_a_frame_that_needs_too_large_a_window_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=26, write_content_size=False)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    path = tmp_path / "x.zst"
    path.write_bytes(compressor.compress(LINES) + compressor.flush())
    assert read_all(path, "zstd") == (LINES, None)
    monkeypatch.setattr("tokenmill.compression.LARGEST_WINDOW_BYTES", 1 << 25)
    data, damage = read_all(path, "zstd")
    assert data == b""
    assert damage is not None
    assert "window above 32 MiB" in damage


def test_a_small_file_that_unpacks_to_much_is_read_in_pieces(tmp_path: Path) -> None:
    for compression, content in (("gzip", gzip.compress(bytes(20 << 20))), ("zstd", zstd(bytes(20 << 20)))):
        path = tmp_path / compression
        path.write_bytes(content)
        with InputStream(path, compression) as stream:
            assert max(len(data) for data in iter(lambda: stream.read(65536), b"")) <= 65536


def test_a_missing_file_is_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.jsonl: cannot be opened"):
        InputStream(tmp_path / "gone.jsonl", "none")


@settings(max_examples=30, deadline=None)
@given(st.lists(st.binary(max_size=300), min_size=1, max_size=5), st.integers(1, 400), st.booleans())
def test_any_parts_come_back_joined(
    tmp_path_factory: pytest.TempPathFactory, parts: list[bytes], size: int, is_gzip: bool
) -> None:
    path = tmp_path_factory.mktemp("parts") / "x"
    path.write_bytes(b"".join(gzip.compress(part) if is_gzip else zstd(part) for part in parts))
    assert read_all(path, "gzip" if is_gzip else "zstd", size) == (b"".join(parts), None)


def test_a_fingerprint_is_a_hash_of_size_and_content(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"abc")
    assert fingerprint(path) == xxhash.xxh3_128((3).to_bytes(8, "little") + b"abc").hexdigest()
    path.write_bytes(b"abd")
    assert fingerprint(path) != xxhash.xxh3_128((3).to_bytes(8, "little") + b"abc").hexdigest()


def test_the_fingerprint_of_a_large_file_reads_its_ends_and_blocks_between(tmp_path: Path) -> None:
    path = tmp_path / "x"
    size = 9 << 20
    path.write_bytes(bytes(size))
    seen = {fingerprint(path)}
    room = size - 3 * 65536
    for offset in (0, 65535, 65536 + room * 31 // 63 + 65535, size - 65536, size - 1):
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(b"\x01")
        seen.add(fingerprint(path))
    assert len(seen) == 6
    with path.open("ab") as file:
        file.write(b"\0")
    assert fingerprint(path) not in seen


def test_writing_durably_replaces_and_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    write_durably(path, b"one")
    write_durably(path, b"two")
    sync_directory(tmp_path)
    assert path.read_bytes() == b"two"
    assert os.listdir(tmp_path) == ["manifest.json"]
    assert stat.S_ISREG(path.stat().st_mode)


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "manifest.json"
    write_durably(path, b"one")
    temporary: list[str] = []

    def fail(descriptor: int) -> None:
        temporary.extend(name for name in os.listdir(tmp_path) if name.endswith(".tmp"))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        write_durably(path, b"two")
    assert temporary
    assert path.read_bytes() == b"one"
    assert os.listdir(tmp_path) == ["manifest.json"]
