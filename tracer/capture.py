"""Finding the body of a `with` from the frame that runs it, and reading the variables that it needs.

`locate` starts from the instruction that the caller's frame is at, which carries its position in the source; the
innermost `with` whose item covers that position is the one that is being entered. This tells apart two traces on one
line, and notices when the file on disk is not the code that runs (see also `edited`). What is found is cached per
instruction.

`read` then takes the values of `Site.needs` from the frame, each time anew.
"""

from __future__ import annotations

import ast
import functools
import linecache
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from ..envoy.errors import CaptureError
from .block import Block
from .edited import edited_since_start, same_body
from .frames import release
from .instructions import Entry, enter_of
from .names import Flow, mangle
from .permitted import Kind, check_permitted
from .tracebacks import valid

if TYPE_CHECKING:
    from types import CodeType, FrameType

_CACHE_SIZE = 1024
_FUTURE_ANNOTATIONS = 0x1000000  # __future__.CO_FUTURE_ANNOTATIONS
_OPTIMIZED = 0x1  # inspect.CO_OPTIMIZED


@dataclass(frozen=True)
class Site:
    """One `with` in the caller's code, entered at one instruction.

    Attributes:
        block: what travels.
        needs: names that the body reads before it has surely assigned them, the name after `as` left out.
        stores: names that the body may assign in the caller's scope.
        global_names: those of `needs` and `stores` that the caller's scope takes from its globals.
        local_names: names that are local to the caller, if that is a function.
        tree: the statement.
        tracer: the name after `as`.
        enter: offset of the instruction that enters the `with`.
        start: offset of the instruction at which the body is left.
        binds: whether the body is left before Python has stored the name after `as`.
    """

    block: Block
    needs: tuple[str, ...]
    stores: tuple[str, ...]
    global_names: frozenset[str]
    local_names: frozenset[str]
    tree: ast.With
    tracer: str | None
    enter: int
    start: int
    binds: bool


class Captured(NamedTuple):
    """Values of the caller's variables, by the scope that they were found in."""

    locals: dict[str, object]
    globals: dict[str, object]

    def by_name(self) -> dict[str, object]:
        """What each name means in the body."""
        return {**self.globals, **self.locals}


class _Module(NamedTuple):
    """A parsed file, and for each `with` of it the scopes around it, the innermost last."""

    lines: tuple[str, ...]
    withs: tuple[tuple[ast.With, tuple[ast.AST, ...]], ...]


_sites: dict[tuple[int, int, Kind], tuple[weakref.ref[CodeType], Site]] = {}


def locate(frame: FrameType, kind: Kind = "trace") -> Site:
    """Finds the `with` that `frame` is entering.

    Args:
        frame: the frame whose current instruction called `__enter__`.
        kind: what is entered.

    Raises:
        CaptureError: there is no source, it is not that of the running code, the call does not come from a `with`,
            or the body does something that cannot be captured.
    """
    code = frame.f_code
    key = (id(code), frame.f_lasti, kind)
    known = _sites.get(key)
    if known is not None and known[0]() is code:
        return known[1]
    site = _find(frame, kind)
    if len(_sites) >= _CACHE_SIZE:
        _sites.clear()
    _sites[key] = (weakref.ref(code), site)
    return site


def read(site: Site, frame: FrameType) -> Captured:
    """Takes the values that the block needs. Names that exist nowhere, or only as builtins, are left out."""
    own: dict[str, object] = {}
    shared: dict[str, object] = {}
    scope = frame.f_locals
    outer = frame.f_globals
    if site.block.scope == "function":
        for name in site.needs:
            if name in site.local_names:
                if name in scope:
                    own[name] = scope[name]
            elif name in outer:
                shared[name] = outer[name]
        release(frame, scope)
    else:
        for name in site.needs:
            if name in scope and (scope is outer or name not in site.global_names):
                own[name] = scope[name]
            if scope is not outer:
                _read_around(name, frame, shared)
    return Captured(own, shared)


