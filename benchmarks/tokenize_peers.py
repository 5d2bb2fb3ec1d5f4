"""The contenders of tokenize.py that are not tokenmill: each reads JSON lines, tokenizes, and most write the ids.

    python benchmarks/tokenize_peers.py NAME TOKENIZER OUT FILE...

TOKENIZER is the folder of a tokenizer.json. This runs in the environment of the contender, so it imports nothing of
tokenmill. Where a project has a program or a pipeline of its own, that is used, with its defaults for two processes.
"""

from __future__ import annotations

import sys

# This folder goes last, so that tokenize.py does not shadow the standard library's module of that name.
sys.path.append(sys.path.pop(0))

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

WORKERS = os.cpu_count() or 1
BATCH = 1000


def main() -> None:
    name, tokenizer, out, *files = sys.argv[1:]
    Path(out).mkdir(parents=True)
    PEERS[name](Path(tokenizer), Path(out), files)


def encode_files(tokenizer: Path, out: Path, files: list[str]) -> None:
    """gigatoken's own reader, all in memory; nothing is written."""
    from gigatoken import JsonlFileSource, Tokenizer

    print(len(Tokenizer(str(tokenizer / "tokenizer.json")).encode_files(JsonlFileSource(files))))


def encode_files_tofile(tokenizer: Path, out: Path, files: list[str]) -> None:
    """The same, and the ids written as users do it: two bytes each if they fit, and the ends of documents."""
    import numpy as np
    from gigatoken import JsonlFileSource, Tokenizer

    result = Tokenizer(str(tokenizer / "tokenizer.json")).encode_files(JsonlFileSource(files))
    ids, ends = np.asarray(result.layout.content.data), np.asarray(result.layout.offsets.data)
    ids.astype(np.uint16 if int(ids.max()) < 1 << 16 else np.int32).tofile(out / "tokens.bin")
    ends.tofile(out / "ends.bin")


def huggingface(tokenizer: Path, out: Path, files: list[str]) -> None:
    """`tokenizers` on all threads; nothing is written. Of 1.0, the ids are taken as they come."""
    import tokenizers

    library = tokenizers.Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    encode = getattr(library, "encode_batch_fast", library.encode_batch)
    total = 0
    for batch in _batches(files):
        for encoded in encode(batch, add_special_tokens=False):
            total += len(getattr(encoded, "ids", encoded))
    print(total)


def tiktoken_pool(tokenizer: Path, out: Path, files: list[str]) -> None:
    """tiktoken in a pool of processes, as nanoGPT's scripts have it."""
    import multiprocessing

    with (out / "tokens.bin").open("wb") as target, multiprocessing.Pool(WORKERS, _open_tiktoken, (tokenizer,)) as pool:
        for data in pool.imap(_encode_tiktoken, _batches(files), chunksize=4):
            target.write(data)


_tiktoken: Any = None


def _open_tiktoken(tokenizer: Path) -> None:
    import tiktoken

    config = json.loads((tokenizer / "tokenizer.json").read_text())
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    byte_of = {chr(byte): byte for byte in visible} | {chr(256 + n): byte for n, byte in enumerate(hidden)}
    specials = {token["content"]: token["id"] for token in config["added_tokens"] if token["special"]}
    vocabulary = {token: number for token, number in config["model"]["vocab"].items() if token not in specials}
    ranks = {bytes(byte_of[character] for character in token): number for token, number in vocabulary.items()}
    steps = config["pre_tokenizer"].get("pretokenizers", [config["pre_tokenizer"]])
    patterns = [step["pattern"]["Regex"] for step in steps if step["type"] == "Split"]
    gpt2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
    global _tiktoken
    _tiktoken = tiktoken.Encoding(
        "bench", pat_str=patterns[0] if patterns else gpt2, mergeable_ranks=ranks, special_tokens=specials
    )


def _encode_tiktoken(texts: list[str]) -> bytes:
    import numpy as np

    kind = np.uint16 if _tiktoken.n_vocab <= 1 << 16 else np.int32
    return b"".join([np.array(_tiktoken.encode_ordinary(text), kind).tobytes() for text in texts])


def datatrove(tokenizer: Path, out: Path, files: list[str]) -> None:
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    steps = [
        JsonlReader(str(Path(files[0]).parent), glob_pattern="*.jsonl"),
        DocumentTokenizer(str(out), tokenizer_name_or_path=str(tokenizer / "tokenizer.json"), shuffle_documents=False),
    ]
    LocalPipelineExecutor(steps, tasks=WORKERS, workers=WORKERS, logging_dir=str(out / "logs")).run()


