"""The extensions, and how they are built; all else is in pyproject.toml."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import Distribution, Extension, setup
from setuptools.command.build_ext import build_ext

NATIVE = Path("ferro_dist/_native")
NATIVE_PREFIX = "ferro_dist._native."
ENGINE = Path("csrc/ferro")
NCCL = Path("csrc/nccl")
ABI = Path("csrc/abi")
EMULATION = Path("csrc/emulation")
EMULATED = Path("ferro_dist/_emulation")

# csrc/nccl, next to the extensions that call it. It is a library, since several of them must share
# its threads and locks.
COMMUNICATORS = "libferro_nccl.so"
CALL_COMMUNICATORS = ("nccl", "nccl_connection", "nccl_group", "nccl_memory", "nccl_resource")

# The supported CUDA runtimes: for each, cudart.pyx is compiled and linked once.
CUDART_VERSIONS = (12, 13)

# Where the wheels put their libraries, seen from ferro_dist/_native in the same
# site-packages. RUNPATH and not RPATH, so that LD_LIBRARY_PATH comes first.
SITE_PACKAGES = "$ORIGIN/../.."
RUNPATHS = {
    "libnccl.so.2": f"{SITE_PACKAGES}/nvidia/nccl/lib",
    "libcudart.so.12": f"{SITE_PACKAGES}/nvidia/cuda_runtime/lib",
    "libcudart.so.13": f"{SITE_PACKAGES}/nvidia/cu13/lib",
}

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
    # Warnings about what Cython generates are of no use.
    "-Wno-unused-function",
    "-Wno-missing-field-initializers",
    "-Wno-cast-function-type",
]

# It calls its own functions directly, whatever else with the same names is loaded.
COMMUNICATOR_ARGS = [
    *(each for each in COMPILE_ARGS if each != "-fvisibility=hidden"),
    "-fno-semantic-interposition",
]

# Hidden: both emulated libraries are loaded into one process, visible to all, and contain parts
# with the same names.
EMULATION_ARGS = [
    "-std=c++17",
    "-O2",
    "-ffp-contract=off",
    "-fvisibility=hidden",
    "-pthread",
    "-Wall",
    "-Wextra",
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


# Ordinary Python, which Cython compiles unchanged: it stands between the user and every call, and
# costs a quarter less when compiled. A source tree without the compiled modules works alike, with
# one exception: unless a file forbids it, Cython takes annotations for declarations.
COMPILED_PYTHON = ("collective", "point_to_point")


def extensions() -> list[Extension]:
    """One for each .pyx, two for cudart.pyx. `host` holds the engine."""
    names = [path.stem for path in sorted(NATIVE.glob("*.pyx")) if path.stem != "cudart"]
    return [
        *(Extension(f"ferro_dist.{name}", [f"ferro_dist/{name}.py"]) for name in COMPILED_PYTHON),
        *(extension(name, NATIVE / f"{name}.pyx") for name in names),
        *(extension(f"cudart{version}", NATIVE / "cudart.pyx") for version in CUDART_VERSIONS),
    ]


def extension(name: str, source: Path) -> Extension:
    headers = [
        str(path)
        for folder in (ENGINE, NCCL, ABI, NATIVE)
        for pattern in ("*.h", "*.hpp", "*.inc")
        for path in sorted(folder.glob(pattern))
    ]
    return Extension(
        f"{NATIVE_PREFIX}{name}",
        [str(source)],
        include_dirs=["csrc", str(NATIVE)],
        depends=[*headers, *sources_in(ENGINE)] if name == "host" else headers,
        extra_compile_args=COMPILE_ARGS,
        extra_link_args=["-pthread", *run_path_args(soname_of(name))],
        language="c++",
    )


def soname_of(extension_name: str) -> str | None:
    """Return the library that an extension is linked against, None if it is none."""
    if extension_name in CALL_COMMUNICATORS:
        return COMMUNICATORS
    if extension_name == "nccl_library":
        return "libnccl.so.2"
    version = extension_name.removeprefix("cudart")
    return f"libcudart.so.{version}" if version.isdigit() else None


def run_path_args(soname: str | None) -> list[str]:
    if soname is None:
        return []
    return [f"-Wl,--enable-new-dtags,-rpath,{RUNPATHS.get(soname, '$ORIGIN')}"]


def kernel_sources() -> list[str]:
    """Return the engine's reductions, which the emulated NCCL uses, too.

    Each is compiled for itself, those of an instruction set for processors that have it.
    """
    return [str(path) for path in [*sorted(ENGINE.glob("kernels*.cpp")), ENGINE / "wide_float.cpp"]]


def sources_in(folder: Path) -> list[str]:
    return [str(path) for path in sorted(folder.glob("*.cpp"))]


def version_script(soname: str) -> str | None:
    """Return the real library's version node: without it ld.so refuses to run the extension."""
    return f"{soname} {{ global: *; }};" if soname.startswith("libcudart") else None


