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
    """The transformer that puts attributes and items in the place of the calls that stand for them.

    The parts of a node are transformed before the node.
    """

    def visit_Expr(self, node: ast.Expr) -> ast.AST | list[ast.AST]:
        self.generic_visit(node)
        match node.value:
            case ast.Call(
                func=ast.Name(id="setattr"), args=[owner, ast.Constant(value=str(name)), value], keywords=[]
            ):
                return _assigned(_attribute(owner, name, node, ast.Store()), value, node)
            case ast.Call(
                func=ast.Name(id="delattr"), args=[owner, ast.Constant(value=str(name))], keywords=[]
            ):
                return ast.copy_location(ast.Delete([_attribute(owner, name, node, ast.Del())]), node)
            case ast.Call(func=ast.Attribute(attr="update", value=space), args=given, keywords=keywords) if (
                held := _owner_of(space)
            ) and (pairs := _pairs(given, keywords)):
                owners = (copy.deepcopy(held) for _ in pairs)
                return [
                    _assigned(_attribute(one, name, node, ast.Store()), value, node)
                    for one, (name, value) in zip(owners, pairs, strict=True)
                ]
            case (
                ast.Call(func=ast.Attribute(attr="__setitem__", value=owner), args=[key, value], keywords=[])
                | ast.Call(
                    func=ast.Attribute(attr="setitem", value=ast.Name(id="operator")),
                    args=[owner, key, value],
                    keywords=[],
                )
            ):
                return _assigned(ast.copy_location(ast.Subscript(owner, key, ast.Store()), node), value, node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        match node:
            case ast.Call(
                func=ast.Name(id="hasattr"), args=[owner, ast.Constant(value=str(name))], keywords=[]
            ):
                return _compared(_attribute(owner, name, node), ast.IsNot(), node)
            case ast.Call(
                func=ast.Name(id="getattr"), args=[owner, ast.Constant(value=str(name)), value], keywords=[]
            ):
                return _or_default(owner, name, value, node)
            case ast.Call(
                func=ast.Attribute(attr="get", value=space),
                args=[ast.Constant(value=str(name)), value],
                keywords=[],
            ) if held := _owner_of(space):
                return _or_default(held, name, value, node)
            case ast.Call(
                func=ast.Attribute(attr="get", value=owner),
                args=[ast.Constant(value=str()) as key, *_],
                keywords=[],
            ) if chain(owner):
                item = ast.copy_location(ast.Subscript(copy.deepcopy(owner), key, ast.Load()), node)
                return ast.copy_location(ast.BoolOp(ast.Or(), [item, node]), node)
        return as_attribute(node)

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        match node:
            case ast.Compare(
                left=ast.Constant(value=str(name)),
                ops=[ast.In() | ast.NotIn() as operator],
                comparators=[space],
            ) if owner := _owner_of(space):
                found = ast.IsNot() if isinstance(operator, ast.In) else ast.Is()
                return _compared(_attribute(owner, name, node), found, node)
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        match node:
            case ast.UnaryOp(
                op=ast.Not(),
                operand=ast.Compare(left=left, ops=[ast.IsNot()], comparators=[ast.Constant(value=None)]),
            ):
                return _compared(left, ast.Is(), node)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        return _attribute(node.value, node.attr, node, node.ctx)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        match node:
            case ast.Subscript(value=space, slice=ast.Constant(value=str(name))) if owner := _owner_of(space):
                return _attribute(owner, name, node, node.ctx)
        return node


def chain(node: ast.AST) -> str:
    """Return a variable or an attribute of one as text (``self.schedule.step``); empty for any other expression."""
    match node:
        case ast.Name():
            return node.id
        case ast.Attribute():
            owner = chain(node.value)
            return f"{owner}.{node.attr}" if owner else ""
    return ""


def as_attribute(node: ast.Call) -> ast.expr:
    """Return ``getattr(o, "m")`` as ``o.m``, and any other call as it is."""
    match node:
        case ast.Call(func=ast.Name(id="getattr"), args=[owner, ast.Constant(value=str(name))], keywords=[]):
            return _attribute(owner, name, node)
    return node


def as_constant(node: ast.JoinedStr) -> ast.expr:
    """Return a formatted text (``f"on_{event}"``) as a constant, if its parts are constants."""
    parts = [each.value if isinstance(each, ast.FormattedValue) else each for each in node.values]
    texts = [each.value for each in parts if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    return ast.copy_location(ast.Constant("".join(texts)), node) if len(texts) == len(parts) else node


def _owner_of(space: ast.expr) -> ast.expr | None:
    """Return ``o`` if ``space`` is ``vars(o)`` or ``o.__dict__``; None for any other expression."""
    match space:
        case (
            ast.Call(func=ast.Name(id="vars"), args=[owner], keywords=[])
            | ast.Attribute(attr="__dict__", value=owner)
        ):
            return owner
    return None


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


def _attribute(
    owner: ast.expr, name: str, node: ast.AST, context: ast.expr_context | None = None
) -> ast.Attribute:
    """Return ``owner.name`` at the place of ``node``. Without ``context``, it is a read."""
    match owner:
        case ast.Call(func=ast.Name(id="type"), args=[instance], keywords=[]):
            owner = ast.copy_location(ast.Attribute(instance, "__class__", ast.Load()), owner)
    return ast.copy_location(ast.Attribute(owner, name, context or ast.Load()), node)


def _assigned(target: ast.expr, value: ast.expr, node: ast.AST) -> ast.AST:
    return ast.copy_location(ast.Assign([target], value), node)


def _compared(left: ast.expr, operator: ast.cmpop, node: ast.AST) -> ast.Compare:
    """Return the comparison of ``left`` with None."""
    none = ast.copy_location(ast.Constant(None), node)
    return ast.copy_location(ast.Compare(left, [operator], [none]), node)


def _or_default(owner: ast.expr, name: str, value: ast.expr, node: ast.AST) -> ast.expr:
    """Return ``owner.name if owner.name is not None else value``."""
    found = _attribute(owner, name, node)
    if isinstance(value, ast.Constant) and value.value is None:
        return found
    # A search may rename the variables in a tree in place, so no node may be there twice.
    exists = _compared(copy.deepcopy(found), ast.IsNot(), node)
    return ast.copy_location(ast.IfExp(exists, found, value), node)
