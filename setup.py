"""The extensions, and how they are built; all else is in pyproject.toml."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

NATIVE = Path("ferro_dist/_native")
ENGINE = Path("csrc/ferro")

COMPILE_ARGS = [
    "-std=c++17",
    "-O3",
    # A fused multiply-add rounds once where two operations round twice: ranks on
    # machines with and without it would get different bits.
    "-ffp-contract=off",
    "-fvisibility=hidden",
    "-pthread",
    "-Wall",
    "-Wextra",
    # What Cython generates is not ours to tidy.
    "-Wno-unused-function",
    "-Wno-missing-field-initializers",
    "-Wno-cast-function-type",
]

DIRECTIVES = {
    "language_level": 3,
    "boundscheck": False,
    "wraparound": False,
    "cdivision": True,
    "initializedcheck": False,
    "auto_pickle": False,
    "autotestdict": False,
    "embedsignature": False,
}


def extensions() -> list[Extension]:
    """One for each .pyx. `host` alone holds the engine; the others see its headers."""
    included = [*ENGINE.glob("*.hpp"), *ENGINE.glob("*.inc"), *NATIVE.glob("*.hpp")]
    headers = sorted(map(str, included))
    engine = sorted(str(path) for path in ENGINE.glob("*.cpp"))
    return [
        Extension(
            f"ferro_dist._native.{path.stem}",
            [str(path), *(engine if path.stem == "host" else [])],
            include_dirs=["csrc", str(NATIVE)],
            depends=headers,
            extra_compile_args=COMPILE_ARGS,
            extra_link_args=["-pthread"],
            language="c++",
        )
        for path in sorted(NATIVE.glob("*.pyx"))
    ]


def compile_in_parallel(compiler: Any, jobs: int) -> None:
    """Let `compiler` work on several sources of one extension at once: most are in `host`."""
    compile_all = compiler.compile

    def compile_each(sources: list[str], *args: Any, **options: Any) -> list[str]:
        with ThreadPoolExecutor(jobs) as pool:
            objects = pool.map(lambda source: compile_all([source], *args, **options), sources)
            return [path for paths in objects for path in paths]

    compiler.compile = compile_each


class BuildNative(build_ext):  # type: ignore[misc]  # setuptools has no types
    """Translate with Cython into the build folder, then compile on two cores."""

    parallel: int | None

    def finalize_options(self) -> None:
        super().finalize_options()
        if self.parallel is None:
            self.parallel = 2

    def build_extensions(self) -> None:
        # Here and not in setup(): an sdist, which asks only for the sources, then
        # lists the .pyx, and metadata are read without Cython's seconds.
        from Cython.Build import cythonize

        translated: list[Any] = cythonize(
            self.extensions,
            build_dir=str(Path(self.build_temp) / "cython"),
            compiler_directives=DIRECTIVES,
        )
        for extension, generated in zip(self.extensions, translated, strict=True):
            extension.sources = generated.sources
        compile_in_parallel(self.compiler, self.parallel or 1)
        super().build_extensions()

    def run(self) -> None:
        super().run()
        # `python -m` puts the working directory before the installed packages. Whoever
        # installs from a clone and stays in it would import a package without its
        # compiled half; so the clone gets a copy.
        if not self.inplace:
            self.copy_extensions_to_source()


if not sys.platform.startswith("linux"):
    raise SystemExit(
        "ferro_dist runs on Linux only: it needs memfd, futex and pidfd. "
        f"This is {sys.platform}; use a Linux machine, WSL 2 or a container."
    )

setup(ext_modules=extensions(), cmdclass={"build_ext": BuildNative})