def declared_functions(header: Path) -> list[str]:
    """Name the functions that a header of csrc/abi declares."""
    code = re.sub(r"//.*", "", header.read_text(encoding="utf-8"))
    return re.findall(
        r"^(?:__attribute__\(\(weak\)\) )?(?:ncclResult_t|cudaError_t|const char\*) (\w+)\(",
        code,
        re.MULTILINE,
    )


def compile_in_parallel(compiler: Any, jobs: int) -> None:
    """Make `compiler` work on several sources of one extension at once: most are in `host`."""
    compile_all = compiler.compile

    def compile_each(sources: list[str], *args: Any, **options: Any) -> list[str]:
        with ThreadPoolExecutor(jobs) as pool:
            objects = pool.map(lambda source: compile_all([source], *args, **options), sources)
            return [path for paths in objects for path in paths]

    compiler.compile = compile_each


def strip(compiler: Any, names: Sequence[str], unwanted: Callable[[str], bool]) -> None:
    """Drop words that Python was built with from the commands of `compiler`."""
    for name in names:
        command = getattr(compiler, name, None)
        if command is not None:
            setattr(compiler, name, [word for word in command if not unwanted(word)])


def strip_run_paths(compiler: Any) -> None:
    """Drop Python's run paths: they would come before those of the extensions."""
    strip(compiler, ("linker_so", "linker_so_cxx"), lambda word: word.startswith("-Wl,-rpath"))


def strip_debug_information(compiler: Any) -> None:
    """Drop Python's -g, which makes the package ten times as large. ``CXXFLAGS=-g`` asks for it."""
    wanted = f"{os.environ.get('CFLAGS', '')} {os.environ.get('CXXFLAGS', '')}"
    if "-g" not in wanted.split():
        strip(compiler, ("compiler_so", "compiler_so_cxx"), lambda word: word == "-g")


