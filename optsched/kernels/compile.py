"""How kernels are compiled: at their first call, kept on disk by content, without holding the GIL.

An `entry` is what Python calls: it is compiled, or loaded from disk, when it is called first. A
`helper` is for other kernels only: it has no wrapper, and Python that calls it runs its source.
Half of the time of compiling went into wrappers, optimization and machine code of helpers, which
their callers do again.
"""

from __future__ import annotations

import hashlib
import logging
import operator
import os
import pickle
import sys
import time
from contextlib import suppress
from enum import EnumType
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import numba
import numpy as np
from numba import extending, types
from numba.core import (
    caching,
    codegen,
    compiler,
    compiler_machinery,
    registry,
    serialize,
    sigutils,
    typed_passes,
    untyped_passes,
)
from numba.core.compiler_lock import global_compiler_lock
from numba.core.typing.templates import AbstractTemplate, builtin_registry, infer_global

from optsched.errors import InputError
from optsched.io.files import write_atomic
from optsched.kernels.plain_python import is_in_python

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

F = TypeVar("F", bound="Callable[..., Any]")

Dispatcher: Any = registry.CPUDispatcher
Library: Any = codegen.JITCodeLibrary
Compiler: Any = compiler.Compiler
Intrinsic: Any = extending.__dict__["_Intrinsic"]
normalize_signature: Any = sigutils.normalize_signature

INT = types.int64
BOOL = types.boolean
INTS = types.Array(types.int64, 1, "C")
READ = types.Array(types.int64, 1, "C", readonly=True)
"""Input arrays: writable ones are accepted too."""


def record(names: str) -> np.dtype[np.void]:
    """A record of integers with these names, for arrays of structures."""
    return np.dtype([(name, np.int64) for name in names.split()])


def records(dtype: np.dtype[np.void], readonly: bool = False) -> Any:
    """The type of an array of records; one that is only read may be writable."""
    return types.Array(numba.from_dtype(dtype), 1, "C", readonly=readonly)


class _OfIntegers(AbstractTemplate):
    """Types of an operator on int64, or of a condition: numba would try dozens of templates.

    Code of others is typed by it too, as before: it declines what it does not list.
    """

    metadata = {"target": "cpu"}  # noqa: RUF012 (these are tried first)
    signatures: ClassVar[dict[Any, Any]]

    def generic(self, given: Any, _keywords: Any) -> Any:
        return self.signatures.get(tuple(map(types.unliteral, given)))

    def apply(self, given: Any, keywords: Any) -> Any:
        return self.generic(given, keywords)  # numba's takes optional values for integers


_INTO_BOOL = {(INT, INT): BOOL(INT, INT)}
_INTO_INT = {(INT, INT): INT(INT, INT)}
_SIGNATURES: dict[str, Any] = {"bool": {(INT,): BOOL(INT), (BOOL,): BOOL(BOOL)}}
_SIGNATURES |= dict.fromkeys(("lt", "le", "gt", "ge", "eq", "ne"), _INTO_BOOL)
_SIGNATURES |= dict.fromkeys(("add", "sub", "mul", "floordiv", "iadd", "isub", "and_"), _INTO_INT)
for _name, _known in _SIGNATURES.items():
    infer_global(getattr(operator, _name, bool))(
        type(_name, (_OfIntegers,), {"signatures": _known})
    )


def entry(*signature: Any, counted: bool = True) -> Callable[[F], F]:
    """A function that Python calls, compiled for one signature (result first) at its first call.

    ``counted=False`` leaves out all reference counting (a third of the time of kernels with many
    inlined callees); such a kernel makes no arrays, and indexes no slices.
    """
    return _maker(Entry, signature, counted, no_cfunc_wrapper=True)


def helper(*signature: Any, counted: bool = True, inline: bool = False) -> Callable[[F], F]:
    """Mark a function that only kernels call; Python that calls it runs its source.

    Parameters
    ----------
    signature
        As of `entry`; without one it is compiled for the types of every caller.
    counted
        As of `entry`.
    inline
        One copy inside each caller, whatever LLVM thinks of it.

    Examples
    --------
    >>> @optsched.cluster.helper()
    ... def least(a, b):
    ...     return a if a < b else b
    >>> least(3, 2)
    2
    """
    return _maker(
        Helper, signature, counted, no_cfunc_wrapper=True, no_cpython_wrapper=True,
        **({"forceinline": True} if inline else {}),
    )  # fmt: skip


def _maker(
    kind: type[Kernel], signature: tuple[Any, ...], counted: bool, **options: bool
) -> Callable[[F], F]:
    options |= {"nopython": True, "nogil": True}
    if not counted:
        options["_nrt"] = False

    def make(function: F) -> F:
        made = kind(function, targetoptions=options)
        made.declared = signature[0](*signature[1:]) if signature else None
        return cast("F", made)

    return make


