"""The program of a contender's process: `python -m tokenmill.tools.bench.child MODULE:FUNCTION SETTINGS`.

Settings are JSON, and so is the answer, which is the last line of stdout. An error that a user can cause is an answer.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module

import msgspec

from tokenmill.errors import TokenmillError


def main() -> None:
    """Call the function and print what it returns."""
    target, settings = sys.argv[1:]
    module, function = target.split(":")
    try:
        answer = getattr(import_module(module), function)(**json.loads(settings))
    except TokenmillError as error:
        answer = {"failed": str(error)}
    except MemoryError:
        answer = {"failed": "ran out of memory"}
    sys.stdout.write(f"\n{msgspec.json.encode(answer).decode()}\n")


if __name__ == "__main__":
    main()