class BuildNative(build_ext):  # setuptools has no types
    """Translate with Cython into the build folder, then compile on several cores."""

    parallel: int | None
    extensions: list[Any]

    def finalize_options(self) -> None:
        super().finalize_options()
        if self.parallel is None:
            # Nearly twice as many compilers run while `host` is made, with up to 400 MB each.
            self.parallel = min(len(os.sched_getaffinity(0)), 4)

    def build_extensions(self) -> None:
        strip_run_paths(self.compiler)
        strip_debug_information(self.compiler)
        compile_in_parallel(self.compiler, self.parallel or 1)
        self.link_libraries()
        # Here and not in setup(): an sdist, which asks only for the sources, then lists the .pyx,
        # and metadata are read without the seconds that Cython takes.
        from Cython.Build import cythonize

        for each in self.extensions:
            each.sources = [self.source_of_its_own(each)]
            if each.name == f"{NATIVE_PREFIX}host":
                each.sources += [self.merged(ENGINE), *kernel_sources()]
        translated: list[Any] = cythonize(
            self.extensions,
            build_dir=str(Path(self.build_temp) / "cython"),
            compiler_directives=DIRECTIVES,
            include_path=["."],
        )
        for extension, generated in zip(self.extensions, translated, strict=True):
            extension.sources = generated.sources
        super().build_extensions()
        self.build_emulation()

    def source_of_its_own(self, extension: Any) -> str:
        """Return the .pyx of an extension; a copy if its name differs from the module's.

        Cython would write the C++ of both modules of cudart.pyx to one file.
        """
        source = Path(extension.sources[0])
        name = extension.name.rpartition(".")[2]
        if source.suffix != ".pyx" or source.stem == name:
            return str(source)
        copy = Path(self.build_temp) / "pyx" / f"{name}.pyx"
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, copy)
        return str(copy)

    def merged(self, folder: Path) -> str:
        """Write a source that includes all of a folder, but for reductions; return its path.

        Compiled as one they take a third of the time, most of which goes into headers that they
        share, and the optimizer sees through the calls between them.
        """
        parts = [path for path in sources_in(folder) if path not in kernel_sources()]
        merged = Path(self.build_temp) / "merged" / folder.with_suffix(".cpp")
        merged.parent.mkdir(parents=True, exist_ok=True)
        text = "".join(f'#include "{Path(part).resolve()}"\n' for part in parts)
        if not merged.exists() or merged.read_text(encoding="utf-8") != text:
            merged.write_text(text, encoding="utf-8")
        return str(merged)

    def link_libraries(self) -> None:
        """Give the extensions for CUDA the libraries that they are linked against."""
        libraries = {soname: self.link_stub(soname) for soname in RUNPATHS}
        libraries[COMMUNICATORS] = self.link_communicators(libraries["libnccl.so.2"])
        for extension in self.extensions:
            soname = soname_of(extension.name.rpartition(".")[2])
            if soname is not None:
                extension.extra_objects = [libraries[soname]]

    def link_stub(self, soname: str) -> str:
        """Make a stand-in for a CUDA library, which need not be installed.

        It has the real one's name and functions that do nothing; what is loaded at run
        time is the real one. So the package builds on a machine without CUDA, as
        mpi4py does without MPI.
        """
        folder = Path(self.build_temp) / "stubs"
        folder.mkdir(parents=True, exist_ok=True)
        header = ABI / f"{soname.removeprefix('lib').partition('.')[0]}.h"
        source = folder / f"{soname}.c"
        stubs = [f"int {name}(void) {{ return 0; }}" for name in declared_functions(header)]
        source.write_text("\n".join(stubs) + "\n", encoding="utf-8")
        objects = self.compiler.compile([str(source)], output_dir=self.build_temp)
        return self.link_library(soname, objects, folder)

    def link_communicators(self, nccl: str) -> str:
        folder = Path(self.build_lib) / NATIVE
        folder.mkdir(parents=True, exist_ok=True)
        objects = self.compiler.compile(
            [self.merged(NCCL)],
            output_dir=self.build_temp,
            include_dirs=["csrc"],
            extra_preargs=COMMUNICATOR_ARGS,
        )
        link_args = ["-Wl,-Bsymbolic", *run_path_args("libnccl.so.2")]
        return self.link_library(COMMUNICATORS, [*objects, nccl], folder, link_args)

    def build_emulation(self) -> None:
        """Build the emulated libraries next to the extensions."""
        package = Path(self.build_lib) / EMULATED
        package.mkdir(parents=True, exist_ok=True)
        runtime, communicators = self.compile_emulation("cudart", "nccl")
        objects = {"libcudart": [runtime], "libnccl": [communicators, *self.engine_kernels()]}
        for soname in RUNPATHS:
            self.link_library(soname, objects[soname.partition(".")[0]], package)

    def compile_emulation(self, *names: str) -> list[str]:
        objects: list[str] = self.compiler.compile(
            [self.merged(EMULATION / name) for name in names],
            output_dir=self.build_temp,
            include_dirs=["csrc"],
            extra_preargs=EMULATION_ARGS,
        )
        return objects

    def engine_kernels(self) -> list[str]:
        """Return the objects of the engine's kernels, which `host` was just built of."""
        objects: list[str] = self.compiler.object_filenames(
            kernel_sources(), output_dir=self.build_temp
        )
        return objects

    def link_library(
        self, soname: str, objects: list[str], folder: Path, link_args: Sequence[str] = ()
    ) -> str:
        """Link a shared library of that name in `folder`; return its path."""
        library = folder / soname
        link_args = [f"-Wl,-soname,{soname}", "-pthread", *link_args]
        script = version_script(soname)
        if script is not None:
            path = Path(self.build_temp) / f"{soname}.map"
            path.write_text(script + "\n", encoding="utf-8")
            link_args.append(f"-Wl,--version-script,{path}")
        self.compiler.link_shared_object(
            objects, str(library), extra_postargs=link_args, target_lang="c++"
        )
        return str(library)

    def run(self) -> None:
        super().run()
        # `python -m` puts the working directory before the installed packages. A user who installs
        # from a clone and stays in it would import a package without its compiled half; so the
        # clone gets a copy.
        if not self.inplace:
            self.copy_extensions_to_source()
        # In place, too: setuptools then builds elsewhere, and copies what it knows about.
        shutil.copy(Path(self.build_lib) / NATIVE / COMMUNICATORS, NATIVE)
        for library in (Path(self.build_lib) / EMULATED).glob("*.so.*"):
            shutil.copy(library, EMULATED)

    def copy_extensions_to_source(self) -> None:
        """Copy all but compiled Python modules: next to their sources these would hide edits."""
        self.extensions = [each for each in self.extensions if each.name.startswith(NATIVE_PREFIX)]
        super().copy_extensions_to_source()


class BuildsInTurn(Distribution):
    """What is built in one tree at a time shares the folder `build`, as under `tox -p`."""

    def run_commands(self) -> None:
        import fcntl  # which Windows lacks

        if "develop" in self.commands:
            super().run_commands()  # lets pip build, in a process that takes its own turn
            return
        Path("build").mkdir(exist_ok=True)
        with open("build/.lock", "w") as lock:
            # On a file system without locks, builds must not be started at the same time.
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
            super().run_commands()


if not sys.platform.startswith("linux"):
    raise SystemExit(
        "ferro_dist runs on Linux only: it needs memfd, futex and pidfd. "
        f"This is {sys.platform}; use a Linux machine, WSL 2 or a container."
    )

setup(ext_modules=extensions(), cmdclass={"build_ext": BuildNative}, distclass=BuildsInTurn)