def _read_around(name: str, frame: FrameType, shared: dict[str, object]) -> None:
    """Reads what a class body sees around itself: variables of enclosing functions, then globals."""
    if name in frame.f_code.co_freevars:
        around = frame.f_back
        while around is not None:
            code = around.f_code
            if code.co_flags & _OPTIMIZED and (name in code.co_cellvars or name in code.co_freevars):
                scope = around.f_locals
                if name in scope:
                    shared[name] = scope[name]
                release(around, scope)
                return
            around = around.f_back
    if name in frame.f_globals:
        shared[name] = frame.f_globals[name]


def _find(frame: FrameType, kind: Kind) -> Site:
    code = frame.f_code
    entry = enter_of(code, frame.f_lasti)
    where = f"{code.co_filename}:{frame.f_lineno}"
    if entry is None:
        raise CaptureError(
            f"{where}: a trace was entered in {code.co_name!r} without a `with` statement.\n"
            "The body of the trace is found through the `with` that enters it; calling `__enter__` by hand, "
            "an ExitStack or a helper that enters it for you leave no body to find.\n"
            "Write `with model.trace(...):` where the body is."
        )
    for attempt in range(2):
        if attempt:
            linecache.checkcache(code.co_filename)
        lines = linecache.getlines(code.co_filename, frame.f_globals)
        if not lines and attempt:
            raise CaptureError(_no_source(where, code.co_filename))
        try:
            module = _parse(tuple(lines))
        except (SyntaxError, ValueError):
            continue
        found = _match(module, entry, code)
        if found is not None:
            tree, item, around = found
            loader = frame.f_globals.get("__loader__")
            if edited_since_start(code.co_filename) and not same_body(module.lines, tree, item, code, loader):
                continue
            return _site(frame, entry, module.lines, tree, item, around, kind)
    raise CaptureError(
        f"{where}: the source in {code.co_filename} is not the code that runs: no `with` of it has the body that was "
        "entered.\n"
        "The file was probably edited after it was imported. Import it again (restart the process or kernel, or use "
        "`importlib.reload`)."
    )


def _no_source(where: str, filename: str) -> str:
    hint = "Put the code into a file or a notebook cell."
    if filename == "<string>":
        hint = (
            "Put the code into a file. For `exec`, compile it under a file name of its own and register the "
            "text: `linecache.cache[name] = (len(text), None, text.splitlines(True), name)`."
        )
    elif filename == "<stdin>":
        hint = "The plain prompt keeps no source: use a file, IPython or a notebook."
    elif filename.startswith("<timed"):
        hint = "Cells under %%time or %time have no source: leave the magic out."
    return (
        f"{where}: the source of the body cannot be had: Python keeps none for {filename!r}.\n"
        f"The body of a trace is captured as source text. {hint}"
    )


@functools.lru_cache(maxsize=8)
def _parse(lines: tuple[str, ...]) -> _Module:
    text = "".join(lines)
    tree = ast.parse(text)
    withs: list[tuple[ast.With, tuple[ast.AST, ...]]] = []

    def collect(node: ast.AST, around: tuple[ast.AST, ...]) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.With):
                withs.append((child, around))
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                collect(child, (*around, child))
            elif isinstance(child, (ast.stmt, ast.ExceptHandler, ast.match_case)):
                collect(child, around)

    collect(tree, ())
    return _Module(lines, tuple(withs))


def _match(module: _Module, entry: Entry, code: CodeType) -> tuple[ast.With, int, tuple[ast.AST, ...]] | None:
    """The `with`, the index of its item and the scopes around it; None if the source does not fit."""
    fits: list[tuple[ast.With, int, tuple[ast.AST, ...]]] = []
    for tree, around in module.withs:
        if not tree.lineno <= entry.line <= (tree.end_lineno or tree.lineno):
            continue
        inner = around[-1] if around else None
        if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef)) and inner.name != code.co_name:
            continue
        for index, item in enumerate(tree.items):
            if entry.inside(item.context_expr):
                fits.append((tree, index, around))
    if len(fits) != 1:
        return None
    tree, _, _ = fits[0]
    return fits[0] if entry.stores_fit(code, tree) else None


