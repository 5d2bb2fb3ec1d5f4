def scan_json(
    data: bytes | bytearray,
    num_bytes: int,
    fields: tuple[tuple[bytes, ...], ...],
    most_bytes: int,
    most_line_bytes: int,
    /,
) -> tuple[bytes, int, int, int, bytes, bytes]: ...
def scan_text(
    data: bytes | bytearray, num_bytes: int, most_bytes: int, /
) -> tuple[bytes, int, int, int, bytes] | None: ...
