# ruff: noqa: E402
"""Every structure of tokenizers with every engine: MB per CPU second on natural text, and whether the ids are exact.

    python benchmarks/engines.py --corpus FILE.jsonl... [--save NAME]

A tokenizer of each structure (tests/support/structures.py) is trained on the corpora and kept in build/structures.
"0.23" is `tokenizers` before version 1, the reference. `auto` is what tokenmill chooses, and `with 1.0rc3` the same
with the release candidate of tokenizers 1.0 installed. The other libraries run in an environment of their own, on
one thread, called for one text after the other. Texts are encoded in their natural order, starting with empty caches;
the reference encodes the first few MB. Exact is: equal ids on these MB, and on the awkward strings and fuzzed ones.
"""

from __future__ import annotations

import sys
from pathlib import Path

# The module `tokenize` of the standard library must not be found beside this file.
sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import hashlib
import json
import platform
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from scripts.fuzz_engines import Strings
from tests.interop.environments import environment
from tests.support.structures import STRUCTURES, train
from tokenmill.engines import choose, create, load_tokenizer, make_reference
from tokenmill.engines.decoder import Decoder
from tokenmill.engines.probe_strings import make_probe_strings
from tokenmill.text_batch import PackedTexts

ROOT = Path(__file__).resolve().parents[1]
PEERS = ("tokenizers 1.0rc3", "splintr-rs", "tokie", "kitoken", "with 1.0rc3")
BATCH_CHARACTERS = 1_000_000

# A function that encodes one text for each library; tokenmill encodes a list.
CHILD = """
import hashlib, json, os, sys, time
os.environ.update(RAYON_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
name, file, texts = sys.argv[1:4]
texts = json.load(open(texts))
def load():
    if name == "tokenizers 1.0rc3":
        from tokenizers import Tokenizer
        one = Tokenizer.from_file(file)
        return lambda text: one.encode(text, add_special_tokens=False, encode_special_tokens=True).ids
    if name == "splintr-rs":
        import splintr
        return splintr.from_json(file).encode_ordinary
    if name == "tokie":
        import tokie
        one = tokie.Tokenizer.from_json(file)
        return lambda text: one.encode(text, add_special_tokens=False).ids
    if name == "kitoken":
        import kitoken
        one = kitoken.Kitoken.from_tokenizers_file(file)
        return lambda text: one.encode(text, False)
    from tokenmill.engines import choose, create, load_tokenizer
    tokenizer = load_tokenizer(file)
    engine = create(choose(tokenizer).engine, tokenizer)
    def encode_all(texts):
        batch = engine.encode(texts)
        edges = batch.offsets.tolist()
        return [batch.ids[a:b].tolist() for a, b in zip(edges, edges[1:])]
    return encode_all
encode = load()
def run(some):
    if name != "with 1.0rc3":
        return [list(encode(text)) for text in some]
    return [ids for i in range(0, len(some), 100) for ids in encode(some[i : i + 100])]
answer = {}
for part in ("natural", "hard"):
    started = time.process_time()
    ids = run(texts[part])
    answer[part + " seconds"] = time.process_time() - started
    answer[part] = [hashlib.md5(json.dumps(one).encode()).hexdigest() for one in ids]
json.dump(answer, sys.stdout)
"""


def digests(ids: Sequence[Any], edges: Sequence[int]) -> list[str]:
    flat = list(ids)
    return [hashlib.md5(json.dumps(flat[start:stop]).encode()).hexdigest() for start, stop in pairwise(edges)]


def read_texts(paths: Sequence[Path], megabytes: float) -> list[str]:
    """Read the first texts of each file, in turn."""
    texts: list[str] = []
    sources = [path.open(encoding="utf-8") for path in paths]
    size = 0
    while size < megabytes * 1e6:
        for source in sources:
            texts.append(json.loads(next(source))["text"])
            size += len(texts[-1].encode())
    return texts


def batches(texts: Sequence[str]) -> Iterator[list[str]]:
    some: list[str] = []
    for text in texts:
        some.append(text)
        if sum(map(len, some)) > BATCH_CHARACTERS:
            yield some
            some = []
    if some:
        yield some


def trained(name: str, texts: list[str]) -> Path:
    path = ROOT / "build" / "structures" / name / "tokenizer.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        few = texts[:: 3 if STRUCTURES[name].model == "Unigram" else 1]
        path.write_text(json.dumps(train(name, few, vocab_size=16_000)))
    return path


