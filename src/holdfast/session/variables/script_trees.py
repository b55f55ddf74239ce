"""The syntax trees of the script, in which attributes have one form.

Theory. ``setattr(o, "m", value)``, ``vars(o)["m"] = value`` and ``o.__dict__["m"] = value`` set the attribute ``o.m``,
and ``getattr(o, "m")`` reads it. An attribute that is made at its first use is often None before: ``hasattr(o, "m")``
and ``"m" in vars(o)`` count as ``o.m is not None``, and ``getattr(o, "m", x)`` as ``o.m if o.m is not None else x``.
``type(o).m`` is ``o.__class__.m``. ``d.get("k", x)`` reads ``d["k"]`` too, and ``d.__setitem__("k", x)`` sets it. The
search for variables knows attributes and items, so these forms are replaced by them. A name that is no constant text
stays as it is.
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

    def visit_Expr(self, node: ast.Expr) -> ast.AST | list[ast.AST]:
        match node.value:
            case ast.Call(
                func=ast.Name(id="setattr"), args=[owner, ast.Constant(value=str(name)), value], keywords=[]
            ):
                return self._set(owner, name, value, node)
            case ast.Call(
                func=ast.Name(id="delattr"), args=[owner, ast.Constant(value=str(name))], keywords=[]
            ):
                target = ast.copy_location(ast.Attribute(owner, name, ast.Del()), node.value)
                return self.generic_visit(ast.copy_location(ast.Delete([target]), node))
            case ast.Call(
                func=ast.Attribute(attr="update", value=ast.Call(func=ast.Name(id="vars"), args=[owner]))
                | ast.Attribute(attr="update", value=ast.Attribute(attr="__dict__", value=owner)),
                args=given,
                keywords=keywords,
            ) if pairs := _pairs(given, keywords):
                return [self._set(owner, name, value, node) for name, value in pairs]
            case (
                ast.Call(func=ast.Attribute(attr="__setitem__", value=owner), args=[key, value], keywords=[])
                | ast.Call(
                    func=ast.Attribute(attr="setitem", value=ast.Name(id="operator")),
                    args=[owner, key, value],
                    keywords=[],
                )
            ):
                item = ast.copy_location(ast.Subscript(owner, key, ast.Store()), node.value)
                return self.generic_visit(ast.copy_location(ast.Assign([item], value), node))
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
            case ast.Call(
                func=ast.Attribute(attr="get", value=owner),
                args=[ast.Constant(value=str()) as key, *_],
                keywords=[],
            ) if _is_variable(owner):
                item = ast.copy_location(ast.Subscript(copy.deepcopy(owner), key, ast.Load()), node)
                found = ast.copy_location(ast.BoolOp(ast.Or(), [item, node]), node)
                self.generic_visit(node)
                self.generic_visit(item)
                return found
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

    def _set(self, owner: ast.expr, name: str, value: ast.expr, node: ast.Expr) -> ast.AST:
        """Return the assignment of an attribute that stands for the statement ``node``."""
        target = ast.copy_location(ast.Attribute(copy.deepcopy(owner), name, ast.Store()), node.value)
        return self.generic_visit(ast.copy_location(ast.Assign([target], value), node))


def _pairs(given: list[ast.expr], keywords: list[ast.keyword]) -> list[tuple[str, ast.expr]]:
    """Return the names and values in the arguments of ``update()``; none if they are not all known."""
    found: list[tuple[object, ast.expr]] = [(each.arg, each.value) for each in keywords]
    for each in given:
        if not isinstance(each, ast.Dict):
            return []
        keys = (getattr(key, "value", None) for key in each.keys)
        found += zip(keys, each.values, strict=True)
    named = [(name, value) for name, value in found if isinstance(name, str)]
    return named if len(named) == len(found) else []


def _is_variable(node: ast.expr) -> bool:
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name)


def _attribute(owner: ast.expr, name: str, node: ast.AST) -> ast.Attribute:
    return ast.copy_location(ast.Attribute(owner, name, ast.Load()), node)


def _exists(owner: ast.expr, name: str, node: ast.AST) -> ast.Compare:
    """Return ``owner.name is not None``."""
    none = ast.copy_location(ast.Constant(None), node)
    # A search may rename the variables in a tree in place, so no node may be there twice.
    attribute = _attribute(copy.deepcopy(owner), name, node)
    return ast.copy_location(ast.Compare(attribute, [ast.IsNot()], [none]), node)


def as_attribute(node: ast.Call) -> ast.expr:
    """Return ``getattr(o, "m")`` as ``o.m``, where the name has become a constant: an argument of a function."""
    match node:
        case ast.Call(func=ast.Name(id="getattr"), args=[owner, ast.Constant(value=str(name))], keywords=[]):
            return _attribute(owner, name, node)
    return node


def as_constant(node: ast.JoinedStr) -> ast.expr:
    """Return a formatted text (``f"on_{event}"``) as a constant, if its parts are constants."""
    parts = [each.value if isinstance(each, ast.FormattedValue) else each for each in node.values]
    texts = [each.value for each in parts if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    return ast.copy_location(ast.Constant("".join(texts)), node) if len(texts) == len(parts) else node
