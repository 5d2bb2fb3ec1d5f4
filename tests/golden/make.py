"""Write the golden store anew: `python tests/golden/make.py`. Only a new format version may change it."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
TEXTS = ["The mill grinds.", "", "größer, 日本\n", "👩‍👩‍👧 <eos>", "last"]
FLAGS = {
    "tokenizer": "bytes",
    "val_fraction": 0.4,
    "seed": 1,
    "keep_keys": ["id"],
    "on_error": "skip",
    "task_bytes": 150,
}


def write_input(folder: Path) -> Path:
    path = folder / "texts.jsonl"
    lines = [json.dumps({"text": text, "id": number}, ensure_ascii=False) for number, text in enumerate(TEXTS * 2)]
    lines.insert(3, "{not json")
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


def main() -> None:
    import tokenmill

    shutil.rmtree(HERE / "store", ignore_errors=True)
    source = write_input(Path(tempfile.mkdtemp()))
    tokenmill.tokenize(str(source), HERE / "store", **FLAGS)
    (HERE / "store" / "run.json").unlink()


if __name__ == "__main__":
    main()
