"""A process that a test starts, and that ends with the test at the latest."""

from __future__ import annotations

import subprocess
from typing import Any, AnyStr, ClassVar


class Program(subprocess.Popen[AnyStr]):
    """Like `Popen`. When the test ends, the process is killed and its pipes are closed, whatever the test did."""

    _started: ClassVar[list[subprocess.Popen[Any]]] = []

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._started.append(self)

    @classmethod
    def end_all(cls) -> None:
        """End every process that was started since the last call."""
        while cls._started:
            with cls._started.pop() as process:
                process.kill()
