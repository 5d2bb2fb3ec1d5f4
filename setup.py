"""The parts of the package that are compiled: everything else is in pyproject.toml.

`optional`: without a compiler the installation succeeds all the same. Then Python and numpy do what the modules do, but
the engine `wordcache` is not available.
"""

from setuptools import Extension, setup

MODULES = ("filling/compiled", "readers/_line_scanner", "engines/words", "engines/unigram")

setup(
    ext_modules=[
        Extension(
            f"tokenmill.{name.replace('/', '.')}",
            [f"src/tokenmill/{name}.c"],
            extra_compile_args=["-O3", "-std=c11"],
            optional=True,
        )
        for name in MODULES
    ]
)
