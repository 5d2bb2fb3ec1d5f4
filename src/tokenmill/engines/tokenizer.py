"""A tokenizer as its own files describe it: vocabulary size, special tokens, BOS and EOS.

Nothing is guessed. `tokenizer_config.json`, `special_tokens_map.json`, the post-processor or the `.model` name the
end-of-text token. If none of them does, an error names the flag to set it, because a wrong EOS would be found weeks
later, in the loss.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import msgspec

from tokenmill.engines._checks import check_config, check_sequence, try_encoding
from tokenmill.engines._guard import guarded
from tokenmill.errors import DataError, MissingDependencyError, UsageError
from tokenmill.files import write_durably
from tokenmill.regular_files import UnfitFile, read_regular
from tokenmill.text_batch import TokenBatch

__all__ = ["Tokenizer", "load_tokenizer", "open_tokenizer"]

Kind = Literal["huggingface", "sentencepiece", "tiktoken", "bytes"]

SIDE_FILES = ("tokenizer_config.json", "special_tokens_map.json", "tiktoken.json", "chat_template.jinja")
HUB_PATTERNS = ["tokenizer.json", "tokenizer.model", "spiece.model", "*.tiktoken"]
HUB_PATTERNS += ["tokenizer_config.json", "special_tokens_map.json"]
MOST_BYTES = 1 << 28
"""The limit for one file of a tokenizer; the largest in use, with 256,000 tokens, has 35 MB."""
BYTES_EOS, BYTES_BOS = 256, 257
BYTES_FILE = "bytes.json"
RANKS = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?\n")
"""The first line of a file of ranks, which Llama 3 calls tokenizer.model."""
PICKLE = (
    "a pickle can run any program, so it is not opened; if you trust it, write its parts to files with\n"
    "    import base64, json, pickle; from pathlib import Path; e = pickle.loads(Path('tokenizer.pkl').read_bytes()); "
    "parts = dict(name='own', pattern=e._pat_str, special_tokens=e._special_tokens); "
    "Path('tiktoken.json').write_text(json.dumps(parts))\n"
    "    Path('own.tiktoken').write_bytes(b''.join(base64.b64encode(t) + b' %d\\n' % i "
    "for t, i in e._mergeable_ranks.items()))\n"
    "and pass own.tiktoken"
)


@dataclass(frozen=True)
class Tokenizer:
    """The files of one tokenizer, and what they say about special tokens."""

    name: str
    kind: Kind
    main_file: str
    files: Mapping[str, bytes] = field(repr=False)
    vocab_size: int
    special_tokens: Mapping[str, int] = field(repr=False)
    bos_id: int | None
    eos_id: int | None
    adds_bos: bool
    """Whether the post-processor of the tokenizer adds a beginning-of-text token."""
    source: Path | None = field(default=None, repr=False, compare=False)
    """The file from which another process can read it; None if there is none, or if there are several."""

    @property
    def shown(self) -> str:
        """The main file, for messages."""
        return str(self.source) if self.source is not None else f"{self.name} ({self.main_file})"

    @cached_property
    def sha256(self) -> str:
        """A hash of the main file, without the settings beside it: it identifies the vocabulary."""
        return hashlib.sha256(self.files[self.main_file]).hexdigest()

    @cached_property
    def config(self) -> dict[str, Any]:
        """The parsed `tokenizer.json`; empty for other kinds."""
        return _parse_json(self.shown, self.files[self.main_file]) if self.kind == "huggingface" else {}

    @cached_property
    def chat_template(self) -> str | None:
        """The Jinja source that renders conversations, from its own file or from `tokenizer_config.json`."""
        if "chat_template.jinja" in self.files:
            try:
                return self.files["chat_template.jinja"].decode()
            except UnicodeDecodeError as error:
                path = str(Path(self.shown).with_name("chat_template.jinja"))
                raise DataError(path, f"is not UTF-8 at byte {error.start}; save it as UTF-8") from None
        found = _side_settings(self.files, self.shown).get("chat_template")
        if isinstance(found, list):
            named = {item.get("name"): item.get("template") for item in found if isinstance(item, dict)}
            found = named.get("default")
        return found if isinstance(found, str) else None

    @property
    def added_tokens(self) -> list[str]:
        """The strings that are one token each, special or not, wherever a text has them."""
        added = (token["content"] for token in self.config.get("added_tokens") or ())
        return list(dict.fromkeys([*self.special_tokens, *added]))

    @property
    def named_tokens(self) -> dict[str, str]:
        """The special tokens by the names that templates use, such as `bos_token`."""
        settings = _side_settings(self.files, self.shown).items()
        return {name: value for name, value in settings if name.endswith("_token") and isinstance(value, str)}

    def save(self, folder: Path) -> None:
        """Write the files of the tokenizer that are not there yet, so that a store is self-contained."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in sorted(self.files.items()):
            path = folder / name
            if not _holds(path, data):
                write_durably(path, data)

    def token_id(self, token: str, flag: str) -> int:
        """Return the id of a token that is given as its string or its number."""
        if token in self.special_tokens:
            return self.special_tokens[token]
        if token.isdecimal() and int(token) < self.vocab_size:
            return int(token)
        found = self._vocabulary_id(token)
        if found is None:
            known = ", ".join(repr(t) for t in list(self.special_tokens)[:8]) or "none"
            raise UsageError(
                f"{flag} {token!r} is not a token of {self.name} (vocabulary {self.vocab_size}); "
                f"its special tokens are {known}"
            )
        return found

    def _vocabulary_id(self, token: str) -> int | None:
        if self.kind == "huggingface":
            vocab = self.config.get("model", {}).get("vocab", {})
            if isinstance(vocab, dict):
                return vocab.get(token)
            return next((i for i, piece in enumerate(vocab) if piece[0] == token), None)
        if self.kind == "sentencepiece":
            processor = self.open_library()
            found = int(processor.piece_to_id(token))
            return found if processor.id_to_piece(found) == token else None
        return None

    def open_library(self, special_tokens: str = "as-text") -> Any:
        """Load the tokenizer into its reference library."""
        model = self.files[self.main_file]
        if self.kind == "sentencepiece":
            return _open_sentencepiece(model, self.shown)
        if self.kind == "tiktoken":
            from tokenmill.engines.tiktoken import open_encoding

            return open_encoding(self)
        from tokenmill.engines.huggingface import open_library

        with guarded(self.shown):
            return open_library(model, special_tokens)


