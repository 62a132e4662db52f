"""What of the program no test need see: mutants that differ there alone are left out of the sample."""

from __future__ import annotations

import ast

UNSEEN = {"__repr__", "__str__"}
LOGS = {"_log", "log", "logger"}
DECLARED = {"dataclass": {"frozen", "slots", "kw_only", "eq"}, "TypeVar": {"covariant", "contravariant", "bound"}}


def is_left_out(sound: str, mutant: str) -> bool:
    """True if the mutant differs in nothing but what no test need see, or is no program.

    Left out are: what is logged (the arguments of `_log.info(...)` and the like), annotations, docstrings, the bodies
    of `__repr__` and `__str__`, and what the type checker holds already: `@override`, `frozen=`, `slots=`, `kw_only=`
    and `eq=` of a dataclass, a `TypeVar`, and whether an argument is passed by its place or by its name.
    """
    try:
        return essence(sound) == essence(mutant)
    except SyntaxError:
        return True


def essence(source: str) -> str:
    """The program without what is left out, as text that can be compared."""
    return ast.dump(_Seen().visit(ast.parse(source)))


class _Seen(ast.NodeTransformer):
    """Takes out what no test need see."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._function(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Constant(None)
        return self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if isinstance(node.value, ast.Constant):
            return ast.Expr(ast.Constant(None))
        return self.generic_visit(node)

    def visit_arguments(self, node: ast.arguments) -> ast.AST:
        defaults = [None] * (len(node.posonlyargs) + len(node.args) - len(node.defaults)) + node.defaults
        node.args = [*node.posonlyargs, *node.args, *node.kwonlyargs]
        node.posonlyargs, node.kwonlyargs = [], []
        node.defaults, node.kw_defaults = [], [*defaults, *node.kw_defaults]
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Name):
            declared = DECLARED.get(node.func.id, set())
            node.keywords = [word for word in node.keywords if word.arg not in declared]
        of = node.func.value if isinstance(node.func, ast.Attribute) else None
        if isinstance(of, ast.Name) and of.id in LOGS:
            node.args, node.keywords = [], []
        return self.generic_visit(node)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        node.returns = None
        node.decorator_list = [one for one in node.decorator_list if ast.unparse(one) != "override"]
        if node.name in UNSEEN:
            node.body = [ast.Pass()]
        return self.generic_visit(node)
