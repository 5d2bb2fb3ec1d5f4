"""The command line: every mistake is a sentence, results and progress go where they belong."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import typer

import tokenmill as tm
from tests.support.in_process import tokenmill_here
from tests.support.program import Program
from tests.support.running import command, jsonl, sentence, texts_of, tokenmill, wait_for
from tokenmill.cli import GROUPS, app, main
from tokenmill.display import Preparation, Silence, Snapshot
from tokenmill.pipeline.request import Request
from tokenmill.pipeline.signals import Interrupted, signals_as_exceptions
from tokenmill.tools.estimate import estimate_run

COMMANDS = (
    "tokenize",
    "estimate",
    "status",
    "inspect",
    "verify",
    "report",
    "trace",
    "export",
    "bench",
    "train-tokenizer",
    "demo",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with one input and several unusable files."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "a.jsonl").write_bytes(jsonl(["one", "two"]))
    (folder / "empty").mkdir()
    (folder / "list.yaml").write_text("- tokenizer\n")
    (folder / "broken.yaml").write_text("tokenizer: [bytes\n")
    (folder / "quiet.yaml").write_text("tokenizer: bytes\nquiet: 'false'\n")
    (folder / "bad.model").write_bytes(b"no model")
    (folder / "unknown.yaml").write_text("tokenizer: bytes\ntemperature: 3\n")
    (folder / "number.yaml").write_text("tokenizer: bytes\n3: 4\n")
    (folder / "type.yaml").write_text("tokenizer: bytes\nlimit: many\n")
    (folder / "latin.yaml").write_bytes(b"tokenizer: \xe9\xff\n")
    return folder


BASE = "a.jsonl -o out --tokenizer bytes"
MISTAKES = [
    (f"{BASE} --memmory 3GB", 2, "--memmory"),
    (f"{BASE} --limit many", 2, "--limit"),
    (f"{BASE} --limit 0", 2, "--limit 0: expected a whole number from 1 on"),
    (f"{BASE} --workers 0", 2, "--workers 0: expected a whole number from 1 on"),
    (f"{BASE} --workers two", 2, "--workers 'two' is neither a number nor auto"),
    (f"{BASE} --memory much", 2, "--memory 'much' is not a size; write it like 1GB"),
    (f"{BASE} --task-bytes -5", 2, "--task-bytes '-5' is not a size"),
    (f"{BASE} --task-bytes 0", 2, "--task-bytes 0 must be positive"),
    (f"{BASE} --max-document-bytes 99999999TB", 2, "--max-document-bytes 99999999TB"),
    (f"{BASE} --batch-size 0", 2, "--batch-size 0: expected a whole number from 1 on"),
    (f"{BASE} --max-errors -1", 2, "--max-errors -1: expected a whole number from 0 on"),
    (f"{BASE} --max-errors 3", 2, "--max-errors 3 counts what is skipped, and --on-error fail stops at the first"),
    (f"{BASE} --seed -1", 2, "--seed -1: expected a whole number from 0 on"),
    (f"{BASE} --engine gigatoken", 2, "--engine gigatoken cannot be used for bytes"),
    ("a.jsonl -o out --tokenizer bad.model", 1, "bad.model: is not a SentencePiece model"),
    (f"{BASE} --val-fraction 1", 2, "--val-fraction 1.0 must be at least 0 and below 1"),
    (f"{BASE} --val-fraction nan", 2, "--val-fraction nan"),
    (f"{BASE} --on-error maybe", 2, "--on-error: Invalid enum value 'maybe'; expected one of fail, skip"),
    (f"{BASE} --special-tokens maybe", 2, "expected one of as-text, parse, error"),
    (f"{BASE} --format xml", 2, "expected one of auto, jsonl, json, parquet, text"),
    (f"{BASE} --engine warp", 2, "--engine warp is not one of auto, gigatoken"),
    (f"{BASE} --separator x --whole-files", 2, "--separator and --whole-files exclude each other"),
    (f"{BASE} --whole-files", 1, "--whole-files is for plain text, and this is jsonl"),
    (f"{BASE} --eos-token <nope>", 2, "--eos-token '<nope>' is not a token of bytes"),
    (f"{BASE} --text-key a..b", 2, "'a..b' is not a field"),
    (f"{BASE} b.jsonl", 2, "input b.jsonl does not exist"),
    (f"{BASE} a.jsonl", 2, "input a.jsonl is named twice"),
    (f"{BASE} empty", 2, "directory empty holds no files"),
    (f"{BASE} x*.jsonl", 2, "no file matches x*.jsonl"),
    (f"{BASE} @lists.txt", 2, "list of inputs lists.txt cannot be read"),
    ("-o out --tokenizer bytes", 2, "INPUT is missing"),
    ("a.jsonl --tokenizer bytes", 2, "-o OUT is missing"),
    ("a.jsonl -o out", 2, "--tokenizer SPEC is missing"),
    ("a.jsonl -o out --tokenizer ./nowhere", 2, "--tokenizer ./nowhere: no such file or directory"),
    ("a.jsonl -o out --tokenizer empty", 2, "empty has no tokenizer.json"),
    ("a.jsonl -o out --tokenizer tiktoken:nope", 2, "tiktoken has no such encoding"),
    ("a.jsonl -o out --config none.yaml", 2, "--config none.yaml cannot be read"),
    ("a.jsonl -o out --config list.yaml", 2, "--config list.yaml must be a mapping"),
    ("a.jsonl -o out --config broken.yaml", 2, "--config broken.yaml is not valid YAML at line 2: expected"),
    ("a.jsonl -o out --config quiet.yaml", 2, "quiet: 'false' is neither true nor false"),
    ("a.jsonl -o out --config latin.yaml", 2, "--config latin.yaml is not valid YAML"),
    ("a.jsonl -o out --config unknown.yaml", 2, "--temperature is not a flag of tokenize"),
    ("a.jsonl -o out --config number.yaml", 2, "--3 is not a flag of tokenize"),
    ("a.jsonl -o out --config type.yaml", 2, "--limit"),
]


@pytest.mark.parametrize(("arguments", "code", "message"), MISTAKES, ids=[m[0].replace(" ", "_") for m in MISTAKES])
def test_a_mistake_is_a_sentence_and_exit_code_1_or_2(
    arguments: str,
    code: int,
    message: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("sys.argv", ["tokenmill", "tokenize", *arguments.split()])
    with pytest.raises(SystemExit) as caught:
        main()
    captured = capfd.readouterr()
    assert caught.value.code == code
    assert "Traceback" not in captured.err
    assert captured.out == ""
    assert message in " ".join(captured.err.replace("│", " ").split())
    assert not (folder / "out").exists()


def test_a_hub_name_without_a_network_says_what_to_do(folder: Path) -> None:
    arguments = ["tokenize", "a.jsonl", "-o", "out", "--tokenizer", "no-one/nothing"]
    done = tokenmill(*arguments, cwd=folder, env={"HF_HUB_OFFLINE": "1"})
    assert done.returncode == 2
    assert "--tokenizer no-one/nothing is not a local path" in sentence(done)
    assert "pass a directory with its tokenizer.json" in sentence(done)


def test_ctrl_c_ends_any_command_with_a_sentence(folder: Path) -> None:
    # A shell ignores the signal for processes in its background, and Python inherits that.
    program = "import os, signal\nfrom tokenmill.tools import status; from tokenmill import cli\n"
    program += "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    program += "status.read_status = lambda _: os.kill(os.getpid(), signal.SIGINT)\ncli.main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "status", str(folder)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 130 and "stopped" in done.stderr


def test_an_unknown_command_is_refused_and_none_shows_help() -> None:
    done = tokenmill("tokenise")
    assert done.returncode == 2
    assert "tokenise" in done.stderr
    assert "tokenize" in tokenmill().stdout


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_fits_80_columns_and_lists_every_flag(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 80)
    done = tokenmill_here(*([name] if name else []), "--help", env={"COLUMNS": "80"})
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    expected = COMMANDS if not name else ("--help",)
    if name == "tokenize":
        expected = tuple(
            "--text-key --keep-keys --workers --memory --limit --eos --no-eos --bos --eos-token --special-tokens "
            "--separator --whole-files --max-document-bytes --batch-size --val-fraction --seed --engine --on-error "
            "--max-errors --overwrite --task-bytes --log-json --config".split()
        )
    for word in expected:
        assert word in done.stdout, word


def test_commands_are_grouped_in_help_and_each_is_in_one_group() -> None:
    group = typer.main.get_command(app)
    panels: dict[str, list[str]] = {}
    for name, found in group.commands.items():  # type: ignore[attr-defined]
        panels.setdefault(found.rich_help_panel, []).append(name)
    assert list(panels) == list(GROUPS)
    assert {len(names) for names in panels.values()} <= {2, 5}
    shown = tokenmill_here("--help").stdout
    assert [shown.index(panel) for panel in panels] == sorted(shown.index(panel) for panel in panels)


def test_the_shell_completes_commands_and_flags() -> None:
    for words, number, expected in (
        ("tokenmill es", 1, ["estimate"]),
        ("tokenmill tokenize --val", 2, ["--val-fraction"]),
        ("tokenmill bench l", 2, ["loaders"]),
    ):
        env = {"_TOKENMILL_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(number)}
        program = "import sys; sys.argv = ['tokenmill']; from tokenmill.cli import main; main()"
        done = subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, **env}, capture_output=True, text=True, timeout=60
        )
        assert done.stdout.split() == expected, done.stderr


def test_the_first_screen_says_how_to_begin_documents_with_bos(tmp_path: Path, tiny_tokenizer: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl(["one", "two"]))
    done = tokenmill("tokenize", path, "-o", tmp_path / "out", "--tokenizer", tiny_tokenizer)
    assert "begin      no token; --bos puts <|begin|> before every document" in done.stderr
    assert "(7 B)" in done.stderr or "(6 B)" in done.stderr
    with_bos = tokenmill("tokenize", path, "-o", tmp_path / "bos", "--tokenizer", tiny_tokenizer, "--bos")
    assert "begin      <|begin|> 1\n" in with_bos.stderr


def all_commands(group: Any, *names: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, found in group.commands.items():
        if hasattr(found, "commands"):
            yield from all_commands(found, *names, name)
        else:
            yield (*names, name), found


@pytest.mark.parametrize(
    ("names", "found"), list(all_commands(typer.main.get_command(app))), ids=lambda part: str(part)
)
def test_help_texts_are_shown_as_they_are_written(
    names: tuple[str, ...], found: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["tokenmill", *names, "--help"])
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 400)
    with suppress(SystemExit):
        main()
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for parameter in found.params:
        help = getattr(parameter, "help", None) or ""
        assert " ".join(help.replace("\\[", "[").split()) in shown, parameter.name
        assert help.count("[") == help.count("\\["), f"{parameter.name}: Rich takes brackets for markup"


def test_results_go_to_stdout_and_progress_to_stderr_as_plain_lines(folder: Path, tmp_path: Path) -> None:
    done = tokenmill("tokenize", "a.jsonl", "-o", tmp_path / "out", "--tokenizer", "bytes", cwd=folder)
    assert done.returncode == 0
    assert "2 in = 2 out + 0 rejects" in done.stdout
    assert re.search(r"train +8 tokens in 2 documents", done.stdout)
    assert f"Next: tokenmill inspect {tmp_path / 'out'}" in done.stdout
    assert "\x1b" not in done.stdout + done.stderr
    assert "<eos>" in done.stderr
    assert "111 110 101 256" in done.stderr
    quiet = tokenmill("tokenize", "a.jsonl", "-o", tmp_path / "q", "--tokenizer", "bytes", "--quiet", cwd=folder)
    assert quiet.stderr == ""
    assert "2 in = 2 out" in quiet.stdout


def test_log_json_is_one_object_per_line(folder: Path, tmp_path: Path) -> None:
    done = tokenmill_here(
        "tokenize", "a.jsonl", "-o", tmp_path / "out", "--tokenizer", "bytes", "--log-json", cwd=folder
    )
    assert done.returncode == 0
    events = [json.loads(line) for line in done.stderr.splitlines()]
    assert {event["event"] for event in events} == {"message", "progress", "step"}
    progress = [event for event in events if event["event"] == "progress"]
    assert {"time", "fraction", "eta_seconds", "num_documents", "memory_bytes", "bottleneck"} <= progress[-1].keys()


def test_flags_may_come_from_a_file_and_the_command_line_wins(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one", "id": 1, "source": "here"}\n')
    (tmp_path / "run.yaml").write_text(
        f"inputs: {tmp_path / 'a.jsonl'}\nout: {tmp_path / 'from-file'}\ntokenizer: bytes\neos-token: 257\nbos: yes\n"
        "keep-keys: id, source\nseed: 5\ntask_bytes: 1kB\nworkers: 1\nlog-json: true\nlimit: null\n"
    )
    done = tokenmill_here("tokenize", "--config", tmp_path / "run.yaml", "-o", tmp_path / "out", "--seed", "7")
    assert done.returncode == 0, done.stderr
    assert all(json.loads(line) for line in done.stderr.splitlines())
    store = tm.open(tmp_path / "out")
    assert store.manifest.special_tokens.eos_id == 257
    assert store.manifest.special_tokens.bos_id == 257
    settings: dict[str, Any] = store.manifest.settings
    assert (settings["seed"], settings["task-bytes"], settings["keep-keys"]) == (7, 1000, ["id", "source"])
    assert not (tmp_path / "from-file").exists()


def test_a_file_of_flags_may_say_no_and_name_one_input(folder: Path, tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(f"input: a.jsonl\nout: {tmp_path / 'out'}\ntokenizer: bytes\nno-eos: true\nquiet: true\n")
    done = tokenmill_here("tokenize", "--config", config, cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert tm.open(tmp_path / "out").manifest.special_tokens.eos_id is None


def test_progress_ends_with_all_of_it(folder: Path, tmp_path: Path) -> None:
    arguments = ["tokenize", "a.jsonl", "--tokenizer", "bytes", "--limit", "1"]
    plain = tokenmill_here(*arguments, "-o", tmp_path / "plain", cwd=folder)
    assert plain.stderr.splitlines()[-1].startswith("100.0%  ETA 00:00")
    events = tokenmill_here(*arguments, "-o", tmp_path / "json", "--log-json", cwd=folder).stderr.splitlines()
    last = json.loads(events[-1])
    assert (last["event"], last["fraction"]) == ("progress", 1.0)


def test_warnings_have_the_level_of_warnings(folder: Path, tmp_path: Path) -> None:
    """A file that is named like text and holds JSON lines gives a warning."""
    (tmp_path / "a.txt").write_bytes((folder / "a.jsonl").read_bytes())
    arguments = ["tokenize", "a.txt", "-o", tmp_path / "out", "--tokenizer", "bytes"]
    done = tokenmill_here(*arguments, "--log-json", cwd=tmp_path)
    events = [json.loads(line) for line in done.stderr.splitlines()]
    levels = {event["level"]: event["text"] for event in events if event["event"] == "message"}
    assert set(levels) == {"info", "warning"}
    assert levels["warning"].startswith("a.txt: JSON lines by content")


def test_the_next_command_shows_a_document_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n")
    (tmp_path / "empty.txt").write_text("")
    arguments = ["--tokenizer", "bytes", "--val-fraction", "0.999999"]
    done = tokenmill_here("tokenize", "a.txt", "-o", "val", *arguments, cwd=tmp_path)
    assert "Next: tokenmill inspect val --document 0 --split val\n" in done.stdout
    done = tokenmill_here("tokenize", "empty.txt", "-o", "none", *arguments, cwd=tmp_path)
    assert "Next: tokenmill inspect none\n" in done.stdout


def test_verifying_a_directory_without_a_finished_store_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "unfinished" / ".tasks").mkdir(parents=True)
    for name, said in (("missing", "does not exist"), ("unfinished", "is an unfinished run")):
        done = tokenmill_here("verify", tmp_path / name)
        assert done.stdout == ""
        assert said in sentence(done)
        assert len(done.stderr.splitlines()) == 1


def test_train_tokenizer_reads_the_given_format_and_names_a_missing_field(folder: Path, tmp_path: Path) -> None:
    arguments = ["train-tokenizer", "a.jsonl", "-o", tmp_path / "t", "--vocab-size", "300"]
    done = tokenmill_here(*arguments, "--text-key", "body", cwd=folder)
    assert sentence(done) == "a.jsonl: no field 'body'; the record has 'text'. Pass --text-key text"
    assert "'xml' is not known" in sentence(tokenmill_here(*arguments, "--format", "xml", cwd=folder))
    assert tokenmill_here(*arguments, "--format", "text", cwd=folder).returncode == 0


def test_separators_may_be_written_with_escapes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\nlines\n\nthree")
    flags = ["tokenize", tmp_path / "a.txt", "--tokenizer", "bytes"]
    done = tokenmill_here(*flags, "-o", tmp_path / "out", "--separator", r"\n\n")
    assert done.returncode == 0, done.stderr
    assert texts_of(tm.open(tmp_path / "out")) == ["one", "two\nlines", "three"]


class Terminal:
    """A program in a terminal of its own, 80 columns wide."""

    def __init__(self, arguments: list[str]) -> None:
        self.output = b""
        self.pid, self._descriptor = pty.fork()
        if self.pid == 0:
            os.environ |= {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
            os.execv(arguments[0], arguments)

    def read(self) -> bytes:
        """The output so far."""
        while select.select([self._descriptor], [], [], 0)[0]:
            try:
                data = os.read(self._descriptor, 1 << 16)
            except OSError:
                break
            if not data:
                break
            self.output += data
        return self.output

    def press(self, keys: bytes) -> None:
        os.write(self._descriptor, keys)

    def wait(self) -> int:
        """Read to the end; returns the exit code."""
        deadline = time.monotonic() + 60
        while True:
            self.read()
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.read()
                os.close(self._descriptor)
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
            time.sleep(0.01)


def screen_of(output: str, width: int = 80) -> list[str]:
    """The lines that stay on the screen after a program has moved up and erased some."""
    rows: list[list[str]] = [[]]
    row = column = 0
    for match in re.finditer(r"\x1b\[([?0-9;]*)([A-Za-z])|(.)", output, re.DOTALL):
        argument, action, character = match.groups()
        if action == "A":
            row = max(0, row - int(argument or 1))
        elif action == "K":
            rows[row] = []
        elif character == "\r":
            column = 0
        elif character == "\n":
            row += 1
        elif character:
            row, column = (row + 1, 0) if column >= width else (row, column)
            rows += [[] for _ in range(row + 1 - len(rows))]
            rows[row] += " " * (column + 1 - len(rows[row]))
            rows[row][column] = character
            column += 1
        rows += [[] for _ in range(row + 1 - len(rows))]
    return ["".join(line).rstrip() for line in rows]


def test_a_terminal_shows_a_bar_that_gives_way_to_the_summary(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(["x" * 1000] * 2000))
    arguments = [
        "tokenize",
        tmp_path / "a.jsonl",
        "-o",
        tmp_path / "out",
        "--tokenizer",
        "bytes",
        "--task-bytes",
        "50kB",
    ]
    terminal = Terminal(command(*arguments))
    assert terminal.wait() == 0
    shown = terminal.output.decode()
    assert "━" in shown
    assert re.search(r"\d+\.\d% .*ETA .*B/s .*tok/s .*docs", shown)
    assert re.search(r"workers?, memory [\d.]+ [MG]B of", shown)
    assert "2,000 in = 2,000 out + 0 rejects" in shown
    assert shown.rindex("━") < shown.index("2,000 in")
    assert "\x1b[?25h" in shown[shown.rindex("━") :], "the cursor is shown again"


def test_ctrl_c_in_a_terminal_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(["x" * 100] * 9000))
    out = tmp_path / "out"
    terminal = Terminal(
        command("tokenize", tmp_path / "a.jsonl", "-o", out, "--tokenizer", "bytes", "--task-bytes", "1kB")
    )
    wait_for(lambda: "━" in terminal.read().decode("utf-8", "replace"))
    terminal.press(b"\x03\x03\x03")
    assert terminal.wait() == 130
    shown = terminal.output.decode()
    assert "stopped by SIGINT; run the same command again to continue" in shown
    assert "Traceback" not in shown
    assert not (out / ".lock").exists()
    assert not any("━" in line for line in screen_of(shown)), "a piece of the bar is left over"


@pytest.mark.parametrize("delay", [0.05, 0.25, 0.5])
def test_ctrl_c_while_a_run_starts_prints_no_traceback_of_its_processes(delay: float, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(["x"]))
    process = Program(
        command("tokenize", tmp_path / "a.jsonl", "-o", tmp_path / "out", "--tokenizer", "bytes"),
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    time.sleep(delay)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert "fork_server" not in errors
    if "error: " in errors:
        # Interrupted inside an `exec` of the standard library, Python ends by the signal itself; shells call both 130.
        assert process.returncode in (130, -signal.SIGINT)
        assert "Traceback" not in errors


def test_stdout_that_was_closed_is_no_traceback(folder: Path, tmp_path: Path) -> None:
    arguments = command("tokenize", "a.jsonl", "-o", tmp_path / "out", "--tokenizer", "bytes", "-q")
    process = Program(arguments, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read()
    process.wait(30)
    assert "Traceback" not in errors
    assert tm.open(tmp_path / "out").num_documents == 2


@pytest.mark.parametrize("closed", [(1,), (2,), (0, 1, 2)], ids=str)
def test_standard_streams_that_the_caller_closed_do_not_matter(
    folder: Path, tmp_path: Path, closed: tuple[int, ...]
) -> None:
    out = tmp_path / "out"
    for arguments in (
        ["tokenize", "a.jsonl", "-o", out, "--tokenizer", "bytes"],
        ["estimate", "a.jsonl", "--tokenizer", "bytes"],
        ["verify", out],
    ):
        done = tokenmill(*arguments, cwd=folder, preexec_fn=lambda: [os.close(number) for number in closed])
        assert done.returncode == 0, done
        assert "Traceback" not in done.stderr
        assert "Exception" not in done.stderr
    assert tm.open(out).num_documents == 2


def test_an_unfinished_store_is_told_apart_from_a_finished_one(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(["one"]) + b"broken\n")
    flags = ["tokenize", tmp_path / "a.jsonl", "-o", tmp_path / "out", "--tokenizer", "bytes"]
    done = tokenmill_here(*flags)
    assert done.returncode == 1
    assert sentence(done).startswith(f"{tmp_path / 'a.jsonl'} line 2: not JSON")
    for name in ("inspect", "verify"):
        assert "unfinished" in tokenmill_here(name, tmp_path / "out").stderr
    done = tokenmill_here(*flags, "--on-error", "skip")
    assert done.returncode == 0
    assert "2 in = 1 out + 1 reject" in done.stdout
    assert "malformed-json" in done.stdout


@pytest.mark.parametrize("package", ["typer", "psutil"])
def test_ctrl_c_during_an_import_is_one_line(package: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(["x"]))
    (tmp_path / f"{package}.py").write_text(
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException as error:\n"
        "    raise ImportError('what a package may make of it') from error\n"
    )
    done = subprocess.run(
        command("tokenize", "a.jsonl", "-o", "out", "--tokenizer", "bytes"),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (130, "error: stopped\n")


def test_ctrl_c_does_not_wait_for_a_disk_that_does_not_answer(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(["x"]))
    # An input whose reading never ends.
    program = (
        "import sys, time; import tokenmill.pipeline.inspection as inspection; "
        "inspection.open_input = lambda _: (print('reading', flush=True), time.sleep(600)); "
        "from tokenmill.__main__ import main; main()"
    )
    arguments = ["tokenize", "a.jsonl", "-o", "out", "--tokenizer", "bytes"]
    process = Program(
        [sys.executable, "-c", program, *arguments],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "reading\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors.splitlines()[-1] == "error: stopped by SIGINT"


def interrupt_clean_up() -> None:
    """Press Ctrl-C, which arrives twice, and press it again during the clean-up."""
    try:
        signal.raise_signal(signal.SIGINT)
    finally:
        signal.raise_signal(signal.SIGINT)
        time.sleep(1.1)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the clean-up goes on")


def test_a_later_signal_ends_a_clean_up_that_hangs() -> None:
    with pytest.raises(Interrupted), signals_as_exceptions():
        interrupt_clean_up()


def swallow_exceptions() -> None:
    try:
        signal.raise_signal(signal.SIGTERM)
    except Exception:
        pytest.fail("it was caught")


def test_except_exception_does_not_swallow_ctrl_c() -> None:
    with pytest.raises(KeyboardInterrupt, match="stopped by SIGTERM"), signals_as_exceptions():
        swallow_exceptions()
    assert not issubclass(Interrupted, Exception)


def test_a_terminal_that_is_closed_does_not_end_a_run_that_ignores_it() -> None:
    """`nohup` makes a program ignore SIGHUP."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals_as_exceptions():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_first_screen_says_that_each_line_of_text_is_a_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one line\nand another\n")
    for flags, is_said in (((), True), (("--whole-files",), False), (("--separator", "x"), False)):
        out = tmp_path / f"out{len(flags)}"
        done = tokenmill_here("tokenize", tmp_path / "a.txt", "-o", out, "--tokenizer", "bytes", "--overwrite", *flags)
        assert ("1 file of plain text, 21 B; each line is a document" in done.stderr) == is_said, done.stderr