def load_tokenizer(spec: str) -> Tokenizer:
    """Load the tokenizer that `spec` names: a path, `bytes`, `tiktoken:NAME` or a Hub id."""
    if spec == "bytes":
        return _bytes()
    if spec.startswith("tiktoken:"):
        from tokenmill.engines.tiktoken import load_named

        return load_named(spec.removeprefix("tiktoken:"))
    if spec.startswith(("s3://", "gs://", "az://")):
        raise UsageError(f"--tokenizer {spec}: tokenizers are not read from buckets; copy it to this machine first")
    path = Path(spec).expanduser()
    if path.is_dir():
        return open_tokenizer(path, name=path.resolve().name)
    if path.is_file():
        return _from_file(path)
    if path.exists():
        raise UsageError(f"--tokenizer {spec} is not a regular file; pass a file or a directory")
    if path.suffix in {".json", ".model", ".tiktoken"} or spec.startswith((".", "/", "~")):
        raise UsageError(f"--tokenizer {spec}: no such file or directory")
    return open_tokenizer(_download(spec), name=spec)


def _download(name: str) -> Path:
    """Return the local folder with the tokenizer files of a Hub repository; download them unless they are cached."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=HUB_PATTERNS))
    except Exception as error:
        raise UsageError(
            f"--tokenizer {name} is not a local path, and downloading it from the Hub failed ({type(error).__name__}); "
            "check the name and the network (HF_TOKEN for gated models), or pass a directory with its tokenizer.json"
        ) from None


def open_tokenizer(folder: Path, name: str) -> Tokenizer:
    """Load a tokenizer from a directory, such as the `tokenizer/` of a store."""
    if not folder.is_dir():
        raise UsageError(f"--tokenizer {folder}: no such directory")
    if (folder / BYTES_FILE).is_file():
        return _bytes()
    for main_file in ("tokenizer.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model"):
        if (folder / main_file).is_file():
            return _from_file(folder / main_file, name)
    ranks = sorted(folder.glob("*.tiktoken")) + sorted(folder.glob("*.model"))
    if len(ranks) == 1:
        return _from_file(ranks[0], name)
    if (folder / "tokenizer.pkl").is_file():
        raise UsageError(f"--tokenizer {folder / 'tokenizer.pkl'}: {PICKLE}")
    raise UsageError(
        f"--tokenizer {folder} has no tokenizer.json, tokenizer.model or .tiktoken file; it has "
        f"{', '.join(sorted(p.name for p in folder.iterdir())[:6]) or 'no files'}"
    )


def _bytes() -> Tokenizer:
    """Create the tokenizer of UTF-8 bytes. Its one file only documents it in a store."""
    specials = {"<eos>": BYTES_EOS, "<bos>": BYTES_BOS}
    files = {BYTES_FILE: json.dumps({"tokenizer": "bytes", **specials}).encode() + b"\n"}
    return Tokenizer("bytes", "bytes", BYTES_FILE, files, 258, specials, BYTES_BOS, BYTES_EOS, False)


def _from_file(path: Path, name: str | None = None) -> Tokenizer:
    if path.suffix == ".pkl":
        raise UsageError(f"--tokenizer {path}: {PICKLE}")
    files = {path.name: _read(path)}
    for side in SIDE_FILES:
        beside = path.parent / side
        if beside.exists() and side != path.name:
            files[side] = _read(beside)
    name = name or (path.parent.name if path.name in {"tokenizer.json", "tokenizer.model"} else path.stem) or path.stem
    is_ranks = path.suffix == ".model" and RANKS.match(files[path.name]) is not None
    if path.suffix == ".model" and not is_ranks:
        return _from_sentencepiece(name, path, files)
    if path.suffix == ".tiktoken" or is_ranks:
        from tokenmill.engines.tiktoken import load_ranks

        return load_ranks(name, path, files)
    if path.suffix == ".json":
        try:
            return _from_huggingface(name, path, files)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise DataError(str(path), f"is not a tokenizer.json: {type(error).__name__} {error}") from None
    raise UsageError(f"--tokenizer {path}: expected a tokenizer.json, a .model or a .tiktoken file")


def _read(path: Path) -> bytes:
    try:
        return read_regular(path, MOST_BYTES)
    except UnfitFile as error:
        raise DataError(str(path), f"is not a tokenizer file: {error.strerror}") from None


def _holds(path: Path, data: bytes) -> bool:
    """Whether a file has exactly these bytes."""
    try:
        return read_regular(path, MOST_BYTES) == data
    except OSError:
        return False


def _from_huggingface(name: str, path: Path, files: dict[str, bytes]) -> Tokenizer:
    main_file = path.name
    config = _parse_json(str(path), files[main_file], strict=True)
    model = config.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), (dict, list)):
        raise DataError(str(path), "is not a tokenizer.json: it has no model with a vocabulary")
    check_config(str(path), config)
    vocab, added = model["vocab"], config.get("added_tokens") or []
    numbered = vocab if isinstance(vocab, dict) else {piece[0]: i for i, piece in enumerate(vocab)}
    vocab_size = 1 + max(max(numbered.values(), default=-1), max((t["id"] for t in added), default=-1))
    specials = {t["content"]: t["id"] for t in added if t.get("special")}
    lookup = {**numbered, **{t["content"]: t["id"] for t in added}}
    side = _side_settings(files, str(path))
    leading, trailing = _post_processor_tokens(config.get("post_processor"))
    check_sequence(str(path), [*leading, *trailing], lookup)
    bos = _first_known([side.get("bos_token"), *(token for token, _ in leading)], lookup)
    eos = _first_known([side.get("eos_token"), *(token for token, _ in reversed(trailing))], lookup)
    adds_bos = bool(leading) or (side.get("add_bos_token") is True and bos is not None)
    if leading:
        bos = lookup[leading[0][0]]
    files = {"tokenizer.json" if key == main_file else key: data for key, data in files.items()}
    tokenizer = Tokenizer(name, "huggingface", "tokenizer.json", files, vocab_size, specials, bos, eos, adds_bos, path)
    # Parsing takes as long as everything else together, so store the result for the property.
    vars(tokenizer)["config"] = config
    return tokenizer


def _from_sentencepiece(name: str, path: Path, files: dict[str, bytes]) -> Tokenizer:
    main_file, shown = path.name, str(path)
    processor = _open_sentencepiece(files[main_file], shown)
    size = int(processor.vocab_size())
    try:
        pieces = processor.id_to_piece(list(range(size)))
    except UnicodeDecodeError as error:
        raise DataError(shown, f"has a piece that is not UTF-8: {error.object!r}") from None
    specials = {piece: i for i, piece in enumerate(pieces) if processor.is_control(i)}
    bos, eos = (i if i >= 0 else None for i in (int(processor.bos_id()), int(processor.eos_id())))
    adds_bos = _side_settings(files, shown).get("add_bos_token") is True and bos is not None
    try_encoding(shown, lambda texts: TokenBatch.from_lists(processor.encode(texts, num_threads=1)), size)
    files = {"tokenizer.model" if key == main_file else key: data for key, data in files.items()}
    return Tokenizer(name, "sentencepiece", "tokenizer.model", files, size, specials, bos, eos, adds_bos, path)


def _open_sentencepiece(model: bytes, file: str) -> Any:
    try:
        import sentencepiece
    except ImportError:
        raise MissingDependencyError("a SentencePiece .model", "sentencepiece") from None
    processor = sentencepiece.SentencePieceProcessor()
    with guarded(file, "is not a SentencePiece model"):
        processor.LoadFromSerializedProto(model)
    return processor


def _side_settings(files: Mapping[str, bytes], main_path: str) -> dict[str, Any]:
    """Merge `special_tokens_map.json` and `tokenizer_config.json`, which wins, with tokens as strings."""
    merged: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if name in files:
            path = str(Path(main_path).with_name(name))
            merged.update({k: v for k, v in _parse_json(path, files[name]).items() if v is not None})
    for key, value in merged.items():
        if key.endswith("_token") and isinstance(value, dict):
            merged[key] = value.get("content")
    return merged


_Surrounding = list[tuple[Any, Any]]
"""Tokens that a post-processor adds, with the ids that it gives them; None for one without an id of its own."""


def _post_processor_tokens(processor: Any) -> tuple[_Surrounding, _Surrounding]:
    """Return the special tokens that a post-processor puts before and after a single text."""
    if not isinstance(processor, dict):
        return [], []
    if processor.get("type") == "Sequence":
        pairs = [_post_processor_tokens(p) for p in processor.get("processors", [])]
        return [t for lead, _ in pairs for t in lead], [t for _, trail in pairs for t in trail]
    if processor.get("type") in {"BertProcessing", "RobertaProcessing"}:
        return [tuple(processor["cls"])], [tuple(processor["sep"])]
    if processor.get("type") != "TemplateProcessing":
        return [], []
    leading: _Surrounding = []
    trailing: _Surrounding = []
    side = leading
    for piece in processor.get("single", []):
        if "Sequence" in piece:
            side = trailing
        elif "SpecialToken" in piece:
            described = (processor.get("special_tokens") or {})[piece["SpecialToken"]["id"]]
            side += zip(described["tokens"], described["ids"], strict=True)
    return leading, trailing


def _first_known(tokens: Iterable[Any], lookup: Mapping[str, int]) -> int | None:
    return next((lookup[t] for t in tokens if isinstance(t, str) and t in lookup), None)


def _parse_json(name: str, data: bytes, *, strict: bool = False) -> dict[str, Any]:
    """Parse a file; `strict` refuses what the tokenizers library cannot read."""
    try:
        parsed = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if strict:
            raise DataError(name, f"is not valid JSON in UTF-8 ({error})") from None
        # The standard library also reads a byte order mark, UTF-16 and lone surrogates.
        try:
            parsed = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise DataError(name, f"is not valid JSON ({error})") from None
    except RecursionError:
        raise DataError(name, "is nested too deeply for a tokenizer file") from None
    if not isinstance(parsed, dict):
        raise DataError(name, "is JSON but not an object; expected a tokenizer file")
    return parsed