def measure(name: str, arguments: argparse.Namespace) -> dict[str, str]:
    """Return a cell for each engine."""
    texts = read_texts(arguments.corpus, arguments.megabytes)
    path = trained(name, texts)
    tokenizer = load_tokenizer(str(path))
    few = read_texts(arguments.corpus, arguments.reference_megabytes)
    decoder = Decoder(tokenizer)
    pieces = map(decoder.token_bytes, range(tokenizer.vocab_size))
    strings = Strings(tokenizer.added_tokens, pieces, [text for text in few if text], seed=1)
    hard = [*make_probe_strings(tokenizer.added_tokens), *(next(strings) for _ in range(arguments.strings))]
    reference = make_reference(tokenizer)
    expected, seconds = {}, {}
    for part, some in (("natural", few), ("hard", hard)):
        started = time.process_time()
        batch = reference.encode(some)
        seconds[part] = time.process_time() - started
        expected[part] = digests(batch.ids.tolist(), batch.offsets.tolist())
    cells = {"users": STRUCTURES[name].users, "0.23": f"{megabytes(few) / seconds['natural']:.1f}"}
    choice = choose(tokenizer).engine
    engine = create(choice, tokenizer)
    packed = [PackedTexts.of(some) for some in batches(texts)]
    started = time.process_time()
    for one in packed:
        engine.encode(one)
    speed = megabytes(texts) / (time.process_time() - started)
    found = {}
    for part, some in (("natural", few), ("hard", hard)):
        batch = engine.encode(some)
        found[part] = digests(batch.ids.tolist(), batch.offsets.tolist())
    cells["auto"] = show(speed, found, expected, choice)
    for peer in PEERS:
        cells[peer] = measure_peer(peer, path, {"natural": texts, "hard": hard}, expected)
    return cells


def measure_peer(peer: str, path: Path, texts: dict[str, list[str]], expected: dict[str, list[str]]) -> str:
    python = environment("tokenizers1" if "rc3" in peer else "peer_engines")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "texts.json").write_text(json.dumps(texts))
        command = [str(python), "-c", CHILD, peer, str(path), f"{folder}/texts.json"]
        settings = {"PYTHONPATH": f"{ROOT}/src", "XDG_CACHE_HOME": folder, "PATH": "/usr/bin:/bin"}
        result = subprocess.run(command, env=settings, capture_output=True, text=True)
    if result.returncode:
        print("   ", peer, result.stderr.strip().splitlines()[-1][:150], flush=True)
        return "refused"
    answer = json.loads(result.stdout)
    return show(megabytes(texts["natural"]) / answer["natural seconds"], answer, expected)


def megabytes(texts: Sequence[str]) -> float:
    return sum(len(text.encode()) for text in texts) / 1e6


def show(speed: float, found: dict[str, Any], expected: dict[str, list[str]], engine: str = "") -> str:
    """Show the speed, and of how many texts the ids differ, if any do."""
    differ = {
        part: sum(x != y for x, y in zip(found[part], expected[part], strict=False)) for part in ("natural", "hard")
    }
    wrong = "".join(f", {count} {part} differ" for part, count in differ.items() if count)
    return f"{speed:.0f}{wrong or ', exact'}{f' ({engine})' if engine else ''}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--corpus", nargs="+", type=Path, required=True, help="JSON lines with the field text")
    parser.add_argument("--megabytes", type=float, default=40)
    parser.add_argument("--reference-megabytes", type=float, default=4)
    parser.add_argument("--strings", type=int, default=3000, help="fuzzed strings, besides 4,000 awkward ones")
    parser.add_argument("--structures", nargs="+", default=list(STRUCTURES))
    parser.add_argument("--save", metavar="NAME", help="write benchmarks/results/NAME.md")
    arguments = parser.parse_args()
    columns = ["users", "0.23", "auto", *PEERS]
    lines = [f"| structure | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name in arguments.structures:
        cells = measure(name, arguments)
        lines.append(f"| {name} | {' | '.join(cells[column] for column in columns)} |")
        print(lines[-1], flush=True)
    if arguments.save:
        about = f"{platform.machine()}, Python {platform.python_version()}; MB per CPU second, one thread"
        corpora = " ".join(path.name for path in arguments.corpus)
        command = f"`python benchmarks/engines.py --corpus {corpora} --megabytes {arguments.megabytes:g}`"
        text = "\n".join(["# Engines", "", about, "", *lines, "", command, ""])
        (ROOT / "benchmarks" / "results" / f"{arguments.save}.md").write_text(text)


if __name__ == "__main__":
    main()
