"""`tokenmill inspect --row`: the documents of a row, and the rows that `tokenmill trace` names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tokenmill as tm
from tests.support.in_process import tokenmill_here
from tests.support.stores import collect


def test_a_row_is_shown_with_its_documents(tmp_path: Path, tiny_tokenizer: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "the mill grinds"}\n{"text": "every token"}\n' * 20)
    tm.tokenize(tmp_path / "in.jsonl", tmp_path / "store", tokenizer=str(tiny_tokenizer), workers=1)
    row = ("inspect", tmp_path / "store", "--row", "1", "--seq-len", "16")
    shown = tokenmill_here(*row, "--no-shuffle")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("row 1 of pack concat, seq_len 16: ")
    assert "<|endoftext|>" in shown.stdout
    assert tokenmill_here(*row).stdout.startswith("row 1 of shuffle, seed 0 over pack concat, seq_len 16: ")
    padded = tokenmill_here("inspect", tmp_path / "store", "--row", "0", "--seq-len", "64", "--packing", "pad")
    assert "padding, tokens " in padded.stdout
    for more, message in ((["--row", "-1"], "row -1 does not exist"), (["--document", "3"], "either --row N or")):
        wrong = tokenmill_here(*row, *more)
        assert (wrong.returncode, wrong.stdout) == (2, "")
        assert message in wrong.stderr
    ids = json.loads(tokenmill_here("inspect", tmp_path / "store", "--document", "1", "--json").stdout)
    assert ids["text"] == "every token<|endoftext|>"
    assert ids["ids"] == tm.open(tmp_path / "store").document(1).tolist()


@pytest.mark.parametrize("packing", ["concat", "best-fit", "pad"])
def test_a_traced_row_can_be_looked_at(tmp_path: Path, tiny_tokenizer: Path, packing: str) -> None:
    (tmp_path / "in.jsonl").write_text("".join(f'{{"text": "the mill grinds {n} tokens"}}\n' for n in range(60)))
    tm.tokenize(tmp_path / "in.jsonl", tmp_path / "store", tokenizer=str(tiny_tokenizer), workers=1)
    flags = ["--seq-len", "24", "--seed", "5", "--packing", packing, "--json"]
    # Step 40 is in a later epoch, whose order is another one.
    for step in ("2", "40"):
        trace = json.loads(
            tokenmill_here("trace", tmp_path / "store", "--step", step, "--batch-size", "2", *flags).stdout
        )
        traced = trace["rows"][1]
        shown = json.loads(tokenmill_here("inspect", tmp_path / "store", "--row", str(traced["row"]), *flags).stdout)
        found = [(part["document"], part["start"], part["offset"], part["tokens"]) for part in shown["documents"]]
        assert found == [
            (part["document"], part["start"], part["offset"], part["num_tokens"]) for part in traced["documents"]
        ]
        assert len(shown["ids"]) == sum(part["tokens"] for part in shown["documents"])
    batch = collect(tm.load(tmp_path / "store", 24, 2, seed=5, packing=packing), 41)[40]
    assert shown["ids"] == batch.inputs[1, : len(shown["ids"])].tolist()
