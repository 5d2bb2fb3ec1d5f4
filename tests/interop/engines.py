"""The contract suite of engines with the release candidate of `tokenizers` 1.0, in an environment of its own.

    make test-interop

That version cannot train, so the tokenizers are trained here. What it cannot encode as 0.23 does is skipped in the
suite with the sentence that users get. Afterwards the ids of both versions are compared, tokenizer by tokenizer, on
texts of characters that Unicode 3.2 has: the versions know different later ones.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import unicodedata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.conftest import _train_tokenizer, make_texts
from tests.interop.environments import ROOT, environment
from tests.support.structures import write_structures
from tokenmill.engines import make_reference, open_tokenizer
from tokenmill.engines.probe_strings import make_probe_strings

ENCODE = """
import json, sys
from pathlib import Path
from tokenmill.engines import choose, create, open_tokenizer
from tokenmill.errors import TokenmillError
texts = json.load(open(sys.argv[1]))
found = {}
for folder in map(Path, sys.argv[2:]):
    tokenizer = open_tokenizer(folder, folder.name)
    try:
        choice = choose(tokenizer)
    except TokenmillError as error:
        found[folder.name] = str(error)
        continue
    for name in {choice.engine, choice.reference}:
        batch = create(name, tokenizer).encode(texts)
        found[f"{folder.name} {name}"] = [batch.ids.tolist(), batch.offsets.tolist()]
json.dump(found, sys.stdout)
"""


def compare(python: Path, folders: list[Path], settings: dict[str, str], home: Path) -> bool:
    """Compare the ids of both versions and print a line for each tokenizer; return whether all are equal."""
    candidates = [*make_probe_strings(["<|endoftext|>", "[CLS]"]), *make_texts(200, seed=5)]
    texts = [text for text in candidates if all(map(_is_old, text))]
    (home / "texts.json").write_text(json.dumps(texts))
    command = [str(python), "-c", ENCODE, str(home / "texts.json"), *map(str, folders)]
    theirs = json.loads(subprocess.run(command, env=settings, check=True, capture_output=True, text=True).stdout)
    good = True
    for name, found in sorted(theirs.items()):
        if isinstance(found, str):
            print(f"{name}: {found}")
            continue
        folder = next(folder for folder in folders if folder.name == name.split()[0])
        expected = make_reference(open_tokenizer(folder, folder.name)).encode(texts)
        same = found == [expected.ids.tolist(), expected.offsets.tolist()]
        print(f"{name}: {len(texts)} texts, {'the same ids' if same else 'OTHER IDS'}")
        good &= same
    return good


def _is_old(character: str) -> bool:
    return unicodedata.ucd_3_2_0.category(character) == unicodedata.category(character) != "Cn"


def main() -> None:
    python = environment("tokenizers1")
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        _train_tokenizer(home / "tiny")
        write_structures(home / "structures")
        settings = {**os.environ, "TOKENMILL_TEST_TOKENIZERS": name, "PYTHONPATH": f"{ROOT}/src:{ROOT}"}
        settings["XDG_CACHE_HOME"] = f"{name}/cache"
        suite = [str(python), "-m", "pytest", "-q", "-rs", "-p", "no:xdist", "tests/contracts/test_engine_contract.py"]
        passed = subprocess.run(suite, cwd=ROOT, env=settings).returncode == 0
        folders = [home / "tiny", *sorted((home / "structures").iterdir())]
        passed &= compare(python, folders, settings, home)
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
