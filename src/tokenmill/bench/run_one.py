"""A fresh process for one contender: `python -m tokenmill.bench.run_one MODULE:FUNCTION SETTINGS`.

Settings and the answer, the last line of stdout, are JSON. What the user can cause is an answer too.
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
