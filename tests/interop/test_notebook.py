"""A notebook that runs in a real kernel: `tokenize` shows one output that is replaced, and results draw themselves.

It needs nbclient and ipykernel; `make test-notebook` installs them. Elsewhere it is skipped.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest

from tests.conftest import make_texts, write_jsonl

CELLS = """
import pandas as pd
import tokenmill as tm
from tokenmill.display import is_notebook
assert is_notebook()
#%%
store = tm.tokenize("a.jsonl", "out", tokenizer="bytes", task_bytes=2000, workers=1)
#%%
tm.tokenize(pd.DataFrame({"text": ["one", "two"]}), "frame", tokenizer="bytes")
#%%
tm.tokenize("a.jsonl", "quiet", tokenizer="bytes", display="quiet")
#%%
tm.inspect(store)
#%%
tm.inspect(store, document=0)
#%%
tm.verify(store)
#%%
tm.tokenize("a.jsonl", "bad", tokenizer="bytes", text_key="missing")
"""


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """The outputs of each cell."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    folder = tmp_path_factory.mktemp("notebook")
    write_jsonl(folder / "a.jsonl", make_texts(200, seed=5))
    book = nbformat.v4.new_notebook()
    book.cells = [nbformat.v4.new_code_cell(cell) for cell in CELLS.split("#%%\n")]
    kernel = {"kernel_name": "python3", "resources": {"metadata": {"path": str(folder)}}}
    client = nbclient.NotebookClient(book, timeout=120, allow_errors=True, **kernel)
    manager = client.create_kernel_manager()
    manager.kernel_spec.argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    client.execute()
    return [cell.outputs for cell in book.cells]


def html_of(output: Any) -> str:
    return str(output["data"]["text/html"])


def test_progress_is_one_output_that_stays_in_the_notebook(outputs: list[list[Any]]) -> None:
    assert outputs[0] == []
    for cell in (1, 2):
        shown = [output for output in outputs[cell] if output["output_type"] == "display_data"]
        assert len(shown) == 1
        assert "example" in html_of(shown[0])
        assert "store" in html_of(shown[0])
        assert "━" not in html_of(shown[0])
        assert all(output["output_type"] != "stream" for output in outputs[cell])
    assert "200 documents" in html_of(outputs[1][0])
    assert [output["output_type"] for output in outputs[3]] == ["execute_result"]


def test_results_draw_themselves(outputs: list[list[Any]]) -> None:
    assert "tokens per document, train" in html_of(outputs[4][0])
    assert "tokens per document, train" in outputs[4][0]["data"]["text/plain"]
    assert "<span" in html_of(outputs[5][0])
    assert outputs[6][0]["data"]["text/plain"].endswith("sound")


def test_an_error_keeps_what_was_shown(outputs: list[list[Any]]) -> None:
    assert [output["output_type"] for output in outputs[7]][-1] == "error"
    assert "the record has 'text'" in outputs[7][-1]["evalue"]
