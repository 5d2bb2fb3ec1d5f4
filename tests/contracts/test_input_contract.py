"""What every backend of inputs promises: the same items mean the same files on a disk, in a bucket and on the Hub.

`Dataset` objects are not listed: a run writes them to a folder, which is a local input.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import pytest

from tests.support.hub_client import Client, warm_process
from tests.support.hub_server import serving
from tokenmill.errors import TokenmillError
from tokenmill.inputs import SCHEMES, expand_inputs
from tokenmill.remote import split_url
from tokenmill.remote.paths import RemotePath

BACKENDS = {"local": "", "objects": "s3", "hub": "hf"}
FILES = {
    "b.jsonl": b'{"text": "b"}\n',
    "a[1].jsonl": b'{"text": "a[1]"}\n',
    "a1.jsonl": b'{"text": "a1"}\n',
    "d/10.jsonl": b'{"text": "d/10"}\n',
    "d/2.jsonl": b'{"text": "d/2"}\n',
    "d/.hidden.jsonl": b'{"text": "hidden"}\n',
    "d/e/f.jsonl": b'{"text": "d/e/f"}\n',
    "d/.g/h.jsonl": b'{"text": "hidden"}\n',
    "de/i.jsonl": b'{"text": "de/i"}\n',
}

Found = list[tuple[str | None, str]]
"""The name of each input in a manifest, and where it is read."""


class Place(Protocol):
    """A corpus somewhere, with the items that name parts of it."""

    base: str

    def expand(self, *items: str) -> Found | str:
        """The files of the items, or the sentence that refuses them."""

    def read(self, path: str) -> bytes: ...


class Here:
    """A corpus that this process lists: on the disk, or in a bucket."""

    def __init__(self, base: str) -> None:
        self.base = base

    def expand(self, *items: str) -> Found | str:
        try:
            return [(file.name, file.path) for file in expand_inputs(items)]
        except TokenmillError as error:
            return str(error)

    def read(self, path: str) -> bytes:
        with (RemotePath(path) if "://" in path else Path(path)).open("rb") as file:
            return file.read()


class OnHub:
    """A corpus in a repository of the loopback Hub."""

    def __init__(self, base: str, client: Client) -> None:
        self.base = base
        self._client = client

    def expand(self, *items: str) -> Found | str:
        (answer,) = self._client.find(list(items))
        return answer.get("error") or [(name, path) for name, path, *_ in answer["files"]]

    def read(self, path: str) -> bytes:
        return Path(path).read_bytes()


@pytest.fixture(scope="module")
def hub_client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with serving() as hub, warm_process() as process:
        hub.add("me/corpus", FILES)
        yield Client(hub, tmp_path_factory.mktemp("hub"), process)


def write(folder: Path, files: Mapping[str, bytes]) -> Path:
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    return folder


@pytest.fixture(params=BACKENDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """The same files, where one backend finds them."""
    if request.param == "local":
        return Here(str(write(tmp_path / "corpus", FILES)))
    if request.param == "hub":
        return OnHub("hf://datasets/me/corpus", request.getfixturevalue("hub_client"))
    url = f"{request.getfixturevalue('s3')}/corpus"
    bucket, prefix = split_url(url)
    for path, data in FILES.items():
        bucket.put(f"{prefix}/{path}", data)
    return Here(url)


def paths_of(place: Place, *items: str) -> list[str]:
    """The files that items mean, by the texts that are read from them."""
    found = place.expand(*(f"{place.base}/{item}" for item in items))
    assert not isinstance(found, str), found
    names = {data: path for path, data in FILES.items()}
    return [names[place.read(path)] for _, path in found]


def test_the_suite_knows_every_backend() -> None:
    assert {module for module, scheme in BACKENDS.items() if scheme} == set(SCHEMES.values())


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        (["b.jsonl"], ["b.jsonl"]),
        (["d"], ["d/10.jsonl", "d/2.jsonl", "d/e/f.jsonl"]),
        (["d/"], ["d/10.jsonl", "d/2.jsonl", "d/e/f.jsonl"]),
        (["d/*.jsonl"], ["d/10.jsonl", "d/2.jsonl"]),
        (["*/*.jsonl"], ["d/10.jsonl", "d/2.jsonl", "de/i.jsonl"]),
        (["**/?.jsonl"], ["b.jsonl", "d/2.jsonl", "d/e/f.jsonl", "de/i.jsonl"]),
        (["d/[!2]*.jsonl"], ["d/10.jsonl"]),
        (["a[1].jsonl"], ["a[1].jsonl"]),
        (["a[12].jsonl"], ["a1.jsonl"]),
        (["de/i.jsonl", "d/2.jsonl", "b.jsonl"], ["de/i.jsonl", "d/2.jsonl", "b.jsonl"]),
        (["d/2.jsonl", "d", "d/*"], ["d/2.jsonl", "d/10.jsonl", "d/e/f.jsonl"]),
    ],
    ids=" ".join,
)
def test_an_item_means_the_same_files_everywhere(place: Place, items: list[str], expected: list[str]) -> None:
    assert paths_of(place, *items) == expected


@pytest.mark.parametrize("item", ["missing.jsonl", "missing", "*.parquet", "d/x/*.jsonl"])
def test_an_item_without_files_is_refused_by_name_in_a_sentence(place: Place, item: str) -> None:
    refusal = place.expand(f"{place.base}/{item}")
    assert isinstance(refusal, str)
    assert item in refusal
    assert "\n" not in refusal


def test_a_file_that_is_named_twice_is_refused(place: Place) -> None:
    refusal = place.expand(*[f"{place.base}/b.jsonl"] * 2)
    assert isinstance(refusal, str)
    assert "is named twice" in refusal


def test_names_in_a_manifest_do_not_depend_on_the_machine(place: Place, tmp_path: Path) -> None:
    found = place.expand(f"{place.base}/d")
    assert not isinstance(found, str)
    for name, path in found:
        # A local file has no name of its own: it is named below the folder that all inputs have in common.
        assert name is None if path.startswith(str(tmp_path)) else name.endswith("/d" + path.rpartition("/d")[2])
        assert name is None or str(tmp_path.parent) not in name
