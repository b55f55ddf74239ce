"""The syntax trees of the script, in which attributes have one form.

Theory. ``setattr(o, "m", value)``, ``vars(o)["m"] = value`` and ``o.__dict__["m"] = value`` set the attribute ``o.m``,
and ``getattr(o, "m")`` reads it. ``type(o).m`` is ``o.__class__.m``. The search for variables knows attributes, so
these forms are replaced by attributes. A name that is no constant text stays as it is.
"""

from __future__ import annotations

import ast


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
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        match node:
            case ast.Call(
                func=ast.Name(id="getattr"), args=[owner, ast.Constant(value=str(name))], keywords=[]
            ):
                return self.generic_visit(ast.copy_location(ast.Attribute(owner, name, ast.Load()), node))
        return self.generic_visit(node)

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