class Kernel(Dispatcher):  # type: ignore[misc]
    """A function of one declared signature, or of the types it is called with."""

    declared: Any = None

    def prepare(self) -> None:
        """Load or compile what is declared; nothing if that is done."""
        if self.declared is not None and self._can_compile:
            with global_compiler_lock:
                if self._can_compile:
                    self.compile(self.declared)
                    self.disable_compile()

    def get_call_template(self, args: Any, kws: Any) -> Any:
        """Prepare this kernel when another kernel that calls it is typed."""
        self.prepare()
        # a number written in the caller is a type of its own: one compilation for every constant
        return super().get_call_template(tuple(map(types.unliteral, args)), kws)


class Entry(Kernel):
    """Compiled for its declared signature at the first call, and kept on disk."""

    seconds_compiling: ClassVar[float] = 0.0
    """Seconds that calls in this process have waited for machine code."""

    def __init__(self, function: Any, **options: Any) -> None:
        super().__init__(function, **options)
        self._cache = _Store(self)

    @property
    def label(self) -> str:
        """``module:name``, by which another process finds it."""
        return f"{self.__module__}:{self.__name__}"

    @property
    def ready(self) -> bool:
        """Whether a call need not compile: it is compiled, or is taken from disk now."""
        if self._can_compile and self.stored:
            self.prepare()
        return not self._can_compile

    @property
    def stored(self) -> bool:
        """Whether its machine code is on disk."""
        return self._cache.find() is not None

    def _compile_for_args(self, *args: Any, **kws: Any) -> Any:
        """Compile at the first call, with a log message; numba calls this without machine code."""
        if not self.ready:
            if is_in_python():
                return self.py_func
            begun = time.perf_counter()
            known = getattr(sys.modules.get(self.__module__), self.__name__, None) is self
            hint = "; `optsched warmup` compiles all" * known  # not the loops of rules
            _log(f"compiling {self.label}, once on this machine{hint}")
            self.prepare()
            Entry.seconds_compiling += time.perf_counter() - begun
        return self  # numba calls it again, and checks the types of the arguments now


class Helper(Kernel):
    """Typed and lowered once, optimized and turned into machine code in its callers alone."""

    def __init__(self, function: Any, **options: Any) -> None:
        super().__init__(function, pipeline_class=_HelperCompiler, **options)
        self._compiler._customize_flags = _without_machine_code

    def __call__(self, *args: Any) -> Any:
        """Run the source: compiled, it has no door for Python."""
        return self.py_func(*args)

    def compile(self, sig: Any) -> None:
        """Type and lower it, for callers to link."""
        with global_compiler_lock, self._compiling_counter:
            arguments, result = normalize_signature(sig)
            if tuple(arguments) not in self.overloads:
                made = self._compiler.compile(arguments, result)
                self.targetctx.insert_user_function(made.library, made.fndesc, [made.library])
                self.overloads[tuple(arguments)] = made

    def get_overload(self, sig: Any) -> Any:
        """Under which key `compile` has inserted it."""
        return self.overloads[tuple(normalize_signature(sig)[0])].library


class _Linked(Library):  # type: ignore[misc]
    """A module of which the callers' modules take a copy."""

    def finalize(self) -> None:
        self._raise_if_finalized()
        for library in dict.fromkeys(self._linking_libraries):
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        self._finalized = True


class _HelperCompiler(Compiler):  # type: ignore[misc]
    def __init__(self, typing: Any, target: Any, _library: Any, *rest: Any) -> None:
        super().__init__(typing, target, _Linked(target.codegen(), "helper"), *rest)

    def define_pipelines(self) -> list[Any]:
        """Without reference counting no pass is needed that rewrites closures or arrays."""
        if self.state.flags.nrt:
            return cast("list[Any]", super().define_pipelines())
        passes: Any = compiler_machinery.PassManager("helper")
        for one in (
            untyped_passes.TranslateByteCode, untyped_passes.FixupArgs,
            untyped_passes.IRProcessing, untyped_passes.GenericRewrites,
            untyped_passes.ReconstructSSA, typed_passes.NopythonTypeInference,
            typed_passes.PreLowerStripPhis, typed_passes.IRLegalization,
            typed_passes.NativeLowering, typed_passes.NoPythonBackend,
        ):  # fmt: skip
            passes.add_pass(one, one._name)
        passes.finalize()
        return [passes]


def _without_machine_code(flags: Any) -> Any:
    flags.no_compile = True
    return flags


class _Store(caching.NullCache):
    """An entry on disk, under a name that says what it is made of; the time of files is nothing."""

    def __init__(self, owner: Entry) -> None:
        self._owner = owner

    @cached_property
    def name(self) -> str:
        """Name of the file: what it is called, for which machine, made of what."""
        return f"{self.prefix}.{content_of(self._owner)}.nbc"

    @property
    def prefix(self) -> str:
        """What files of earlier contents begin with."""
        return f"{self._owner.__module__}.{self._owner.__qualname__}.{_machine()}"

    def find(self) -> Path | None:
        """Its file, if there is one."""
        paths = (folder / self.name for folder in folders())
        return next((path for path in paths if path.is_file()), None)

    def load_overload(self, _signature: Any, target: Any) -> Any:
        path = self.find()
        if path is None:
            return None
        target.refresh()
        try:
            return compiler.CompileResult._rebuild(target, *pickle.loads(path.read_bytes()))
        except Exception:
            _log(f"{path} is damaged: the kernel is compiled again, for seconds")
            with suppress(OSError):
                path.unlink()
            return None

    def save_overload(self, _signature: Any, made: Any) -> None:
        target = folder()
        if target is None:
            return
        try:
            write_atomic(target / self.name, serialize.dumps(made._reduce()))
        except InputError as error:  # a full disk: the kernel itself is there
            _log(f"a compiled kernel could not be kept: {error}")
            return
        for old in target.glob(f"{self.prefix}.*.nbc"):
            if old.name != self.name:
                old.unlink(missing_ok=True)


