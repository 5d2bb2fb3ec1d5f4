class Unigram:
    def __init__(
        self,
        pieces: bytes,
        edges: object,
        scores: object,
        characters: object,
        unknown: int,
        joins_spaces: bool,
        drops_empty: bool,
        /,
    ) -> None: ...
    def encode(self, words: list[str], /) -> tuple[bytearray, bytearray]: ...
