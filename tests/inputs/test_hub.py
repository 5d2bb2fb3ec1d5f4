"""Data sets of the Hub as inputs: the real client, against a server on loopback that speaks its API."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from tests.support.hub_client import Client, WarmProcess, warm_process
from tests.support.hub_repositories import OPENWEBTEXT_PARQUET, add_named, card, jsonl, jsonl_zst, parquet, texts_of
from tests.support.hub_server import TOKEN, Hub, serving
from tests.support.running import ids_of, sentence, snapshot, start, wait_for
from tests.support.running import texts_of as texts_in
from tokenmill.inputs._hub_client import File, explain
from tokenmill.inputs._hub_fetch import choose_sample
from tokenmill.inputs._hub_names import parse
from tokenmill.store.store import TokenStore

MESSAGE = pa.struct({"role": pa.string(), "content": pa.string()})


@pytest.fixture(scope="module")
def _hub() -> Iterator[Hub]:
    with serving() as hub:
        add_named(hub)
        yield hub


@pytest.fixture
def hub(_hub: Hub) -> Hub:
    """The server with the data sets that have short names; tests do not change it."""
    _hub.requests.clear()
    _hub.faults.clear()
    _hub.renamed.clear()
    _hub.sizes.clear()
    _hub.gate.set()
    return _hub


@pytest.fixture(scope="module")
def process() -> Iterator[WarmProcess]:
    with warm_process() as process:
        yield process


@pytest.fixture
def client(hub: Hub, process: WarmProcess, tmp_path: Path) -> Client:
    return Client(hub, tmp_path, process)


def test_each_name_gives_the_files_of_its_train_split(hub: Hub, client: Client) -> None:
    named = {
        "finewebedu": [f"HuggingFaceFW/fineweb-edu/sample/10BT/00{n}_00000.parquet" for n in (0, 1)],
        "wikitext-103": ["Salesforce/wikitext/wikitext-103-raw-v1/train-00000-of-00001.parquet"],
        "tinystories": [
            "roneneldan/TinyStories/data/train-00000-of-00002-2d5a1467fff1081b.parquet",
            "roneneldan/TinyStories/data/train-00001-of-00002-5852b56a2bd28fd9.parquet",
        ],
        "openwebtext": [f"Skylion007/openwebtext@refs/convert/parquet/plain_text/train/000{n}.parquet" for n in (0, 1)],
        "slimpajama": [
            f"cerebras/SlimPajama-627B/train/chunk{chunk}/example_train_{n}.jsonl.zst"
            for chunk in (1, 2)
            for n in (0, 1)
        ],
    }
    found = client.find(*named)
    for (name, expected), answer in zip(named.items(), found, strict=True):
        assert "files" in answer, answer
        assert [file[0] for file in answer["files"]] == [f"datasets/{path}" for path in expected], name
        for full_name, path, text_key, origin in answer["files"]:
            repository, _, inner = re.fullmatch(r"datasets/(\w+/[\w-]+)(@refs/\w+/\w+)?/(.+)", full_name).groups()
            served = hub.repositories[repository]
            commit = origin.removeprefix(f"hf://datasets/{repository}@")
            assert Path(path).read_bytes() == served.commits[commit][inner]
            assert text_key == "text"
            assert Path(path).is_relative_to(client.home)
    assert any("is a loading script, openwebtext.py, which is not run" in note for note in found[3]["notes"])
    assert any("sample-10BT" in note for note in found[0]["notes"])
    # Only what is needed is listed: the card says where the sample is.
    assert hub.asked(r"tree/\w+/sample") and not hub.asked(r"fineweb-edu/tree/\w+$")


def test_openwebtext_is_also_found_where_it_is_parquet(hub: Hub, client: Client) -> None:
    script = hub.repositories["Skylion007/openwebtext"]
    try:
        hub.add("Skylion007/openwebtext", OPENWEBTEXT_PARQUET)
        (answer,) = client.find("openwebtext")
    finally:
        hub.repositories["Skylion007/openwebtext"] = script
    names = [f"datasets/Skylion007/openwebtext/plain_text/train-0000{n}-of-00002.parquet" for n in (0, 1)]
    assert [file[0] for file in answer["files"]] == names
    assert answer["notes"][0] == "split      train of Skylion007/openwebtext:plain_text"


def test_a_name_takes_a_revision(hub: Hub, client: Client) -> None:
    commit = hub.repositories["roneneldan/TinyStories"].refs["main"]
    assert client.names(f"tinystories@{commit}", f"TinyStories@{commit}:validation") == client.names(
        "tinystories", "tinystories:validation"
    )


def test_the_format_is_chosen_for_each_split(hub: Hub, client: Client) -> None:
    lines = jsonl(["a", "b"])
    hub.add("me/mix", {"data/train-00000-of-00001.parquet": parquet(["a"]), "notes.txt": b"n", "changes.txt": b"c"})
    hub.add("me/lines", {"train/a.json": lines, "train/b.jsonl": lines, "train/c.jsonl": lines, "train/d.txt": b"d"})
    hub.add("me/notice", {f"train/{name}.parquet": parquet(["a"]) for name in ("alpha", "notice", "license-texts")})
    table = hub.add("me/table", {"train.csv": b"text\na\n", "test.csv": b"text\na\n", "vocab.txt": b"wrong"})
    table.commit({"default/train/0000.parquet": parquet(["a"])}, "refs/convert/parquet")
    mix, several, notice, converted = client.find("me/mix", "me/lines", "me/notice", "me/table")
    assert [file[0] for file in mix["files"]] == ["datasets/me/mix/data/train-00000-of-00001.parquet"]
    assert [Path(file[0]).name for file in several["files"]] == ["a.json", "b.jsonl", "c.jsonl"]
    assert any("1 data file is of another format than most, and not read" in note for note in several["notes"])
    assert len(notice["files"]) == 3
    assert [file[0] for file in converted["files"]] == [
        "datasets/me/table@refs/convert/parquet/default/train/0000.parquet"
    ]
    assert any("me/table is in .csv files, which are not read; its Parquet from" in note for note in converted["notes"])


def test_metadata_in_a_separate_file_overrides_the_card(hub: Hub, client: Client) -> None:
    files = {
        "README.md": card("configs:\n- config_name: default\n  data_files: bad/*.jsonl\nlicense: mit"),
        ".huggingface.yaml": b"configs:\n- config_name: default\n  data_files: good/*.jsonl\n",
        "good/a.jsonl": jsonl(["good"]),
        "bad/b.jsonl": jsonl(["bad"]),
    }
    hub.add("me/yaml", files)
    assert client.names("me/yaml") == [["me/yaml/good/a.jsonl"]]


def test_files_with_any_name_can_be_named(hub: Hub, client: Client) -> None:
    names = ["co:lon.jsonl", "br[1].jsonl", "q?.jsonl", "with space.jsonl", "50%.jsonl", "a#b.jsonl"]
    hub.add("me/names", {f"d/{name}": jsonl([name]) for name in names} | {"d/br1.jsonl": jsonl(["other"])})
    found = client.find(*(f"hf://datasets/me/names/d/{name}" for name in names))
    assert [[file[0] for file in answer["files"]] for answer in found] == [[f"datasets/me/names/d/{n}"] for n in names]
    assert [Path(answer["files"][0][1]).read_bytes() for answer in found] == [jsonl([name]) for name in names]


def test_a_renamed_repository_has_its_current_name(hub: Hub, client: Client) -> None:
    hub.add("me/new", {"train.jsonl": jsonl(["a"] * 300)})
    hub.renamed["old/name"] = "me/new"
    (online,) = client.find("old/name")
    assert [file[0] for file in online["files"]] == ["datasets/me/new/train.jsonl"]
    (offline,) = client.find("old/name", HF_HUB_OFFLINE="1")
    assert offline["files"] == online["files"]


def test_empty_files_are_reported(hub: Hub, client: Client) -> None:
    hub.add("me/empty", {"train-1.jsonl": b"", "train-2.jsonl": b""})
    assert any("all of them are empty" in note for note in client.find("me/empty")[0]["notes"])


def test_configurations_and_splits_follow_colons(client: Client) -> None:
    fineweb, wikitext = "HuggingFaceFW/fineweb-edu", "Salesforce/wikitext"
    found = client.names(
        "finewebedu:CC-MAIN-2013-20",
        "finewebedu:default",
        "wikitext-103:validation",
        "tinystories:validation",
        "slimpajama:test",
        f"{wikitext}:wikitext-2-raw-v1",
        f"{wikitext}:wikitext-103-raw-v1:test",
        f"hf://datasets/{wikitext}:wikitext-103-raw-v1:test",
        "roneneldan/TinyStories",
        "Skylion007/openwebtext:plain_text:train",
        f"hf://datasets/{fineweb}",
    )
    everything = [
        f"{fineweb}/data/CC-MAIN-2013-20/train-00000-of-00001.parquet",
        f"{fineweb}/data/CC-MAIN-2024-10/000_00000.parquet",
    ]
    assert found[0] == everything[:1]
    assert found[1] == found[10] == everything
    assert found[2] == [f"{wikitext}/wikitext-103-raw-v1/validation-00000-of-00001.parquet"]
    assert found[3] == ["roneneldan/TinyStories/data/validation-00000-of-00001-869c898b519ad725.parquet"]
    assert found[4] == [f"cerebras/SlimPajama-627B/test/chunk1/example_test_{n}.jsonl.zst" for n in (0, 1)]
    assert found[5] == [f"{wikitext}/wikitext-2-raw-v1/train-00000-of-00001.parquet"]
    assert found[6] == found[7] == [f"{wikitext}/wikitext-103-raw-v1/test-00000-of-00001.parquet"]
    assert len(found[8]) == len(found[9]) == 2


def test_paths_folders_globs_and_revisions_name_files(hub: Hub, client: Client) -> None:
    repository = hub.add("me/notes", {"a.jsonl": b'{"text": "old"}\n'})
    old = repository.refs["main"]
    repository.refs["v1"] = old
    repository.commit({"a.jsonl": b'{"text": "new"}\n', "d/b.jsonl": b"{}\n", "d/e/c.jsonl": b"{}\n", "d/x.png": b"p"})
    url = "hf://datasets/me/notes"
    items = [
        f"{url}/a.jsonl",
        f"{url}/d",
        f"{url}/d/*.jsonl",
        f"{url}/**/*.jsonl",
        f"{url}/d/e/?.jsonl",
        f"{url}/d/x.png",
    ]
    found = client.names(*items)
    assert found[0] == ["me/notes/a.jsonl"]
    assert found[1] == ["me/notes/d/b.jsonl", "me/notes/d/e/c.jsonl"]
    assert found[2] == ["me/notes/d/b.jsonl"]
    assert found[3] == ["me/notes/a.jsonl", "me/notes/d/b.jsonl", "me/notes/d/e/c.jsonl"]
    assert found[4] == ["me/notes/d/e/c.jsonl"]
    assert found[5] == ["me/notes/d/x.png"]
    versions = client.find(
        f"{url}/a.jsonl", f"{url}@v1/a.jsonl", f"{url}@{old}/a.jsonl", f"{url}@refs%2Fpr%2F1/a.jsonl"
    )
    contents = [Path(answer["files"][0][1]).read_text() for answer in versions[:3]]
    assert contents == ['{"text": "new"}\n', '{"text": "old"}\n', '{"text": "old"}\n']
    assert versions[1]["files"][0][3] == f"{url}@{old}"
    assert "refs/pr/1" in versions[3]["error"]
    converted = "hf://datasets/Skylion007/openwebtext@~parquet"
    assert (
        client.names(f"{converted}/plain_text/train/*.parquet", converted)
        == [[f"Skylion007/openwebtext@refs/convert/parquet/plain_text/train/000{n}.parquet" for n in (0, 1)]] * 2
    )


def test_a_folder_with_several_splits_is_read_whole_and_says_so(client: Client) -> None:
    (answer,) = client.find("hf://datasets/Salesforce/wikitext/wikitext-103-raw-v1")
    assert len(answer["files"]) == 3
    assert any("has files of train, validation, test; all of them are read" in note for note in answer["notes"])


def test_a_named_data_set_goes_through_a_whole_run(hub: Hub, client: Client, tmp_path: Path) -> None:
    done = client.tokenize("tinystories", "-o", "out", "--log-json")
    assert done.returncode == 0, done.stderr
    store = TokenStore(tmp_path / "out")
    assert texts_in(store) == texts_of("story-0", 80) + texts_of("story-1")
    assert [file.path for file in store.manifest.inputs] == [
        "datasets/roneneldan/TinyStories/data/train-00000-of-00002-2d5a1467fff1081b.parquet",
        "datasets/roneneldan/TinyStories/data/train-00001-of-00002-5852b56a2bd28fd9.parquet",
    ]
    everything = b"".join(snapshot(tmp_path / "out").values())
    assert str(tmp_path).encode() not in everything
    assert b"snapshots" not in everything
    commit = hub.repositories["roneneldan/TinyStories"].refs["main"]
    run = json.loads((tmp_path / "out" / "run.json").read_text())
    assert run["origins"] == [f"hf://datasets/roneneldan/TinyStories@{commit}"]
    events = [json.loads(line) for line in done.stderr.splitlines()]
    fetched = [event for event in events if event["event"] == "preparation"]
    assert fetched[-1]["fraction"] == 1.0
    assert fetched[-1]["what"] == "2 of 2 files of roneneldan/TinyStories"
    assert any(commit[:12] in event.get("text", "") for event in events)

    hub.requests.clear()
    again = client.tokenize("tinystories", "-o", "out")
    assert again.returncode == 0
    assert not hub.asked("resolve|tree|cdn")
    verified = client.tokenmill("verify", "out", "--against", "tinystories", "--all")
    assert verified.returncode == 0, verified.stdout + verified.stderr


def test_a_resumed_run_refuses_a_commit_that_changes_the_data_and_no_other(
    hub: Hub, client: Client, tmp_path: Path
) -> None:
    files = {"README.md": b"# one", "train.jsonl": b'{"text": "one"}\n' * 200}
    repository = hub.add("me/moving", files)
    first = repository.refs["main"]
    assert client.tokenize("me/moving", "-o", "out").returncode == 0
    repository.commit({**files, "README.md": b"# two"})
    hub.requests.clear()
    done = client.tokenize("me/moving", "-o", "out")
    assert done.returncode == 0, done.stderr
    assert not hub.asked("GET /cdn")
    repository.commit({**files, "train.jsonl": b'{"text": "two"}\n' * 200})
    refused = sentence(client.tokenize("me/moving", "-o", "out"))
    assert "train.jsonl has other content than when out was begun" in refused
    (pinned,) = client.find(f"me/moving@{first}")
    assert Path(pinned["files"][0][1]).read_bytes() == files["train.jsonl"]
    assert client.tokenize(f"me/moving@{first}", "-o", "out").returncode == 0
    (twice,) = client.refusals([f"me/moving@{first}", "me/moving"])
    assert twice.startswith(
        f"datasets/me/moving/train.jsonl is given at two revisions, hf://datasets/me/moving@{first} and"
    )
    assert client.names([f"me/moving@{first}", f"hf://datasets/me/moving@{first}"]) == [["me/moving/train.jsonl"]]


def test_a_gated_data_set_needs_a_token_which_no_other_host_receives(hub: Hub, client: Client) -> None:
    hub.add("me/gated", {"train.parquet": parquet(texts_of("gated", 200))}, is_gated=True)
    hub.add("me/private", {"train.parquet": parquet(texts_of("private", 200))}, is_private=True)
    hub.add("me/closed", {"train.txt": b"closed"}, is_gated=True, admits=False)
    gated, private = client.refusals("me/gated", "hf://datasets/me/private")
    assert gated == (
        f"input me/gated does not exist here, and as a data set of the Hub: it is gated; accept its terms at "
        f"{hub.endpoint}/datasets/me/gated and set HF_TOKEN to a token of that account"
    )
    assert f"{hub.endpoint} has no such data set, or it is private and needs HF_TOKEN" in private
    assert "rejects the token in HF_TOKEN" in client.refusals("me/gated", HF_TOKEN="hf_wrong")[0]
    assert "it is gated; accept its terms" in client.refusals("me/closed", HF_TOKEN=TOKEN)[0]
    assert client.names("me/gated", "me/private", HF_TOKEN=TOKEN) == [
        ["me/gated/train.parquet"],
        ["me/private/train.parquet"],
    ]
    assert hub.asked("GET /cdn")
    (client.home / "token").write_text(TOKEN)
    assert client.names("me/private") == [["me/private/train.parquet"]]


def test_an_item_that_cannot_be_found_is_refused_in_a_sentence(hub: Hub, client: Client) -> None:
    hub.add(
        "me/several",
        {
            "README.md": card(
                "configs:\n- {config_name: en, data_files: a.txt}\n- {config_name: de, data_files: b.txt}"
            ),
            "a.txt": b"a",
            "b.txt": b"b",
        },
    )
    hub.add("me/script", {"script.py": b"import datasets", "data.csv": b"a,b"})
    images = hub.add("me/images", {"a.png": b"png"})
    hub.add("me/tables", {"d/a.csv": b"a,b", "d/b.csv": b"a,b", "d/c.txt": b"c"})
    images.refs["v1"] = images.refs["main"]
    hub.add("me/code", {"a.py": b"pass"})
    hub.add("me/part", {"part.py": b"import datasets"}).commit(
        {"default/partial-train/0000.parquet": parquet(["a"])}, "refs/convert/parquet"
    )
    hub.add("me/valid", {"valid.txt": b"v", "test.txt": b"t"})
    expected = {
        "roneneldan/TinyStorys": "does not exist here, and as a data set of the Hub: .* no such data set.*; did you mean roneneldan/TinyStories",
        "hf://datasets/finewebedu/sample-100BT": "a configuration of finewebedu is written finewebedu:sample-100BT",
        "tinystory": r"input tinystory does not exist; did you mean tinystories \(hf://datasets/roneneldan/TinyStories\)\?",
        "hf://datasets/tinystories": "expected hf://datasets/owner/name",
        "hf://models/a/b": "expected hf://datasets/owner/name",
        "tinystories:foo": "roneneldan/TinyStories has no split 'foo'; there is train and validation",
        "finewebedu:sample-1BT": "has no configuration 'sample-1BT'; there is default, sample-10BT and CC-MAIN-2013-20; and the default one, default, has no such split; there is train",
        "wikitext-103:nothing:train": "Salesforce/wikitext has no configuration 'nothing'",
        "me/several": "none is the default; write me/several:NAME, there is en and de",
        "me/valid": "me/valid has no train split; there is validation and test",
        "me/script": "is a loading script, script.py, which is not run, and the Hub has no Parquet of it",
        "me/images": "is in .png files, which are not read, and the Hub has no Parquet of it",
        "me/code": "has no Parquet, JSON lines, JSON or text, and the Hub has no Parquet of it",
        "me/images@v1": "is in .png files, which are not read, and the Hub converts only what is on main",
        "me/part": "has converted only a part of me/part; to read that part, write me/part:default:partial-train",
        "me/valid@v9": "it has no revision 'v9'; expected a branch, a tag or a commit, with %2F for a slash",
        "hf://datasets/me/valid/none/*.txt": "no file of me/valid matches none/\\*.txt",
        "hf://datasets/me/valid/none": "nothing at none of me/valid is Parquet, JSON lines, JSON or text$",
        "hf://datasets/me/valid/valid.txt:test": "; a split is written after the name, me/valid:SPLIT",
        "hf://datasets/me/images/": "is in .png files",
        "hf://datasets/me/tables/d": "the data at d of me/tables is in .csv files, which are not read; expected Parquet",
    }  # fmt: skip
    for item, refusal in zip(expected, client.refusals(*expected), strict=True):
        assert re.search(expected[item], refusal), refusal
        assert refusal.startswith(("input ", "me/", "roneneldan/", "HuggingFaceFW/", "Salesforce/"))
    assert client.names("me/part:default:partial-train")[0]


def test_a_local_path_is_never_looked_up_on_the_hub(hub: Hub, client: Client, tmp_path: Path) -> None:
    (tmp_path / "tinystories").mkdir()
    (tmp_path / "tinystories" / "a.jsonl").write_text("{}\n")
    (tmp_path / "me").mkdir()
    here, slip, file = client.find("tinystories", "me/slip", "data/train.jsonl")
    assert [found[1] for found in here["files"]] == ["tinystories/a.jsonl"]
    assert here["notes"] == ["tinystories is a local path; the data set is hf://datasets/roneneldan/TinyStories"]
    assert slip["error"] == (
        "input me/slip does not exist in the folder me; for the data set of the Hub, write hf://datasets/me/slip"
    )
    assert file["error"] == "input data/train.jsonl does not exist"
    assert not hub.asked("datasets")


def test_passing_errors_and_broken_connections_change_no_byte(hub: Hub, client: Client) -> None:
    data = jsonl_zst([hashlib.sha256(b"%d" % number).hexdigest() for number in range(300)])
    hub.add("me/faulty", {f"train-{n}.jsonl.zst": data + b"\0" * 0 for n in range(2)} | {"README.md": b"# x"})
    hub.fail(r"/api/datasets/me/faulty/revision", 500)
    hub.fail(r"/api/datasets/me/faulty/tree", 503)
    hub.fail(r"/resolve/.*/train-0", 502)
    hub.fail(r"/cdn/me/faulty", 500)
    hub.fail(r"/cdn/me/faulty", num_bytes=len(data) // 2)
    hub.fail(r"/cdn/me/faulty", num_bytes=10)
    (answer,) = client.find("me/faulty")
    assert "files" in answer, answer
    assert [Path(file[1]).read_bytes() for file in answer["files"]] == [data, data]
    assert all(fault.times == 0 for fault in hub.faults)
    assert not list(client.home.rglob("*.incomplete"))


def test_an_error_that_does_not_pass_is_one_sentence(hub: Hub, client: Client) -> None:
    hub.fail(r"/api/datasets/roneneldan", 503, times=100)
    assert client.refusals("tinystories") == [f"input tinystories: {hub.endpoint} answers 503; try again later"]


def test_a_listing_that_fails_is_not_taken_for_an_empty_one(hub: Hub, client: Client) -> None:
    hub.add(
        "me/exact",
        {"README.md": card("configs:\n- {config_name: default, data_files: d/a.jsonl}"), "d/a.jsonl": jsonl(["a"])},
    )
    hub.add("me/script", {"script.py": b"", "a.jsonl": jsonl(["a"])})
    items = ["me/exact", "me/script", "hf://datasets/me/exact/d/a.jsonl", "hf://datasets/me/exact/d"]
    # The client retries a 503 for a minute.
    hub.fail("/tree/", 418, times=1000)
    for refusal in client.refusals(*items):
        assert f"{hub.endpoint} answers 418; see" in refusal
    hub.faults.clear()
    assert client.names(items[0], *items[2:]) == [["me/exact/d/a.jsonl"]] * 3
    assert "is a loading script, script.py, which is not run" in client.refusals("me/script")[0]


def test_errors_of_the_server_name_a_remedy(hub: Hub, client: Client) -> None:
    hub.add("me/refused", {"train.jsonl": jsonl(["a"])})
    expected = {
        429: "has received too many requests from here (429); wait some minutes and run the same command again",
        403: "the Hub requires a login (403); set HF_TOKEN, or run hf auth login; see",
        418: f"answers 418; see {hub.endpoint}/datasets/me/refused",
    }
    for status, said in expected.items():
        hub.faults.clear()
        hub.fail("/api/datasets/me/refused", status, times=100)
        assert said in client.refusals("me/refused")[0]
    hub.faults.clear()
    hub.fail("/api/datasets/me/refused", 403, times=100)
    assert "rejects the token in HF_TOKEN" in client.refusals("me/refused", HF_TOKEN=TOKEN)[0]


def test_a_file_that_could_not_be_fetched_is_not_reported_as_gone() -> None:
    """The client wraps the error of the server in one of its own; it gives up only after a minute."""
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError

    def answer(status: int) -> Any:
        return SimpleNamespace(status_code=status, headers={}, request=None)

    for status, said in ((429, "too many requests from here"), (500, "answers 500; try again later")):
        error = LocalEntryNotFoundError("not in the cache")
        error.__cause__ = HfHubHTTPError("refused", response=answer(status))
        assert said in str(explain(error, parse("me/data")))
    gone = EntryNotFoundError("not found")
    gone.response = answer(404)
    assert "a file of it is gone" in str(explain(gone, parse("me/data")))


def test_a_cache_folder_that_is_a_file_is_refused_in_a_sentence(client: Client, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (refused,) = client.refusals("tinystories", HF_HOME=str(tmp_path / "file"))
    assert refused.startswith(f"{tmp_path}/file/")
    assert refused.endswith("cannot be written: Not a directory; set HF_HOME to a writable folder")


def test_files_that_another_program_fetched_are_read_without_a_network(hub: Hub, client: Client) -> None:
    parts = {f"data/train-0000{n}-of-00003.parquet": parquet(texts_of(str(n), 200)) for n in range(3)}
    repository = hub.add("me/cluster", {"README.md": b"# x", **parts})
    repository.refs["v1"] = repository.refs["main"]
    commit = repository.refs["main"]
    fetch = "import huggingface_hub as h\nfor r in ('main', 'v1'): h.snapshot_download('me/cluster', repo_type='dataset', revision=r)"
    subprocess.run([sys.executable, "-c", fetch], env=client.environment(), check=True, capture_output=True)
    items = ["me/cluster", "me/cluster@v1", f"me/cluster@{commit}", "hf://datasets/me/cluster/data/*-00001-*"]
    offline = client.find(*items, HF_HUB_OFFLINE="1")
    for answer, count in zip(offline, (3, 3, 3, 1), strict=True):
        assert len(answer.get("files", [])) == count, answer
        assert answer["notes"][0] == (
            "HF_HUB_OFFLINE is set; the files of me/cluster that another program has put into the cache are taken for "
            "all of it"
        )
        assert {file[3] for file in answer["files"]} == {f"hf://datasets/me/cluster@{commit}"}
    Path(offline[0]["files"][1][1]).unlink()
    (part,) = client.refusals("me/cluster", HF_HUB_OFFLINE="1")
    assert part.startswith("input me/cluster: the cache does not have data/train-00001-of-00003.parquet of me/cluster")
    assert "-00001-of-" in client.refusals("hf://datasets/me/cluster/data/*.parquet", HF_HUB_OFFLINE="1")[0]
    one = "hf://datasets/me/cluster/data/train-00000-of-00003.parquet"
    for item in ("hf://datasets/me/cluster/data/*-00000-*", one):
        assert len(client.names(item, HF_HUB_OFFLINE="1")[0]) == 1
    (client.home / "hub/datasets--me--cluster/snapshots" / commit / "c4-train.00001-of-00002.json.gz").write_bytes(b"")
    (dotted,) = client.refusals("hf://datasets/me/cluster/*.json.gz", HF_HUB_OFFLINE="1")
    assert "the cache does not have c4-train.00000-of-00002.json.gz of me/cluster, one of 2 such files" in dotted
    assert "the cache does not have all of it" in client.refusals("me/cluster@v2", HF_HUB_OFFLINE="1")[0]


def test_without_a_network_the_cache_answers_for_all_or_nothing(hub: Hub, client: Client) -> None:
    (online,) = client.find("finewebedu")
    for env, why in (
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"),
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "the Hub does not answer"),
    ):
        (answer,) = client.find("finewebedu", **env)
        assert answer["files"] == online["files"]
        assert answer["notes"][0] == f"{why}; finewebedu is read from the cache, as of its last use"
    missing = Path(online["files"][1][1])
    missing.resolve().unlink()
    missing.unlink()
    offline = client.refusals("finewebedu", "tinystories", HF_HUB_OFFLINE="1")
    assert offline[0] == (
        "input finewebedu: the cache does not have all of it, and HF_HUB_OFFLINE is set; run once without it"
    )
    started = time.monotonic()
    refused = client.refusals("finewebedu", "me/nothing", HF_ENDPOINT="http://127.0.0.1:9")
    assert time.monotonic() - started < 20
    assert "http://127.0.0.1:9 does not answer" in refused[0]
    assert refused[1].startswith(
        "input me/nothing does not exist here, and as a data set of the Hub: http://127.0.0.1:9"
    )
    assert client.names("finewebedu")[0][1].endswith("001_00000.parquet")


def test_a_commit_whose_files_are_in_the_cache_needs_no_network_at_all(hub: Hub, client: Client) -> None:
    commit = hub.repositories["roneneldan/TinyStories"].refs["main"]
    item = f"roneneldan/TinyStories@{commit}"
    first = client.names(item)
    hub.requests.clear()
    assert client.names(item) == first
    assert not hub.asked("datasets")


def test_the_only_field_of_strings_is_the_text_unless_another_is_named(
    hub: Hub, client: Client, tmp_path: Path
) -> None:
    one = parquet(texts_of("content"), "content", score=[1.0] * 30)
    two = parquet(["t"] * 30, "title", content=texts_of("body"))
    features = "dataset_info:\n  features:\n  - {name: story, dtype: string}\n  - {name: n, dtype: int64}"
    hub.add("me/one", {"train.parquet": one})
    hub.add("me/two", {"train.parquet": two})
    hub.add("me/story", {"README.md": card(features), "train.jsonl": b'{"story": "s", "n": 1, "id": "1"}\n'})
    other = "dataset_info:\n- config_name: other\n  features:\n  - {name: wrong, dtype: string}"
    hub.add("me/stale", {"README.md": card(other), "train.parquet": one})
    hub.add("me/wrong", {"README.md": card(features), "train.parquet": one})
    hub.add("me/plain", {"train.jsonl.zst": jsonl_zst(["a"]), "test.jsonl": jsonl(["a"], "content")})
    names = ["me/one", "me/two", "me/story", "me/stale", "me/wrong", "me/plain", "me/plain:test"]
    keys = [answer["files"][0][2] for answer in client.find(*names)]
    assert keys == ["content", None, "story", "content", "content", "text", "content"]
    done = client.tokenize("me/one", "-o", "one")
    assert done.returncode == 0, done.stderr
    assert "in 'content', the only field of strings" in done.stderr
    assert texts_in(TokenStore(tmp_path / "one")) == texts_of("content")
    assert TokenStore(tmp_path / "one").manifest.settings["text-key"] == "content"
    assert client.tokenize("me/two", "-o", "two", "--text-key", "content").returncode == 0
    assert texts_in(TokenStore(tmp_path / "two")) == texts_of("body")


def test_conversations_without_their_flag_are_refused_with_the_flag_to_pass(hub: Hub, client: Client) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    line = json.dumps({"messages": messages, "id": "7"}).encode()
    hub.add("me/chat", {"train.jsonl": line})
    hub.add("me/columns", {"train.parquet": parquet([], "unused", messages=pa.array([], pa.list_(MESSAGE)))})
    for name in ("me/chat", "me/columns"):
        refused = sentence(client.tokenize(name, "-o", "out", "--text-key", "text"))
        assert "--messages-key messages for conversations" in refused


def test_with_a_limit_no_more_files_are_fetched_than_it_needs(hub: Hub, client: Client, tmp_path: Path) -> None:
    texts = [texts_of(f"part {number}", 50) for number in range(9)]
    hub.add("me/parts", {f"train-{number}.parquet": parquet(some) for number, some in enumerate(texts)})
    hub.add("me/lines", {f"train-{number}.jsonl.zst": jsonl_zst(some) for number, some in enumerate(texts)})
    (answer,) = client.find("me/lines", limit=120)
    assert [Path(file[0]).name for file in answer["files"]] == [f"train-{number}.jsonl.zst" for number in range(3)]
    assert answer["notes"][-1].strip() == "the first 120 documents are in 3 of these files"
    assert len(hub.asked("HEAD .*train-")) == 3
    assert client.tokenize("me/parts", "-o", "out", "--limit", "120").returncode == 0
    store = TokenStore(tmp_path / "out")
    assert texts_in(store) == [text for some in texts for text in some][:120]
    assert len(store.manifest.inputs) == 3
    arrays = {f"train-{number}.json.gz": gzip.compress(jsonl(some)) for number, some in enumerate(texts)}
    hub.add("me/gzipped", arrays)
    hub.add("me/texts", {f"train-{number}.txt": f"text {number}".encode() for number in range(9)})
    gzipped, plain = client.find("me/gzipped", "me/texts", limit=4)
    assert [len(answer["files"]) for answer in (gzipped, plain)] == [1, 4]
    verified = client.tokenmill("verify", "out", "--against", "me/parts")
    assert verified.returncode == 0, verified.stdout + verified.stderr


def test_an_estimate_fetches_a_few_files_that_stand_for_all(hub: Hub, client: Client, tmp_path: Path) -> None:
    # As large as real ones in the listing only.
    texts = {f"train-{number:02d}.jsonl.zst": texts_of(f"part {number}", 20 + number) for number in range(40)}
    hub.add("me/large", {name: jsonl_zst(some) for name, some in texts.items()})
    hub.sizes.update(dict.fromkeys(texts, 25_000_000))
    done = client.tokenmill("estimate", "me/large", "--tokenizer", "bytes", "--json")
    assert done.returncode == 0, done.stderr
    assert len(hub.asked("HEAD .*train-")) == 10
    assert "10 of these files are fetched, and stand for all" in done.stderr
    found = json.loads(done.stdout)
    documents = sum(map(len, texts.values()))
    low, high = found["intervals"]["documents"]
    assert low < documents < high
    assert abs(found["documents"] / documents - 1) < 0.05
    assert any("10 files were looked at, and stand for all" in note for note in found["notes"])
    dry = client.tokenize("me/large", "-o", "out", "--dry-run")
    assert dry.returncode == 0 and not (tmp_path / "out").exists()
    hub.requests.clear()
    limited = client.tokenize("me/large", "-o", "out", "--dry-run", "--limit", "25")
    assert re.search(r"documents +25\n", limited.stdout), limited.stderr
    assert len(hub.asked("HEAD .*train-")) <= 2


def test_files_of_a_sample_are_spread_evenly_and_are_few() -> None:
    def choose(count: int, size: int) -> list[int]:
        return [int(path) for path in choose_sample({str(number): File(size, "") for number in range(count)})]

    assert choose(59_000, 15_000_000)[:2] == [1843, 5531] and len(choose(59_000, 15_000_000)) == 16
    assert choose(14, 2_000_000_000) == [3, 10]
    assert choose(2, 2_000_000_000) == [0, 1]
    assert choose(100, 1000) == list(range(100))


def test_ctrl_c_while_fetching_ends_the_run_at_once_and_the_next_one_resumes(
    hub: Hub, client: Client, tmp_path: Path
) -> None:
    hub.add("me/slow", {f"train-{n}.jsonl": b'{"text": "%d"}\n' % n * 300 for n in range(3)})
    hub.gate.clear()
    arguments = ["tokenize", "me/slow", "-o", "out", "--tokenizer", "bytes", "--workers", "1"]
    process = start(*arguments, env=client.environment(), cwd=client.folder)
    wait_for(lambda: len(hub.asked("GET /cdn")) == 3)
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    hub.gate.set()
    assert process.returncode == 130, errors
    assert errors.splitlines()[-1].startswith("error: stopped by SIGINT")
    assert time.monotonic() - started < 8
    assert not (tmp_path / "out").exists()
    assert client.tokenize("me/slow", "-o", "out").returncode == 0
    assert len(ids_of(TokenStore(tmp_path / "out"))) == 900


def test_a_disk_that_is_too_small_is_refused_before_anything_is_fetched(hub: Hub, client: Client) -> None:
    hub.add("me/huge", {"train.parquet": parquet(texts_of("huge", 200))})
    hub.sizes["train.parquet"] = 10**18
    try:
        (refused,) = client.refusals("me/huge")
    finally:
        hub.sizes.clear()
    assert re.match(r"me/huge needs 1000000\.00 TB more in .*/hub, and its disk has .* free; set HF_HOME", refused)
    assert not hub.asked("cdn")


def test_a_disk_that_fills_up_is_one_sentence(hub: Hub, client: Client, tmp_path: Path) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    if os.geteuid() != 0 or sys.platform != "linux":
        pytest.skip("mount needs root on Linux")
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(folder)], capture_output=True)
    if done.returncode:
        pytest.skip(f"mount is not possible here: {done.stderr.decode().strip()}")
    try:
        # The listing gives a size that is too small, as if other programs filled the disk in the meantime.
        hub.add("me/large", {"train.jsonl": b'{"text": "large"}\n' * 40_000})
        hub.sizes["train.jsonl"] = 100_000
        (refused,) = client.refusals("me/large", HF_HOME=str(folder / "hf"))
    finally:
        hub.sizes.clear()
        subprocess.run(["umount", "-l", str(folder)], check=False)
    assert refused.startswith(f"no space is left in {folder}/hf/hub for me/large; free some, or set HF_HOME")


@pytest.mark.parametrize("package", ["huggingface_hub", "datasets"])
def test_without_the_libraries_the_extra_is_named(client: Client, package: str) -> None:
    program = f"import sys; sys.modules[{package!r}] = None; import tokenmill; tokenmill.tokenize(sys.argv[1], 'out', tokenizer='bytes')"
    command = [sys.executable, "-c", program, "tinystories"]
    done = subprocess.run(command, env=client.environment(), capture_output=True, text=True, timeout=60)
    assert "MissingDependencyError: reading data sets of the Hub needs a package" in done.stderr
    assert "pip install 'tokenmill[hf]'" in done.stderr