@cache
def folders() -> tuple[Path, ...]:
    """Where compiled entries lie: $NUMBA_CACHE_DIR, or else in the package or in the user's cache.

    All are read; the first that can be written is.
    """
    if given := os.environ.get("NUMBA_CACHE_DIR"):
        return (Path(given),)
    cache_home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return (Path(__file__).parent / "__pycache__", Path(cache_home).expanduser() / "optsched")


@cache
def folder() -> Path | None:
    """The first of `folders` that can be written; none is said once."""
    for path in folders():
        with suppress(OSError):
            path.mkdir(parents=True, exist_ok=True)
            if os.access(path, os.W_OK):
                return path
    _log(
        f"no folder for compiled kernels can be written ({', '.join(map(str, folders()))}): what "
        "is missing there is compiled in every process (set NUMBA_CACHE_DIR)"
    )
    return None


def _log(what: str) -> None:
    logging.getLogger("optsched").warning(what)


@cache
def _machine() -> str:
    """X.Y of Python and NumPy, numba and the processor: what machine code depends on."""
    processor = registry.cpu_target.target_context.codegen().magic_tuple()
    numpy = np.__version__.split(".")[:2]
    known = (sys.version_info[:2], numpy, numba.__version__, processor)
    return hashlib.sha256(repr(known).encode()).hexdigest()[:8]


def content_of(kernel: Kernel) -> str:
    """Hash of the code of a kernel and of all that it calls: kernels, overloads, intrinsics."""
    made_of = hashlib.sha256()
    for part in _parts(kernel, (), set()):
        made_of.update(part.encode() + b"\0")
    return made_of.hexdigest()[:16]


def _parts(value: Any, names: Iterable[str], seen: set[Any]) -> Iterator[str]:
    """What a value that code with these names uses is made of; comments and docstrings are not."""
    if isinstance(value, ModuleType):  # what is named of it: `layout.WIDTH`
        for found in (getattr(value, name, None) for name in names):
            if not isinstance(found, ModuleType | FunctionType):
                yield from _parts(found, (), seen)
    elif isinstance(value, Dispatcher | FunctionType | Intrinsic):
        if value in seen:
            return
        seen.add(value)
        if isinstance(value, Dispatcher):  # a kernel, or compiled by `numba.njit`
            yield f"{getattr(value, 'declared', None)} {sorted(value.targetoptions.items())}"
        function: Any = getattr(value, "py_func", getattr(value, "_defn", value))
        cells = (cell.cell_contents for cell in function.__closure__ or ())
        known = function.__globals__ | dict(zip(function.__code__.co_freevars, cells, strict=True))
        yield from _code_parts(function.__code__, function.__doc__, known, seen)
        yield from _parts(function.__defaults__, (), seen)
        kinds = (kind for named, kind in builtin_registry.globals if named is value)
        for template in (template for kind in kinds for template in kind.templates):
            yield from _parts(getattr(template, "_overload_func", None), (), seen)
    elif isinstance(value, tuple):
        yield from (part for one in value for part in _parts(one, names, seen))
    elif isinstance(value, np.ndarray):
        yield f"{value.dtype} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}"
    elif isinstance(value, int | float | str | np.generic | np.dtype | types.Type | EnumType):
        yield repr(list(value) if isinstance(value, EnumType) else value)


def _code_parts(
    code: CodeType, doc: str | None, known: dict[str, Any], seen: set[Any]
) -> Iterator[str]:
    yield f"{code.co_code!r} {code.co_varnames} {code.co_names}"
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _code_parts(value, None, known, seen)
        elif value is not doc:
            yield repr(value)
    for name in code.co_names + code.co_freevars:
        yield from _parts(known.get(name), code.co_names, seen)


def entries(module: str) -> list[Entry]:
    """The entries that a module has or takes from others; of ``module:a,b`` only those named."""
    name, _, chosen = module.partition(":")
    found = vars(import_module(name))
    if chosen:
        return [found[one] for one in chosen.split(",")]
    return list(dict.fromkeys(x for x in found.values() if isinstance(x, Entry)))


@helper(counted=False)
def copy(to, source):  # type: ignore[no-untyped-def]
    """``to[:] = source``, for which numba compiles the texts of error messages."""
    for k in range(len(source)):
        to[k] = source[k]
