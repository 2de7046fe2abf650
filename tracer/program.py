"""Running a block where the model is: source back to code, with the user's file name, lines and columns.

The statement is parsed again from its own lines, rewritten a little, and compiled as what it was part of:

- in a function: a function of the same name whose parameters are the names that the block needs, so that closures,
  `nonlocal` and nested functions in the block work as they did;
- in a module or class body: statements over a dict.

What is rewritten:

- ``EXPR.save()`` and ``EXPR.save(stream=...)`` call ``__invivo_save__(EXPR, ...)``, since numbers, lists and tensors
  have no such method; ``names=`` says which variables the statement puts the value in; and so do calls ``save(EXPR)``
  and ``EXPR.save(EXPR)`` of what may be `invivo.save`;
- ``X.output[0]``, and other whole numbers, are read by ``__invivo_item__(X, 0)``, so that nothing else is copied;
- ``with tracer.all():`` and ``with tracer.iter[...] as step:`` become `for` loops;
- a `nonlocal` of the block itself is dropped: its value comes in as a parameter and goes home as a saved name.

The body around invokes runs in the same way, but with its caller; what is inside of ``with tracer.invoke(...):`` is
left as it is there, to be found in the caller's file when it is entered.
"""

from __future__ import annotations

import ast
import builtins
import functools
from collections.abc import Mapping, Sequence
from types import CodeType, FrameType, FunctionType, TracebackType
from typing import Any, TypeVar, cast

from ..envoy.envoy import output_item
from ..envoy.errors import CaptureError
from .block import Block, TracerHandle
from .names import mangle
from .permitted import is_invoke

SAVE = "__invivo_save__"
"""The name under which `extras` must hold the function that saves: `saves.save_method`, or one like it."""

ITEM = "__invivo_item__"
"""The name of `envoy.output_item` in a block."""

_Node = TypeVar("_Node", bound=ast.AST)

_SCOPE = "__invivo_scope__"
_STEP = "__invivo_step__"
_FUTURE_ANNOTATIONS = 0x1000000  # __future__.CO_FUTURE_ANNOTATIONS
_HIDDEN = frozenset({"__builtins__", SAVE, ITEM, _SCOPE, _STEP})
_CLASS = frozenset({"__module__", "__qualname__", "__firstlineno__", "__static_attributes__", "__type_params__"})


@functools.lru_cache(maxsize=512)
def compile_block(block: Block) -> Program:
    """The program of a block; the same object for the same block.

    Raises:
        CaptureError: this Python cannot parse the source (the caller's is newer).
    """
    return Program(block)


