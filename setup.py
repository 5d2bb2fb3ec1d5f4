"""The one part of the package that is compiled: everything else is in pyproject.toml.

`optional`: without a compiler the installation succeeds all the same, and numpy does what the module does.
"""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "tokenmill.filling.compiled",
            ["src/tokenmill/filling/compiled.c"],
            extra_compile_args=["-O3", "-std=c11"],
            optional=True,
        )
    ]
)
