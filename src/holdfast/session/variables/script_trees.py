"""The syntax trees of the script, in which attributes have one form.

Theory. ``setattr(o, "m", value)``, ``vars(o)["m"] = value`` and ``o.__dict__["m"] = value`` set the attribute ``o.m``,
and ``getattr(o, "m")`` reads it. An attribute that is made at its first use is often None before: ``hasattr(o, "m")``
and ``"m" in vars(o)`` count as ``o.m is not None``, and ``getattr(o, "m", x)`` as ``o.m if o.m is not None else x``.
``type(o).m`` is ``o.__class__.m``. The search for variables knows attributes, so these forms are replaced by
attributes. A name that is no constant text stays as it is.
"""

from __future__ import annotations

import ast
import copy


def parsed(text: str) -> ast.Module:
    """Return the syntax tree of ``text``; an empty tree if ``text`` is no valid source."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return ast.Module([], [])
    found: ast.Module = _Attributes().visit(tree)
    return found


class _Attributes(ast.NodeTransformer):
    """The transformer that puts an attribute in the place of each call or element that stands for one."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        match node.value:
            case ast.Call(
                func=ast.Name(id="setattr"), args=[owner, ast.Constant(value=str(name)), value], keywords=[]
            ):
                target = ast.copy_location(ast.Attribute(owner, name, ast.Store()), node.value)
                return self.generic_visit(ast.copy_location(ast.Assign([target], value), node))
            case ast.Call(
                func=ast.Name(id="delattr"), args=[owner, ast.Constant(value=str(name))], keywords=[]
            ):
                target = ast.copy_location(ast.Attribute(owner, name, ast.Del()), node.value)
                return self.generic_visit(ast.copy_location(ast.Delete([target]), node))
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        found: ast.expr = node
        match node:
            case ast.Call(
                func=ast.Name(id="getattr"), args=[owner, ast.Constant(value=str(name))], keywords=[]
            ):
                found = _attribute(owner, name, node)
            case ast.Call(
                func=ast.Name(id="hasattr"), args=[owner, ast.Constant(value=str(name))], keywords=[]
            ):
                found = _exists(owner, name, node)
            case (
                ast.Call(
                    func=ast.Name(id="getattr"),
                    args=[owner, ast.Constant(value=str(name)), value],
                    keywords=[],
                )
                | ast.Call(
                    func=ast.Attribute(
                        attr="get",
                        value=ast.Call(func=ast.Name(id="vars"), args=[owner], keywords=[])
                        | ast.Attribute(attr="__dict__", value=owner),
                    ),
                    args=[ast.Constant(value=str(name)), value],
                    keywords=[],
                )
            ):
                found = _attribute(owner, name, node)
                if not (isinstance(value, ast.Constant) and value.value is None):
                    found = ast.copy_location(ast.IfExp(_exists(owner, name, node), found, value), node)
        return self.generic_visit(found)

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        found: ast.expr = node
        match node:
            case ast.Compare(
                left=ast.Constant(value=str(name)),
                ops=[ast.In() | ast.NotIn() as operator],
                comparators=[
                    ast.Call(func=ast.Name(id="vars"), args=[owner], keywords=[])
                    | ast.Attribute(attr="__dict__", value=owner)
                ],
            ):
                found = _exists(owner, name, node)
                if isinstance(operator, ast.NotIn):
                    found = ast.copy_location(ast.Compare(found.left, [ast.Is()], found.comparators), node)
        return self.generic_visit(found)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        match node:
            case ast.UnaryOp(
                op=ast.Not(),
                operand=ast.Compare(left=left, ops=[ast.IsNot()], comparators=[ast.Constant() as none]),
            ):
                return ast.copy_location(ast.Compare(left, [ast.Is()], [none]), node)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        match node.value:
            case ast.Call(func=ast.Name(id="type"), args=[owner], keywords=[]):
                node.value = ast.copy_location(ast.Attribute(owner, "__class__", ast.Load()), node.value)
        return self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        match node:
            case ast.Subscript(
                value=ast.Call(func=ast.Name(id="vars"), args=[owner], keywords=[])
                | ast.Attribute(attr="__dict__", value=owner),
                slice=ast.Constant(value=str(name)),
            ):
                return self.generic_visit(ast.copy_location(ast.Attribute(owner, name, node.ctx), node))
        return self.generic_visit(node)


def _attribute(owner: ast.expr, name: str, node: ast.AST) -> ast.Attribute:
    return ast.copy_location(ast.Attribute(owner, name, ast.Load()), node)


def _exists(owner: ast.expr, name: str, node: ast.AST) -> ast.Compare:
    """Return ``owner.name is not None``."""
    none = ast.copy_location(ast.Constant(None), node)
    # A search may rename the variables in a tree in place, so no node may be there twice.
    attribute = _attribute(copy.deepcopy(owner), name, node)
    return ast.copy_location(ast.Compare(attribute, [ast.IsNot()], [none]), node)
