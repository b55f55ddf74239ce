"""Forms in which a script keeps what decides about its updates: the search finds the variable of each."""

from __future__ import annotations

import linecache
import types
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from holdfast.session.variables.deciding_variables import placed_variables, places_in_script


class Form(NamedTuple):
    """A form of state.

    Attributes:
        found: the variables that the search finds.
        change: the statement that changes the value.
        read: the expression that reads it.
        init: the statement that makes the variable.
        define: functions and classes.
    """

    found: str
    change: str
    read: str
    init: str = "pass"
    define: str = ""


OBJECT = "class O:\n    m = 0.0\n"
METER = """
class Meter:
    def __init__(self):
        self.total, self.n = 0.0, 0
    def update(self, v):
        self.total += v
        self.n += 1
    @property
    def mean(self):
        return self.total / max(1, self.n)
class Meters:
    def __init__(self):
        self.meters = {}
    def update(self, **values):
        for name, v in values.items():
            self.meters.setdefault(name, Meter()).update(v)
    def __getattr__(self, name):
        return self.meters[name]
"""
GLOBAL = "G = 0.0\ndef bump(v):\n    global G\n    G += v\ndef now():\n    return G"
CLOSURE = """
def make():
    m = 0.0
    def bump(v):
        nonlocal m
        m += v
    def now():
        return m
    return bump, now
"""
DEFAULT = "def acc(v=0.0, seen=[0.0]):\n    seen[0] += v\n    return seen[0]"
CALLED = "class A:\n    m = 0.0\n    def __call__(self, v):\n        self.m += v"
TENSOR = """
class T:
    dtype, data = 1, 0.0
    def mul_(self, x):
        return self
    add_ = mul_
"""
PAIR = "from typing import NamedTuple\nclass S(NamedTuple):\n    m: float = 0.0"
HOOKED = """
class Layer:
    def __init__(self, **hooks):
        self._modules = {}
        self.__dict__.update({name: {0: hook} for name, hook in hooks.items()})
    def __call__(self, x):
        return x
class Model(Layer):
    def __init__(self, **hooks):
        super().__init__()
        self._modules["inner"] = Layer(**hooks)
class Counter:
    n = 0
    def hook(self, module, args, out):
        return out * self.n
    def __call__(self, module, args, out):
        return out * self.n
class Parameter:
    def __init__(self, hook):
        self._backward_hooks = {0: hook}
seen = {"n": 0}
def hook(module, args, out):
    return out * seen["n"]
def pre_hook(module, args):
    return args * seen["n"]
def of_gradient(gradient):
    return gradient * seen["n"]
"""
REVERSED = """
import torch
class Reversed(torch.autograd.Function):
    factor = 0.0
    @staticmethod
    def forward(ctx, x):
        return x
    @staticmethod
    def backward(ctx, gradient):
        return -Reversed.factor * gradient
"""
DECORATED = """
def logged(f):
    def inner(*given, **named):
        return f(*given, **named)
    return inner
class D:
    m = 0.0
    @logged
    def add(self, v, by=1):
        self.m += v * by
"""
EVENTS = """
class Pool:
    def submit(self, f, *given):
        f(*given)
class Bus:
    def __init__(self, listeners):
        self.listeners = listeners
    def fire(self, event):
        for each in self.listeners:
            getattr(each, f"on_{event}")()
class Listener:
    m = 0.0
    def on_step(self):
        self.m += 1
    def add(self, v):
        self.m += v
    def __enter__(self):
        return self
    def __exit__(self, *error):
        self.m += 1
"""
LISTENER = "o = Listener(); bus = Bus([o])"
VIEWED = """
class T:
    dtype = 1
    def mul_(self, x):
        return self
    fill = copyto = mul_
    def view(self, *sizes):
        return self
T.data = property(lambda t: t)
def copyto(t, x):
    pass
def multiply(x, y, out):
    pass
"""
SEEN = "seen['n'] += 1"
MADE = "meters = Meters(); meters.update(loss=0.0)"
BY_NAME = "meters.meters['loss'].mean"
BY_KEY = "os, key = {'a': Meter()}, 'a'"
FORMS = {
    "number": Form("m", "m = 0.9 * m + v", "m", "m = 0.0"),
    "attribute": Form("o.m", "o.m += v", "o.m", "o = O()", OBJECT),
    "inner attribute": Form("o.i.m", "o.i.m += v", "o.i.m", "o = O(); o.i = O()", OBJECT),
    "setattr": Form("o.m", "setattr(o, 'm', o.m + v)", "getattr(o, 'm')", "o = O()", OBJECT),
    "vars": Form("o.m", "vars(o)['m'] += v", "o.m", "o = O(); o.m = 0.0", OBJECT),
    "slots": Form("o.m", "o.m += v", "o.m", "o = S(); o.m = 0.0", "class S:\n    __slots__ = ('m',)"),
    "class": Form("O.m", "O.m += v", "O.m", define=OBJECT),
    "function": Form("f.m", "f.m += v", "f.m", define="def f():\n    pass\nf.m = 0.0"),
    "element": Form('d["m"]', "d['m'] += v", "d['m']", "d = {'m': 0.0}"),
    "element of a variable key": Form("d", "d[key] += v", "d[key]", "d, key = {'m': 0.0}, 'm'"),
    "item": Form("d", "d[0] += v", "d[0]", "d = [0.0]"),
    "pair": Form("t", "t = (t[0] + v, 1)", "t[0]", "t = (0.0, 1)"),
    "named pair": Form("t", "t = t._replace(m=t.m + v)", "t.m", "t = S()", PAIR),
    "deque": Form("q", "q.append(v)", "sum(q)", "q = deque([0.0], 4)", "from collections import deque"),
    "stack": Form("q", "q.append(v); q = q[-3:]", "sum(q)", "q = []"),
    "heap": Form("h", "heapq.heappush(h, v)", "sum(h)", "h = []", "import heapq"),
    "set": Form("seen", "seen.add(v)", "len(seen)", "seen = set()"),
    "global": Form("G", "bump(v)", "now()", define=GLOBAL),
    "closure": Form("make:m", "bump(v)", "now()", "bump, now = make()", CLOSURE),
    "default": Form("acc:seen", "acc(v)", "acc()", define=DEFAULT),
    "call": Form("a.m", "a(v)", "a.m", "a = A()", CALLED),
    "property": Form("meter.n, meter.total", "meter.update(v)", "meter.mean", "meter = Meter()", METER),
    "meter by name": Form("meters.meters", "meters.update(loss=v)", BY_NAME, MADE, METER),
    "meter as attribute": Form("meters.meters", "meters.update(loss=v)", "meters.loss.mean", MADE, METER),
    "objects in a list": Form("os", "os[0].m += v", "sum(o.m for o in os)", "os = [O(), O()]", OBJECT),
    "objects in a dict": Form("os", "os[key].update(v)", "sum(map(mean, os.values()))", BY_KEY, METER),
    "tensor in place": Form("m", "m.mul_(0.9).add_(v)", "m", "m = T()", TENSOR),
    "data of a tensor": Form("m", "m.data = m.data + v", "m", "m = T()", TENSOR),
    "forward hook": Form('seen["n"]', SEEN, "model(x)", "model = Model(_forward_hooks=hook)", HOOKED),
    "pre-hook": Form('seen["n"]', SEEN, "model(x)", "model = Model(_forward_pre_hooks=pre_hook)", HOOKED),
    "method as a hook": Form(
        "c.n", "c.n += 1", "model(x)", "c = Counter(); model = Model(_forward_hooks=c.hook)", HOOKED
    ),
    "object as a hook": Form(
        "c.n", "c.n += 1", "model(x)", "c = Counter(); model = Model(_forward_hooks=c)", HOOKED
    ),
    "lambda as a hook": Form(
        'seen["n"]',
        SEEN,
        "model(x)",
        "model = Model(_forward_hooks=lambda module, args, out: out * seen['n'])",
        HOOKED,
    ),
    "module of a hook": Form(
        "model.n",
        "model.n += 1",
        "model(x)",
        "model = Layer(_forward_hooks=lambda module, args, out: out * module.n); model.n = 0",
        HOOKED,
    ),
    "hook of a parameter": Form(
        'seen["n"]',
        SEEN,
        "model(x)",
        "model = Model(); model._parameters = {'weight': Parameter(of_gradient)}",
        HOOKED,
    ),
    "hook of an optimizer": Form(
        'seen["n"]',
        f"{SEEN}; opt.step()",
        "opt.step()",
        "opt = Optimizer(); opt._optimizer_step_pre_hooks = {0: pre_hook}",
        f"{HOOKED}\nclass Optimizer:\n    def __init__(self):\n        self.param_groups = []\n"
        "    def step(self):\n        return 0",
    ),
    "autograd function": Form(
        "Reversed.factor", "Reversed.factor += 0.1", "Reversed.apply(x)", define=REVERSED
    ),
    "first use after hasattr": Form(
        "o.p",
        "if not hasattr(o, 'p'):\n            o.p = 0.0\n        o.p += v",
        "o.p",
        "o = O(); o.p = 0.0",
        OBJECT,
    ),
    "getattr with a default": Form(
        "o.p", "o.p = getattr(o, 'p', 0.0) + v", "getattr(o, 'p', 0.0)", "o = O()", OBJECT
    ),
    "name in vars": Form(
        "o.p",
        "if 'p' not in vars(o):\n            o.p = 0.0\n        o.p += v",
        "vars(o).get('p', 1)",
        "o = O()",
        OBJECT,
    ),
    "update of vars": Form("o.p", "vars(o).update(p=v)", "getattr(o, 'p', 0.0)", "o = O()", OBJECT),
    "update of __dict__": Form(
        "o.p", "o.__dict__.update({'p': v})", "getattr(o, 'p', 0.0)", "o = O()", OBJECT
    ),
    "get": Form('d["m"]', "d['m'] = d.get('m', 0.0) + v", "d.get('m', 0.0)", "d = {}"),
    "setdefault": Form("d", "d['m'] = v", "d.setdefault('m', 0.0)", "d = {}"),
    "update of a dict": Form('d["m"]', "d.update(m=d['m'] + v)", "d.get('m', 0.0)", "d = {'m': 0.0}"),
    "__setitem__": Form('d["m"]', "d.__setitem__('m', d['m'] + v)", "d['m']", "d = {'m': 0.0}"),
    "setitem": Form('d["m"]', "operator.setitem(d, 'm', v)", "d['m']", "d = {'m': 0.0}", "import operator"),
    "rotation": Form("q", "q.rotate(1)", "q[0]", "q = deque([0.0, 1.0])", "from collections import deque"),
    "order of a list": Form("q", "q.reverse()", "q[0]", "q = [0.0, 1.0]"),
    "decorated method": Form("d.m", "d.add(v)", "d.m", "d = D()", DECORATED),
    "decorated method, argument by name": Form("d.m", "d.add(v * 2, by=v + 1)", "d.m", "d = D()", DECORATED),
    "event": Form("o.m", "bus.fire('step')", "o.m", LISTENER, EVENTS),
    "map": Form("o.m", "list(map(o.add, [v]))", "o.m", LISTENER, EVENTS),
    "function that a function calls": Form(
        "o.m", "pool.submit(o.add, v)", "o.m", f"{LISTENER}; pool = Pool()", EVENTS
    ),
    "end of a with statement": Form("o.m", "with o:\n            pass", "o.m", LISTENER, EVENTS),
    "view of a tensor": Form("m", "m.data.view(-1).mul_(v)", "m", "m = T()", VIEWED),
    "fill of an array": Form("m", "m.fill(v)", "m", "m = T()", VIEWED),
    "copy into an array": Form("m", "copyto(m, v)", "m", "m = T()", VIEWED),
    "output of a function": Form("m", "multiply(m, v, out=m)", "m", "m = T()", VIEWED),
    "generator": Form("cur", "cur = next(g)", "cur", "g = iter(range(9)); cur = 0.0"),
}

SCRIPT = """{define}


def main(found):
    {init}
    for step in [0]:
        v, x = 1.0, X()
        loss = x * ({read})
        loss.backward()
        found()
        {change}


def mean(meter):
    return meter.mean


class X:
    def __mul__(self, other):
        return self

    def backward(self):
        pass
"""


@pytest.mark.parametrize("name", FORMS)
def test_the_variable_of_each_form_is_found(tmp_path: Path, name: str) -> None:
    """Regression: of 80 forms, 16 were not found, and a replacement began with the value of a start, silently."""
    form = FORMS[name]
    text = SCRIPT.format(**form._asdict())
    (file := tmp_path / "forms.py").write_text(text)
    linecache.checkcache()
    module = types.ModuleType("forms")
    exec(compile(text, str(file), "exec"), vars(module))
    seen: set[str] = set()

    def search() -> None:
        places = tuple(each for each in places_in_script() if each[0] == str(file))
        seen.update(each.name for each in placed_variables(places, update=True))

    main: Callable[[Callable[[], None]], None] = module.main
    main(search)
    assert set(form.found.split(", ")) <= seen, seen