def litdata(tokenizer: Path, out: Path, files: list[str]) -> None:
    import litdata as library

    library.optimize(
        fn=_LitdataFile(tokenizer),
        inputs=files,
        output_dir=str(out / "chunks"),
        num_workers=WORKERS,
        chunk_bytes="64MB",
        item_loader=library.TokensLoader(),
    )


class _LitdataFile:
    """The ids of each document of a file, as a tensor."""

    def __init__(self, tokenizer: Path) -> None:
        self._path = str(tokenizer / "tokenizer.json")

    def __call__(self, file: str) -> Iterator[Any]:
        import tokenizers
        import torch

        library = tokenizers.Tokenizer.from_file(self._path)
        for batch in _batches([file]):
            for encoded in library.encode_batch_fast(batch, add_special_tokens=False):
                yield torch.tensor(encoded.ids)


def dolma(tokenizer: Path, out: Path, files: list[str]) -> None:
    import tokenizers
    from dolma.tokenizer import tokenize_in_parallel

    # It refuses any type but the narrowest that holds the vocabulary.
    size = tokenizers.Tokenizer.from_file(str(tokenizer / "tokenizer.json")).get_vocab_size()
    tokenize_in_parallel(
        sources=files,
        destination=str(out / "tokens"),
        num_writers=WORKERS,
        num_readers=1,
        tokenizer_name_or_path=str(tokenizer / "tokenizer.json"),
        eos_token_id=0,
        pad_token_id=0,
        dtype="uint16" if size <= 1 << 16 else "uint32",
        debug=False,
        id_field_name=None,  # without it, records that have no id are dropped
    )


def datasets_map(tokenizer: Path, out: Path, files: list[str]) -> None:
    import datasets
    import tokenizers

    library = tokenizers.Tokenizer.from_file(str(tokenizer / "tokenizer.json"))

    def encode(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return {"input_ids": [one.ids for one in library.encode_batch_fast(rows["text"], add_special_tokens=False)]}

    made = datasets.load_dataset("json", data_files=files, split="train", cache_dir=str(out / "cache"))
    made = made.map(encode, batched=True, num_proc=WORKERS, remove_columns=made.column_names)
    made.save_to_disk(str(out / "saved"))


def megatron(tokenizer: Path, out: Path, files: list[str]) -> None:
    """`tools/preprocess_data.py` of the checkout that MEGATRON names."""
    _run_megatron("preprocess_data.py", tokenizer, out, files, "--workers", str(WORKERS))


def megatron_fast(tokenizer: Path, out: Path, files: list[str]) -> None:
    """`tools/preprocess_data_fast.py`, which has gigatoken inside."""
    _run_megatron("preprocess_data_fast.py", tokenizer, out, files, "--use-gigatoken")


def _run_megatron(program: str, tokenizer: Path, out: Path, files: list[str], *flags: str) -> None:
    checkout = Path(os.environ["MEGATRON"])
    joined = out / "input.jsonl"
    if len(files) > 1:
        sys.exit("Megatron's programs read one file; pass one")
    command = [sys.executable, str(checkout / "tools" / program), "--input", files[0], "--append-eod"]
    command += ["--output-prefix", str(joined.with_suffix("")), "--tokenizer-type", "HuggingFaceTokenizer"]
    command += ["--tokenizer-model", str(tokenizer), *flags]
    os.environ["PYTHONPATH"] = str(checkout)
    os.execv(sys.executable, command)


def _batches(files: list[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    for file in files:
        with open(file, "rb") as lines:
            for line in lines:
                batch.append(json.loads(line)["text"])
                if len(batch) == BATCH:
                    yield batch
                    batch = []
    if batch:
        yield batch


PEERS: dict[str, Callable[[Path, Path, list[str]], None]] = {
    "encode_files": encode_files,
    "encode_files+tofile": encode_files_tofile,
    "tokenizers": huggingface,
    "tiktoken": tiktoken_pool,
    "datatrove": datatrove,
    "litdata": litdata,
    "dolma": dolma,
    "datasets.map": datasets_map,
    "megatron": megatron,
    "megatron-fast": megatron_fast,
}

if __name__ == "__main__":
    main()
