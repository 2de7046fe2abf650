"""Functions, classes and modules of the caller's own: how they are taken apart and put together again.

What is installed (the standard library, site-packages, invivo, torch, vLLM) is there on the other side, too,
and travels by name. Anything else (scripts, notebooks, test modules, packages run from a working directory)
travels by value: a function as its code, the globals that it uses and its closure; a class as its dict; a
module as its contents.

Unlike cloudpickle, functions keep their file name, so that tracebacks through them are true, and the code
objects say which Python compiled them, because another one cannot run them.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import functools
import importlib
import itertools
import os
import site
import sys
import sysconfig
import uuid
import weakref
from pathlib import Path
from types import CellType, CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from ..envoy.errors import TransferError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

ENGINE_PACKAGES = frozenset({"invivo", "torch", "vllm"})
"""Top-level packages that every engine has, wherever their files are here."""

_MODULE_EXTRAS = frozenset({"__builtins__", "__cached__", "__loader__", "__spec__"})
_GLOBAL_OPS = frozenset({"LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})


@functools.cache
def installed_prefixes() -> tuple[str, ...]:
    """Folders of the standard library and of installed packages, each ending in a separator."""
    folders = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [*getattr(site, "getsitepackages", list)(), getattr(site, "getusersitepackages", str)()]
    known = [folder for folder in folders if folder]
    found = {*map(os.path.abspath, known), *map(os.path.realpath, known)}
    return tuple(sorted(path + os.sep for path in found))


def is_installed(module: ModuleType) -> bool:
    """Whether a module can be counted on to be there on the other side."""
    name = module.__name__
    if name in ("__main__", "__mp_main__"):
        return False
    if name.partition(".")[0] in ENGINE_PACKAGES or name in sys.builtin_module_names:
        return True
    file = getattr(module, "__file__", None)
    if file is None:
        if getattr(getattr(module, "__spec__", None), "origin", None) in ("built-in", "frozen"):
            return True
        paths = list(getattr(module, "__path__", ()))
        return bool(paths) and all(_below_installed(str(path) + os.sep) for path in paths)
    return _below_installed(str(file)) or _in_a_distribution(str(file), name)


@functools.lru_cache(maxsize=4096)
def _in_a_distribution(file: str, name: str) -> bool:
    """Whether a package lies beside its own metadata: installed to a folder of its own, as with ``pip --target``."""
    package = name.partition(".")[0]
    folders = Path(file).parents
    folder = folders[min(name.count(".") + Path(file).name.startswith("__init__."), len(folders) - 1)]
    return any(folder.glob(f"{package}-*.dist-info"))


@functools.lru_cache(maxsize=4096)
def _below_installed(path: str) -> bool:
    return os.path.abspath(path).startswith(installed_prefixes())


def by_name(value: Any) -> bool:
    """Whether a function or class is found under its name in an installed module."""
    module = sys.modules.get(value.__module__ or "")
    if module is None or not is_installed(module):
        return False
    found: Any = module
    for part in value.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is value


# Functions


def function_parts(function: FunctionType, namespaces: dict[int, dict[str, Any]]) -> tuple[Any, ...]:
    """What pickle needs to make `function` again.

    Args:
        function: the function.
        namespaces: by id of a `__globals__`, the dict that stands for it in this pickle: functions that share
            their globals share them afterwards, too.
    """
    code, scope = function.__code__, function.__globals__
    namespace = namespaces.get(id(scope))
    if namespace is None:
        names = ("__name__", "__package__", "__file__", "__path__")
        namespace = namespaces[id(scope)] = {name: scope[name] for name in names if name in scope}
    used = {name: scope[name] for name in global_names(code) if name in scope}
    cells = function.__closure__ or ()
    contents = tuple(_filled(cells))
    reached = itertools.chain(used.values(), (value for _, value in contents))
    modules = [value for value in reached if isinstance(value, ModuleType)]
    try:
        annotations = function.__annotations__
    except Exception:  # evaluated lazily by Python 3.14, where they may name what does not exist
        annotations = {}
    attributes = {
        "__qualname__": function.__qualname__,
        "__module__": function.__module__,
        "__doc__": function.__doc__,
        "__defaults__": function.__defaults__,
        "__kwdefaults__": function.__kwdefaults__,
        "__annotations__": annotations,
    }
    submodules = [found for module in modules for found in _submodules(module, code)]
    state = (used, contents, attributes, dict(vars(function)), submodules)
    return make_function, (code, namespace, function.__name__, len(cells)), state, None, None, fill_function


def make_function(code: CodeType, namespace: dict[str, Any], name: str, cells: int) -> FunctionType:
    """A function that still lacks its globals, closure and attributes."""
    namespace["__builtins__"] = builtins
    return FunctionType(code, namespace, name, None, tuple(CellType() for _ in range(cells)))


def fill_function(function: FunctionType, state: tuple[Any, ...]) -> None:
    """Gives a function what `make_function` left out."""
    used, contents, attributes, others, _ = state
    function.__globals__.update(used)
    for index, value in contents:
        assert function.__closure__ is not None
        function.__closure__[index].cell_contents = value
    for name, value in attributes.items():
        setattr(function, name, value)
    vars(function).update(others)


def _filled(cells: Iterable[CellType]) -> Iterator[tuple[int, object]]:
    """Index and contents of the cells of a closure; variables that are not assigned yet have none."""
    for index, cell in enumerate(cells):
        with contextlib.suppress(ValueError):
            yield index, cell.cell_contents


_names_of_code: weakref.WeakKeyDictionary[CodeType, tuple[str, ...]] = weakref.WeakKeyDictionary()


def global_names(code: CodeType) -> tuple[str, ...]:
    """Names of the globals that a code object, or code nested in it, reads or writes."""
    found = _names_of_code.get(code)
    if found is None:
        names = {i.argval: None for i in dis.get_instructions(code) if i.opname in _GLOBAL_OPS}
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                names.update(dict.fromkeys(global_names(constant)))
        found = _names_of_code[code] = tuple(names)
    return found


def _submodules(module: ModuleType, code: CodeType) -> Iterable[ModuleType]:
    """Submodules that code may reach as attributes of `module`, and that importing it may not load."""
    for name in code.co_names:
        found = sys.modules.get(f"{module.__name__}.{name}")
        if found is not None:
            yield found
            yield from _submodules(found, code)


def code_parts(code: CodeType) -> tuple[Any, ...]:
    """What pickle needs to make a code object again; file name and positions included."""
    return make_code, (
        *(sys.version_info[:2], code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount),
        *(
            code.co_nlocals,
            code.co_stacksize,
            code.co_flags,
            code.co_code,
            code.co_consts,
            code.co_names,
            code.co_varnames,
        ),
        *(code.co_filename, code.co_name, code.co_qualname, code.co_firstlineno, code.co_linetable),
        *(code.co_exceptiontable, code.co_freevars, code.co_cellvars),
    )


def make_code(version: tuple[int, int], *parts: Any) -> CodeType:
    """The code object of `code_parts`; raises `TransferError` if another Python version compiled it."""
    if version != sys.version_info[:2]:
        theirs, ours = (f"Python {major}.{minor}" for major, minor in (version, sys.version_info[:2]))
        raise TransferError(
            f"The function `{parts[12]}` ({parts[10]}:{parts[13]}) was compiled by {theirs}, but the engine runs "
            f"{ours}. Run the client with {ours}, or define the function in the block: the block itself travels as "
            "source."
        )
    return CodeType(*parts)


# Modules


def module_parts(module: ModuleType, refusal: Callable[[object], str | None]) -> tuple[Any, ...]:
    """What pickle needs to make a module of the caller's own again.

    A module holds more than a block uses of it. So installed modules that it imported are imported over there only when
    asked for, and what cannot be sent is an error only when asked for.

    Args:
        module: the module.
        refusal: why a value cannot be sent, or None.
    """
    present: dict[str, object] = {}
    imported: dict[str, str] = {}
    absent: dict[str, str] = {}
    for name, value in vars(module).items():
        if name in _MODULE_EXTRAS:
            continue
        if isinstance(value, ModuleType) and is_installed(value):
            imported[name] = value.__name__
        elif reason := refusal(value):
            absent[name] = reason
        else:
            present[name] = value
    return make_module, (module.__name__,), (present, imported, absent), None, None, fill_module


def make_module(name: str) -> ModuleType:
    """An empty module, which is not entered in `sys.modules`."""
    return ModuleType(name)


def fill_module(module: ModuleType, state: tuple[dict[str, object], dict[str, str], dict[str, str]]) -> None:
    """Gives a module its contents."""
    present, imported, absent = state
    other = present.get("__getattr__")

    def attribute(name: str) -> object:
        if name in imported:
            found = vars(module)[name] = import_module(imported[name])
            return found
        if name in absent:
            raise TransferError(f"`{module.__name__}.{name}` was not sent to the engine: {absent[name]}.")
        if callable(other):
            return other(name)
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

    vars(module).update(present, __builtins__=builtins, __getattr__=attribute)


def import_module(name: str) -> ModuleType:
    """An installed module, by name; some (``torch.ops.aten``) are found as attributes only."""
    try:
        return importlib.import_module(name)
    except ImportError:
        parent, _, last = name.rpartition(".")
        found = getattr(import_module(parent), last, None) if parent else None
        if not isinstance(found, ModuleType):
            raise
        return found


# Classes

_keys: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()
_classes: weakref.WeakValueDictionary[str, type] = weakref.WeakValueDictionary()


def class_parts(kind: type, parts: tuple[Any, ...]) -> tuple[Any, ...]:
    """What pickle needs to make a class again, unless it comes back to the process it is from.

    There the class itself is taken: a copy would not be the caller's type, and filling the class anew with
    copies would change it under the caller.

    Args:
        kind: the class.
        parts: cloudpickle's reduction of it.
    """
    make, args, state, _, _, fill = parts
    key = _keys.get(kind)
    if key is None or not _is_of_this_process(key):
        key = _keys[kind] = f"{os.getpid()}:{uuid.uuid4().hex}"
        _classes[key] = kind
    return make_class, (key, make, args), (key, fill, state), None, None, fill_class


def _is_of_this_process(key: str) -> bool:
    return key.startswith(f"{os.getpid()}:")


def make_class(key: str, make: Callable[..., type], args: tuple[Any, ...]) -> type:
    """The class of that key if it is from this process, else a new one that is still empty."""
    own = _classes.get(key) if _is_of_this_process(key) else None
    return make(*args) if own is None else own


def fill_class(kind: type, state: tuple[str, Callable[[type, Any], Any], Any]) -> None:
    """Gives a class its contents, unless it is the caller's own."""
    key, fill, contents = state
    if not (_is_of_this_process(key) and _classes.get(key) is kind):
        fill(kind, contents)