def test_the_first_seconds_say_what_is_being_done(folder: Path, tmp_path: Path) -> None:
    done = tokenmill("tokenize", "a.jsonl", "-o", tmp_path / "out", "--tokenizer", "bytes", cwd=folder)
    said = [line for line in done.stderr.splitlines() if line.endswith(" ...")]
    assert said == [
        "loading the tokenizer ...",
        "looking at the inputs ...",
        "planning the tasks ...",
        "starting bytes ...",
    ]
    done = tokenmill("estimate", "a.jsonl", "--tokenizer", "bytes", cwd=folder)
    assert [line for line in done.stderr.splitlines() if line.endswith(" ...")] == [
        *said[:2],
        "encoding the sample ...",
    ]


def test_an_estimate_shows_how_much_it_has_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Seen(Silence):
        def __init__(self) -> None:
            self.shares: list[float] = []

        def update(self, snapshot: Snapshot | Preparation) -> None:
            if isinstance(snapshot, Preparation) and snapshot.total:
                self.shares.append(snapshot.fraction)

    monkeypatch.setattr("tokenmill.tools.estimate.survey.SHOW_SECONDS", 0.0)
    monkeypatch.chdir(folder)
    for most in (10**9, 100):
        monkeypatch.setattr("tokenmill.tools.estimate.survey.READ_ALL_BYTES", most)
        (folder / "many.jsonl").write_bytes(jsonl(["some text"] * 40_000))
        seen = Seen()
        flags = {"inputs": ["many.jsonl", "a.jsonl"], "out": ".", "tokenizer": "bytes"}
        estimate_run(Request.from_flags(flags), display=seen)
        assert seen.shares == sorted(seen.shares)
        assert len(seen.shares) > 1
        assert 0.5 < seen.shares[-1] <= 1
