"""A virtual environment for each project that reads our exports, writes files for us or trains: dependencies clash."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / ".interop"
TORCH = "torch==2.13.0"

# Each list is one call of pip. litdata and mosaicml-streaming ask for torchvision, whose wheels on PyPI do not load with a
# CPU torch, and for the clients of every cloud; they are installed without their dependencies, plus what they import.
PACKAGES: dict[str, list[list[str]]] = {
    # The second list is for the programs in `tools/` of a checkout, which a benchmark runs.
    "megatron": [
        [TORCH, "numpy", "megatron-core>=0.12"],
        ["transformers", "gigatoken>=0.10,<0.11", "einops", "nltk", "pybind11", "tqdm", "triton"],
    ],
    "datatrove": [[TORCH, "datatrove[processing,io]>=0.4", "tokenizers", "numpy"]],
    # The release candidate, and what tokenmill and its tests import; tokenmill is found by its path.
    "tokenizers1": [
        ["tokenizers==1.0.0rc3", "gigatoken>=0.10,<0.11", "sentencepiece>=0.2", "tiktoken>=0.8", "typer>=0.15,<0.29"],
        "isal jinja2 msgspec numpy psutil pyarrow pyyaml rich xxhash zstandard pytest pytest-timeout hypothesis".split(),
    ],
    # Of benchmarks/engines.py.
    "peer_engines": [["splintr-rs==0.22.0", "tokie==0.1.4", "kitoken==0.11.1"]],
    "transformers": [["transformers>=4.56", "jinja2"]],
    "trl_templates": [["transformers>=5", "jinja2"], ["--no-deps", "trl==1.16.0"]],
    # What tokenmill imports to load a store; its code is found by its path.
    "trl": [
        [TORCH, "trl==1.16.0", "transformers>=5.15", "datasets", "jinja2"],
        ["msgspec", "numpy", "psutil", "pyarrow", "xxhash"],
    ],
    "dolma": [
        ["--no-deps", "dolma==1.2.1"],
        "numpy smart_open msgspec necessary omegaconf tokenizers typing_extensions fsspec pyyaml requests rich tqdm nltk "
        "platformdirs fasttext uniseg zstandard anyascii".split(),
    ],
    "olmo": [[TORCH, "ai2-olmo-core>=2.0"]],
    "mds": [
        [
            TORCH,
            "numpy<2.2",
            "transformers<5",
            "brotli",
            "python-snappy",
            "zstd",
            "catalogue",
            "xxhash",
            "pillow",
            "tqdm",
            "requests",
        ],
        ["--no-deps", "mosaicml-streaming>=0.11"],
    ],
    "litdata": [
        [TORCH, "numpy", "tokenizers<1", "lightning-utilities", "filelock", "requests", "boto3", "obstore", "tifffile"],
        ["--no-deps", "litdata>=0.2.40"],
    ],
}
# Trainers, each in an environment that finds what it lacks, torch above all, in the environment of the tests.
TRAINERS: dict[str, list[list[str]]] = {
    "torchtitan": [[TORCH, "torchtitan==0.3.0", "triton"]],
    "torchdata": [[TORCH, "torchdata==0.11.0", "expecttest", "parameterized"]],
    "hf": [[TORCH, "trl==1.16.0", "transformers==5.23.0"]],
    "megatron": [[TORCH, "megatron-core==0.16.1"]],
    "olmo": [[TORCH, "ai2-olmo-core==3.0.0"]],
    "litgpt": [
        [TORCH, "litgpt==0.5.13", "boto3", "tifffile"],
        ["--no-deps", "litdata==0.2.76"],
    ],
    "plain": [[TORCH]],
    "nanochat": [[TORCH, "rustbpe", "tiktoken", "wandb", "kernels"]],
}
# Two names that streaming imports for data sets of images, and never uses for tokens.
TORCHVISION = {
    "__init__.py": "",
    "datasets.py": "class VisionDataset:\n    pass\n",
    "transforms/__init__.py": "",
    "transforms/functional.py": "to_tensor = None\n",
}


def environment(name: str) -> Path:
    """The interpreter of an environment, which is built if it is missing."""
    python = HOME / name / "bin" / "python"
    ready, wanted = HOME / name / "ready", repr(PACKAGES[name])
    if not ready.exists() or ready.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", str(HOME / name)], check=True)
        for packages in [["--upgrade", "pip"], *PACKAGES[name]]:
            subprocess.run([str(python), "-m", "pip", "install", "--quiet", *packages], check=True)
        if name == "mds":
            _put_torchvision(python)
        ready.write_text(wanted)
    return python


def trainer_environment(name: str) -> Path:
    """The interpreter of a trainer's environment, which is built if it is missing."""
    folder, wanted = HOME / f"trainer-{name}", repr(TRAINERS[name])
    python, ready = folder / "bin" / "python", folder / "ready"
    if not ready.exists() or ready.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        (own,) = folder.glob("lib/python*/site-packages")
        # Packages installed here come first, so one that needs another version gets it.
        # TensorFlow is hidden: some import it if it is there, which takes 20 seconds.
        hidden = "import sys; sys.modules['tensorflow'] = sys.modules['keras'] = None"
        (own / "shared.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n{ROOT / 'src'}\n{hidden}\n")
        for packages in TRAINERS[name]:
            subprocess.run([str(python), "-m", "pip", "install", "-qq", *packages], check=True)
        ready.write_text(wanted)
    return python


def checkout(repository: str, *paths: str) -> Path | None:
    """A folder with the newest commit of a repository of GitHub, if this machine has a copy of it; else None.

    `TOKENMILL_CHECKOUTS` names a folder of copies, `OWNER+NAME` each; otherwise it is `.mirror` beside the tree.
    """
    folders = [Path(found)] if (found := os.environ.get("TOKENMILL_CHECKOUTS")) else []
    folders += [parent / ".mirror" for parent in ROOT.parents[:2]]
    for folder in folders:
        for source in (folder / repository, folder / repository / "repo"):
            if (source / "objects").is_dir() or (source / ".git").exists():
                return _unpack(source, repository, paths)
    return None


def _unpack(source: Path, repository: str, paths: tuple[str, ...]) -> Path:
    git = ["git", "-c", "safe.directory=*", "-C", str(source)]
    commit = subprocess.run([*git, "rev-parse", "--short=9", "HEAD"], check=True, capture_output=True, text=True)
    place = HOME / "checkouts" / f"{repository}@{commit.stdout.strip()}"
    for path in paths:
        if not (place / path).exists():
            place.mkdir(parents=True, exist_ok=True)
            packed = subprocess.run([*git, "archive", "HEAD", path], check=True, capture_output=True)
            subprocess.run(["tar", "x", "-C", str(place)], input=packed.stdout, check=True)
    return place


def _put_torchvision(python: Path) -> None:
    where = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    folder = Path(subprocess.run([str(python), "-c", where], check=True, capture_output=True, text=True).stdout.strip())
    for name, text in TORCHVISION.items():
        path = folder / "torchvision" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