def _assigned_by_nested(body: list[ast.stmt], owner: str) -> list[str]:
    """Names of `nonlocal` statements: functions in the block that may assign its variables."""
    nodes = (node for statement in body for node in ast.walk(statement) if isinstance(node, ast.Nonlocal))
    return [mangle(name, owner) for node in nodes for name in node.names]


def _site(
    frame: FrameType,
    entry: Entry,
    lines: tuple[str, ...],
    tree: ast.With,
    item: int,
    around: tuple[ast.AST, ...],
    kind: Kind,
) -> Site:
    code = frame.f_code
    check_permitted(tree, item, code.co_filename, kind)
    if entry.start is None:
        raise CaptureError(
            f"{code.co_filename}:{tree.lineno}: the body cannot be skipped when it starts with `try` (or does nothing) "
            "and `as` is not followed by a plain name.\nWrite `as tracer`, and store it elsewhere after the `with`."
        )
    inner = around[-1] if around else None
    classes = [node.name for node in around if isinstance(node, ast.ClassDef)]
    owner = classes[-1] if classes else ""
    scope: Literal["module", "function", "class"]
    if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef)):
        scope = "function"
    elif isinstance(inner, ast.ClassDef) or frame.f_locals is not frame.f_globals:
        scope = "class"
    else:
        scope = "module"

    target = tree.items[item].optional_vars
    tracer = mangle(target.id, owner) if isinstance(target, ast.Name) else None
    bound = [tracer] if tracer is not None else []
    reads = Flow(owner, bound)
    flow = Flow(owner, bound, class_body=reads) if scope == "class" else reads
    for later in tree.items[item + 1 :]:
        flow.walk([later.context_expr, later.optional_vars])
    flow.walk(tree.body)
    needs = tuple(reads.needs)
    stores = tuple(dict.fromkeys([*flow.stores, *_assigned_by_nested(tree.body, owner)]))

    declared = set(flow.declared_global)
    local_names: frozenset[str] = frozenset()
    if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef)):
        whole = Flow(owner)
        whole.walk(inner.body)
        # In the body around invokes, which runs as a function of its own, what it assigns is local (`Program`).
        own_global = whole.own_global.difference(code.co_varnames, code.co_cellvars)
        declared |= own_global
        count = code.co_argcount + code.co_kwonlyargcount
        count += bool(code.co_flags & 0x04) + bool(code.co_flags & 0x08)
        parameters = code.co_varnames[:count]
        mine = {*parameters, *whole.stores, *code.co_cellvars, *code.co_freevars}
        local_names = frozenset(mine - own_global)
    elif isinstance(inner, ast.ClassDef):
        whole = Flow(inner.name)
        whole.walk(inner.body)
        declared |= whole.own_global
    first, last = tree.lineno, tree.end_lineno or tree.lineno
    block = Block(
        source="".join(lines[first - 1 : last]),
        filename=valid(code.co_filename),
        lineno=first,
        item=item,
        name=code.co_name,
        scope=scope,
        tracer=tracer,
        parameters=tuple(
            name
            for name in needs
            if name in local_names or (scope == "function" and name in stores and name not in flow.own_global)
        ),
        owner=owner,
        lazy_annotations=bool(code.co_flags & _FUTURE_ANNOTATIONS),
    )
    return Site(
        block=block,
        needs=needs,
        stores=stores,
        global_names=frozenset(declared),
        local_names=local_names,
        tree=tree,
        tracer=tracer,
        enter=frame.f_lasti,
        start=entry.start,
        binds=entry.stores,
    )
