"""Which names a block needs from its caller, which it may assign, and which statements cannot be captured.

`Flow` walks statements in the order in which they run and keeps the set of names that are *surely* assigned by then.
A name that is read while it is not in that set is needed from the caller. So of ::

    h = model.layers[5].output      # h is assigned first: a big `h` that the caller still holds is not sent
    total += h.sum()                # total is read: it is needed

only `total` is. A name once assigned never comes back to the caller's value, hence `del` takes nothing from the set.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence

_HARMLESS = frozenset({"no_grad", "inference_mode", "enable_grad", "set_grad_enabled", "autocast", "nullcontext"})
"""Context managers known to let every exception through: what their body assigns is assigned after them."""


def mangle(name: str, owner: str) -> str:
    """The name as the compiler stores it inside of class `owner` (``""``: in no class)."""
    owner = owner.lstrip("_")
    if not owner or not name.startswith("__") or name.endswith("__") or "." in name:
        return name
    return f"_{owner}{name}"


class Flow(ast.NodeVisitor):
    """Definite assignment over the statements of one scope.

    Attributes:
        needs: names read before they were surely assigned, in order of appearance.
        stores: names that the scope may assign, in order of appearance.
        own_global: names in `global` statements of the scope itself.
        declared_global: those, and the ones in `global` statements of the functions in it.
        declared_nonlocal: names in `nonlocal` statements of the scope itself.
    """

    def __init__(self, owner: str = "", bound: Iterable[str] = (), *, class_body: Flow | None = None) -> None:
        self.owner = owner
        self.needs: dict[str, None] = {}
        self.stores: dict[str, None] = {}
        self.own_global: set[str] = set()
        self.declared_global: set[str] = set()
        self.declared_nonlocal: set[str] = set()
        self._bound: set[str] | None = set(bound)  # None: this point is never reached
        self._outer = class_body  # for a class body: the flow around it, all that functions in it can see
        self._class = ""  # for a class body: the name that is bound by the time its functions run
        self._breaks: list[list[set[str] | None]] = []

    def walk(self, nodes: Iterable[ast.AST | None]) -> None:
        """Goes through nodes in the order in which they run."""
        for node in nodes:
            if node is not None:
                self.visit(node)

    # names

    def _read(self, name: str, nested: bool = False) -> None:
        name = mangle(name, self.owner)
        if self._outer is not None:
            if name != self._class if nested else self._bound is not None and name not in self._bound:
                self._outer._read(name, nested=True)
        elif self._bound is not None and name not in self._bound:
            self.needs.setdefault(name)

    def _store(self, name: str) -> None:
        name = mangle(name, self.owner)
        self.stores.setdefault(name)
        if self._bound is not None:
            self._bound.add(name)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self._store(node.id)
        else:
            self._read(node.id)
            if isinstance(node.ctx, ast.Del):
                self.stores.setdefault(mangle(node.id, self.owner))

    # branches

    def _copy(self) -> set[str] | None:
        return None if self._bound is None else set(self._bound)

    def _branch(self, start: set[str] | None, nodes: Sequence[ast.AST]) -> set[str] | None:
        self._bound = None if start is None else set(start)
        self.walk(nodes)
        return self._bound

    def _join(self, *ends: set[str] | None) -> None:
        reached = [end for end in ends if end is not None]
        self._bound = set.intersection(*reached) if reached else None

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        start = self._copy()
        self._join(self._branch(start, node.body), self._branch(start, node.orelse))

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.visit(node.test)
        start = self._copy()
        self._join(self._branch(start, [node.body]), self._branch(start, [node.orelse]))

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self.visit(node.values[0])
        start = self._copy()
        self._branch(start, node.values[1:])
        self._bound = start

    def visit_Compare(self, node: ast.Compare) -> None:
        self.walk([node.left, node.comparators[0]])
        start = self._copy()
        self._branch(start, node.comparators[1:])
        self._bound = start

    def visit_Assert(self, node: ast.Assert) -> None:
        self.visit(node.test)
        start = self._copy()
        if node.msg is not None:
            self._branch(start, [node.msg])
        self._bound = start

    def _loop(self, body: list[ast.stmt], orelse: list[ast.stmt], target: ast.expr | None, endless: bool) -> None:
        start = self._copy()
        self._breaks.append([])
        self._branch(start, [*([target] if target is not None else []), *body])
        breaks = self._breaks.pop()
        end = None if endless else self._branch(start, orelse)
        self._join(end, *breaks)

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        self.visit(node.iter)
        self._loop(node.body, node.orelse, node.target, False)

    def visit_AsyncFor(self, node: ast.AsyncFor) -> None:
        self.visit_For(node)

    def visit_While(self, node: ast.While) -> None:
        self.visit(node.test)
        endless = isinstance(node.test, ast.Constant) and bool(node.test.value)
        self._loop(node.body, node.orelse, None, endless)

    def visit_Break(self, node: ast.Break) -> None:
        if self._breaks:
            self._breaks[-1].append(self._bound)
        self._bound = None

    def visit_Continue(self, node: ast.Continue) -> None:
        self._bound = None

    def visit_Return(self, node: ast.Return) -> None:
        self.generic_visit(node)
        self._bound = None

    def visit_Raise(self, node: ast.Raise) -> None:
        self.generic_visit(node)
        self._bound = None

    def visit_Try(self, node: ast.Try | ast.TryStar) -> None:
        start = self._copy()
        ends = [self._branch(self._branch(start, node.body), node.orelse)]
        for handler in node.handlers:
            self._bound = None if start is None else set(start)
            if handler.type is not None:
                self.visit(handler.type)
            if handler.name is not None:
                self._store(handler.name)
            ends.append(self._branch(self._bound, handler.body))
        last = self._branch(start, node.finalbody)
        self._join(*ends)
        if last is None:
            self._bound = None
        elif self._bound is not None:
            self._bound |= last

    def visit_TryStar(self, node: ast.TryStar) -> None:
        self.visit_Try(node)

    def visit_With(self, node: ast.With | ast.AsyncWith) -> None:
        harmless = True
        for item in node.items:
            self.visit(item.context_expr)
            if item.optional_vars is not None:
                self.visit(item.optional_vars)
            harmless = harmless and _callee(item.context_expr) in _HARMLESS
        start = self._copy()
        end = self._branch(start, node.body)
        self._bound = end if harmless else start

    def visit_AsyncWith(self, node: ast.AsyncWith) -> None:
        self.visit_With(node)

    def visit_Match(self, node: ast.Match) -> None:
        self.visit(node.subject)
        start = self._copy()
        ends = []
        for case in node.cases:
            guard = [case.guard] if case.guard is not None else []
            ends.append(self._branch(start, [case.pattern, *guard, *case.body]))
        last = node.cases[-1]
        irrefutable = last.guard is None and isinstance(last.pattern, ast.MatchAs) and last.pattern.pattern is None
        self._join(*ends, *([] if irrefutable else [start]))

    def visit_MatchAs(self, node: ast.MatchAs) -> None:
        self.generic_visit(node)
        if node.name is not None:
            self._store(node.name)

    def visit_MatchStar(self, node: ast.MatchStar) -> None:
        if node.name is not None:
            self._store(node.name)

    def visit_MatchMapping(self, node: ast.MatchMapping) -> None:
        self.generic_visit(node)
        if node.rest is not None:
            self._store(node.rest)

    # statements and expressions whose order of evaluation is not that of their fields

    def visit_Assign(self, node: ast.Assign) -> None:
        self.walk([node.value, *node.targets])

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name):
            self._read(node.target.id)
        self.walk([node.value, node.target])

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.walk([node.value, node.annotation])
        if node.value is not None or not isinstance(node.target, ast.Name):
            self.visit(node.target)
        else:
            self.stores.setdefault(mangle(node.target.id, self.owner))

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.walk([node.value, node.target])

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._store(alias.asname or alias.name.partition(".")[0])

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            self._store(alias.asname or alias.name)

    def visit_Global(self, node: ast.Global) -> None:
        names = {mangle(name, self.owner) for name in node.names}
        self.own_global |= names
        self.declared_global |= names

    def visit_Nonlocal(self, node: ast.Nonlocal) -> None:
        self.declared_nonlocal.update(mangle(name, self.owner) for name in node.names)

    # nested scopes

    def _nested(self, bound: Iterable[str], body: Sequence[ast.AST], outside: Iterable[str] = ()) -> None:
        """Reads the free names of a nested function scope with the given parameters and body.

        `outside` are names that the body assigns in the scope around it (``:=`` in a comprehension).
        """
        inner = Flow(self.owner)
        inner.walk(body)
        own = {mangle(name, self.owner) for name in bound}
        own |= set(inner.stores) - {mangle(name, self.owner) for name in outside}
        own -= inner.own_global | inner.declared_nonlocal
        every = Flow(self.owner)
        every._reads_anywhere(body)
        self.declared_global |= inner.declared_global
        for name in (*every.needs, *inner.declared_nonlocal):
            if name not in own:
                self._read(name, nested=True)

    def _reads_anywhere(self, body: Sequence[ast.AST]) -> None:
        """Every name read in these nodes, whatever is assigned before."""
        for node in body:
            self._bound = set()
            flow = _Everything(self.owner)
            flow.visit(node)
            self.needs.update(flow.needs)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        arguments = node.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        every += [extra for extra in (arguments.vararg, arguments.kwarg) if extra is not None]
        self.walk([*node.decorator_list, *arguments.defaults, *arguments.kw_defaults])
        self.walk([*(argument.annotation for argument in every), node.returns])
        self._store(node.name)
        self._nested([*(argument.arg for argument in every), *_type_parameters(node)], node.body)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_FunctionDef(node)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        arguments = node.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        every += [extra for extra in (arguments.vararg, arguments.kwarg) if extra is not None]
        self.walk([*arguments.defaults, *arguments.kw_defaults])
        self._nested([argument.arg for argument in every], [node.body])

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.walk([*node.decorator_list, *node.bases, *node.keywords])
        inner = Flow(node.name, _type_parameters(node), class_body=self)
        inner._class = mangle(node.name, self.owner)
        inner.walk(node.body)
        self.declared_global |= inner.declared_global
        self._store(node.name)

    def _comprehension(self, elements: list[ast.expr], clauses: list[ast.comprehension]) -> None:
        self.visit(clauses[0].iter)
        own: list[str] = []
        for clause in clauses:
            own += [name.id for name in ast.walk(clause.target) if isinstance(name, ast.Name)]
        body: list[ast.AST] = [*elements, *(test for clause in clauses for test in clause.ifs)]
        body += [clause.iter for clause in clauses[1:]] + [clause.target for clause in clauses]
        walrus = [n.target.id for part in body for n in ast.walk(part) if isinstance(n, ast.NamedExpr)]
        for name in walrus:  # bound in the scope around the comprehension, if it gets that far
            self.stores.setdefault(mangle(name, self.owner))
        self._nested(own, body, walrus)

    def visit_ListComp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp) -> None:
        self._comprehension([node.elt], node.generators)

    def visit_SetComp(self, node: ast.SetComp) -> None:
        self.visit_ListComp(node)

    def visit_GeneratorExp(self, node: ast.GeneratorExp) -> None:
        self.visit_ListComp(node)

    def visit_DictComp(self, node: ast.DictComp) -> None:
        self._comprehension([node.key, node.value], node.generators)


class _Everything(Flow):
    """Like `Flow`, but nothing counts as assigned: all names that are read, for bodies that run later."""

    def _store(self, name: str) -> None:
        self.stores.setdefault(mangle(name, self.owner))

    def _branch(self, start: set[str] | None, nodes: Sequence[ast.AST]) -> set[str] | None:
        self._bound = set()
        self.walk(nodes)
        self._bound = set()
        return self._bound


def _type_parameters(node: ast.AST) -> list[str]:
    return [parameter.name for parameter in getattr(node, "type_params", [])]


def _callee(node: ast.expr) -> str:
    """The last name of what a context expression calls: ``no_grad`` of ``torch.no_grad()``."""
    if isinstance(node, ast.Call):
        node = node.func
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
