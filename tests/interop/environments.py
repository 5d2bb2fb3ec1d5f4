"""A virtual environment for each project that reads our exports or writes files for us: dependencies clash."""

from __future__ import annotations

import subprocess
import sys
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


def _put_torchvision(python: Path) -> None:
    where = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    folder = Path(subprocess.run([str(python), "-c", where], check=True, capture_output=True, text=True).stdout.strip())
    for name, text in TORCHVISION.items():
        path = folder / "torchvision" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