class Program:
    """A compiled block. It holds no values, and may run for many requests at once."""

    def __init__(self, block: Block) -> None:
        self.block = block
        statement = _parse(block)
        self._globals = _declared_global(statement, block.owner)
        self._loops = _possible_loops(statement, block.owner)
        self._codes: dict[tuple[frozenset[str], frozenset[str]], CodeType] = {}
        self._parameters = block.parameters
        if block.tracer is not None and block.tracer not in block.parameters:
            self._parameters += (block.tracer,)
        # The usual code, now: an error of the compiler belongs here and not into the first run.
        self._code(frozenset(), frozenset())

    def run(
        self, locals_: Mapping[str, object], globals_: Mapping[str, object], extras: Mapping[str, object]
    ) -> dict[str, object]:
        """Runs the block.

        Args:
            locals_: values of `Captured.locals`, and the tracer under `block.tracer` (it may be in `extras` as well).
            globals_: values of `Captured.globals`.
            extras: further globals, hidden by variables of the caller: `SAVE`, `print` and so on.

        Returns:
            The block's variables at its end, by name.

        Raises:
            BaseException: what the block raises; its traceback shows the caller's file, function and line.
        """
        block = self.block
        values = {**globals_, **locals_}
        if block.tracer is not None and block.tracer not in values and block.tracer in extras:
            values[block.tracer] = extras[block.tracer]
        tracers = frozenset(name for name in self._loops if isinstance(values.get(name), TracerHandle))
        # With `__builtins__`, as every module has it: C code that imports looks for it in the globals of its caller.
        space: dict[str, Any] = {
            "__name__": "__main__",
            "__builtins__": builtins,
            ITEM: output_item,
            **extras,
            **globals_,
        }
        if block.scope == "function":
            space[_SCOPE] = locals
            missing = frozenset(name for name in self._parameters if name not in values)
            function = FunctionType(self._code(missing, tracers), space, block.name)
            scope = cast("dict[str, object]", function(*(values.get(name) for name in self._parameters)))
        else:
            if block.tracer in values:
                locals_ = {**locals_, block.tracer: values[block.tracer]}
            space.update(locals_ if block.scope == "module" else {})
            scope = space if block.scope == "module" else dict(locals_)
            exec(self._code(frozenset(), tracers), space, scope)
        return self._visible(scope, space, extras)

    def runs(self, frame: FrameType) -> bool:
        """Whether the frame is that of a run of this program."""
        return any(frame.f_code is code for code in self._codes.values())

    def scope_of(self, traceback: TracebackType | None) -> dict[str, object]:
        """The block's variables where an exception left it; empty if the traceback does not go through the block."""
        codes = {id(code) for code in self._codes.values()}
        while traceback is not None:
            frame = traceback.tb_frame
            if id(frame.f_code) in codes:
                return self._visible(frame.f_locals, frame.f_globals, {})
            traceback = traceback.tb_next
        return {}

    def _visible(
        self, scope: Mapping[str, object], space: Mapping[str, object], extras: Mapping[str, object]
    ) -> dict[str, object]:
        visible = dict(scope)
        for name in self._globals:
            if name in space:
                visible[name] = space[name]
        hidden = _HIDDEN if self.block.scope != "class" else _HIDDEN | _CLASS
        untouched = {name for name in extras if name in visible and visible[name] is extras[name]}
        untouched.discard(self.block.tracer or "")
        return {name: value for name, value in visible.items() if name not in hidden and name not in untouched}

    def _code(self, missing: frozenset[str], tracers: frozenset[str]) -> CodeType:
        """The code for a caller in which the `missing` parameters have no value and `tracers` are tracers."""
        loops = tracers | (self._loops & {self.block.tracer or ""})
        key = (missing, loops)
        code = self._codes.get(key)
        if code is None:
            code = self._codes[key] = self._compile(missing, loops)
        return code

    def _compile(self, missing: frozenset[str], loops: frozenset[str]) -> CodeType:
        block = self.block
        statement = _parse(block)
        body: list[ast.stmt] = list(statement.body)
        later = statement.items[block.item + 1 :]
        if later:
            body = [ast.copy_location(ast.With(items=later, body=body), statement)]
        body = _Rewrite(loops, block.owner).statements(body)
        if block.scope == "function":
            if missing:
                body.insert(0, ast.Delete([ast.Name(name, ast.Del()) for name in sorted(missing)]))
            body.append(ast.Return(ast.Call(ast.Name(_SCOPE, ast.Load()), [], [])))
            parameters = [ast.arg(name) for name in self._parameters]
            arguments = ast.arguments([], parameters, None, [], [], None, [])
            body = [ast.FunctionDef(name=block.name, args=arguments, body=body, decorator_list=[])]
        if block.owner:  # the class around gives names like __x the meaning that they have in it
            body = [ast.ClassDef(name=block.owner, bases=[], keywords=[], body=body, decorator_list=[])]
        module = ast.Module(body, [])
        _locate(module, statement)
        flags = _FUTURE_ANNOTATIONS if block.lazy_annotations else 0
        try:
            code: CodeType = compile(module, block.filename, "exec", flags, dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            raise CaptureError(f"{block.filename}:{block.lineno}: the block does not compile: {error}") from error
        for _ in range((block.scope == "function") + bool(block.owner)):
            code = next(constant for constant in code.co_consts if isinstance(constant, CodeType))
        return code.replace(co_name=block.name)


def _parse(block: Block) -> ast.With:
    """The statement with its positions in the caller's file."""
    nested = block.source[:1].isspace()
    text = "if 1:\n" + block.source if nested else block.source
    try:
        tree: Any = ast.parse(text, block.filename)
    except (SyntaxError, ValueError) as error:
        raise CaptureError(
            f"{block.filename}:{block.lineno}: the engine's Python cannot read the block: {error}.\n"
            "It was probably written for a newer Python than the engine runs."
        ) from error
    ast.increment_lineno(tree, block.lineno - 1 - nested)
    statement = tree.body[0].body[0] if nested else tree.body[0]
    assert isinstance(statement, ast.With), "a block is the source of one `with`"
    return statement


def _declared_global(statement: ast.With, owner: str) -> frozenset[str]:
    names = (name for node in ast.walk(statement) if isinstance(node, ast.Global) for name in node.names)
    return frozenset(mangle(name, owner) for name in names)


def _possible_loops(statement: ast.With, owner: str) -> frozenset[str]:
    """Names X of every ``with X.all()`` and ``with X.iter[...]``: loops if X is a tracer."""
    items = (item for node in ast.walk(statement) if isinstance(node, ast.With) for item in node.items)
    return frozenset(mangle(name, owner) for item in items if (name := _looped(item.context_expr)) is not None)


def _looped(node: ast.expr) -> str | None:
    """The X of ``X.all()`` or ``X.iter[...]``."""
    if isinstance(node, ast.Call) and not node.args and not node.keywords:
        source, wanted = node.func, "all"
    elif isinstance(node, ast.Subscript):
        source, wanted = node.value, "iter"
    else:
        return None
    if isinstance(source, ast.Attribute) and source.attr == wanted and isinstance(source.value, ast.Name):
        return source.value.id
    return None


def _saved(node: ast.expr) -> ast.expr | None:
    """The X of ``X.save()``, ``save(X)`` and ``Y.save(X)``, each maybe with ``stream=...``."""
    if not isinstance(node, ast.Call) or len(node.args) > 1 or any(word.arg != "stream" for word in node.keywords):
        return None
    method = isinstance(node.func, ast.Attribute) and node.func.attr == "save"
    if not node.args:
        return node.func.value if method and isinstance(node.func, ast.Attribute) else None
    function = method or (isinstance(node.func, ast.Name) and node.func.id == "save")
    return node.args[0] if function and not isinstance(node.args[0], ast.Starred) else None


def _at(node: _Node, where: ast.AST) -> _Node:
    return ast.copy_location(node, where)


def _locate(node: ast.AST, where: ast.stmt) -> None:
    """Gives the statement's position to every node that has none."""
    for child in ast.walk(node):
        if "lineno" in child._attributes and not hasattr(child, "lineno"):
            ast.copy_location(child, where)


class _WithoutNonlocal(ast.NodeTransformer):
    """Drops the `nonlocal` statements of a body that is entered, but not run, where there is no scope around it."""

    def visit_Nonlocal(self, node: ast.Nonlocal) -> ast.AST:
        return _at(ast.Pass(), node)

    def _leave(self, node: ast.AST) -> ast.AST:
        return node

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _leave


class _Rewrite(ast.NodeTransformer):
    """The changes named in the module's docstring."""

    def __init__(self, tracers: frozenset[str], owner: str) -> None:
        self._tracers = tracers
        self._owner = owner
        self._depth = 0
        self._names: dict[int, tuple[str, ...]] = {}

    def statements(self, body: list[ast.stmt]) -> list[ast.stmt]:
        """The rewritten body, never empty."""
        done: list[ast.stmt] = []
        for statement in body:
            new = self.visit(statement)
            done += new if isinstance(new, list) else [new]
        return done

    def visit_Call(self, node: ast.Call) -> ast.AST:
        saved = _saved(node)
        self.generic_visit(node)
        if saved is None:
            return node
        if isinstance(saved, ast.NamedExpr):
            saved = saved.target
        names = self._names.pop(id(node), (saved.id,) if isinstance(saved, ast.Name) else ())
        mangled: list[ast.expr] = [ast.Constant(mangle(name, self._owner)) for name in names]
        hint = ast.keyword("names", ast.Tuple(mangled, ast.Load()))
        name = _at(ast.Name(SAVE, ast.Load()), node.func)
        first = node.func if node.args else node.func.value  # type: ignore[attr-defined]  # `_saved` has looked
        return _at(ast.Call(name, [first, *node.args], [*node.keywords, hint]), node)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        of, index = node.value, node.slice
        if not (isinstance(of, ast.Attribute) and of.attr == "output" and isinstance(node.ctx, ast.Load)):
            return node
        if not isinstance(index, ast.Constant) or type(index.value) is not int:
            return node
        return _at(ast.Call(_at(ast.Name(ITEM, ast.Load()), node), [of.value, index], []), node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        return self._binding(node, node.value, node.targets)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        return self._binding(node, node.value, [node.target])

    def visit_NamedExpr(self, node: ast.NamedExpr) -> ast.AST:
        return self._binding(node, node.value, [node.target])

    def _binding(self, node: ast.AST, value: ast.expr | None, targets: Sequence[ast.expr]) -> ast.AST:
        """Remember which names a saved value is bound to."""
        if value is not None and _saved(value) is not None:
            self._names[id(value)] = tuple(target.id for target in targets if isinstance(target, ast.Name))
        self.generic_visit(node)
        return node

    def visit_With(self, node: ast.With) -> ast.AST:
        body: list[ast.stmt] = list(node.body)
        items = list(node.items)
        invoked = next((index for index, item in enumerate(items) if is_invoke(item.context_expr)), None)
        if invoked is None:
            self.generic_visit(node)
            body = list(node.body)
        else:
            inner = [_WithoutNonlocal().visit(statement) for statement in body]
            items[invoked].context_expr = self.visit(items[invoked].context_expr)
            body = [_at(ast.With(items[invoked:], inner, None), node)]
            items = [self.visit(item) for item in items[:invoked]]
        for item in reversed(items):
            name = _looped(item.context_expr)
            if name is not None and mangle(name, self._owner) in self._tracers:
                target = item.optional_vars or _at(ast.Name(_STEP, ast.Store()), item.context_expr)
                body = [_at(ast.For(target, item.context_expr, body, [], None), node)]
            else:
                body = [_at(ast.With([item], body, None), node)]
        return body[0]

    def visit_Nonlocal(self, node: ast.Nonlocal) -> ast.AST:
        return _at(ast.Pass(), node) if self._depth == 0 else node

    def _enter(self, node: ast.AST) -> ast.AST:
        self._depth += 1
        self.generic_visit(node)
        self._depth -= 1
        return node

    visit_FunctionDef = _enter
    visit_AsyncFunctionDef = _enter
    visit_ClassDef = _enter
