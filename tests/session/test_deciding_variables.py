"""The variables that decide about a collective or an update of a script, found in its source."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from holdfast.runtime.worker.script_frames import owners_of, values_of
from holdfast.session.variables.deciding_variables import (
    counts,
    deciding_variables,
    described,
    file_variables,
    filled,
    lasting_variables,
    placed_variables,
    renewed_containers,
    set_by_each_step,
    stores,
)
from holdfast.session.variables.variable_history import VariableHistory

HEAD = """
tick, started, best = 0, 0, {"loss": 1.0}
for epoch in s.epochs(9):
    count = 0
    for step in s.steps(loader):
        with step as batch:
            loss = train(batch)
"""
AFTER: dict[str, tuple[str, ...]] = {
    "if tick > 0 and step.number < started + 3:\n    continue\nreduce()\ntick += 1\nstarted = step.number": (
        "tick",
        "started",
    ),
    "count += 1\nif count % 10 == 0:\n    reduce()": ("count",),
    "number = step.number + 1\nif number % 10 == 0:\n    reduce()": (),
    "done = tick > 4\nif done:\n    reduce()\ntick = tick + 1": ("tick",),
    "if loss < best['loss']:\n    reduce()\n    best['loss'] = loss": ('best["loss"]',),
    "if self.next <= step.number:\n    reduce()\n    self.next += 10": ("self.next",),
    "if every and step.number % every == 0:\n    reduce()": (),
    "reduce()": (),
    "while (tick := tick + 1) % 3:\n    reduce()": ("tick",),
}  # fmt: skip


@pytest.mark.parametrize("after", AFTER)
def test_names_that_a_step_takes_over_from_the_step_before(tmp_path: Path, after: str) -> None:
    text = HEAD + "".join(f"        {line}\n" for line in after.splitlines())
    (file := tmp_path / "train.py").write_text(text)
    line = next(n for n, code in enumerate(text.splitlines(), 1) if "reduce()" in code)
    assert deciding_variables(((str(file), line),)) == AFTER[after]


UPDATES: dict[str, tuple[str, ...]] = {
    # An element of a container in an object: the other attributes of the object are not written.
    "a.pool.items[0] = x\nloss = x * a.pool.count\nloss.backward()\noptimizer.step()\na.pool.count += 1": (
        "a.pool.count",
    ),
    "loss.backward()\nclip_grad_norm_(net.parameters(), limit)\noptimizer.step()\nlimit *= 0.9": ("limit",),
    # A pool of earlier images (CycleGAN): its items reach the loss through a list.
    (
        "parts = []\n"
        "for image in images:\n"
        "    if draw() > 0.5:\n"
        "        parts.append(pool[0])\n"
        "        pool[0] = image\n"
        "    else:\n"
        "        parts.append(image)\n"
        "loss = cat(parts)\n"
        "loss.backward()\n"
        "optimizer.step()"
    ): ("pool",),
    "loss = x\nloss.backward()\noptimizer.step()\nlosses.append(total)\ntotal += loss": (),
    # Batches that the script draws before the block.
    "drawn = next(others)\nloss = x * drawn\nloss.backward()\noptimizer.step()": ("others",),
    (
        "try:\n"
        "    drawn = next(others)\n"
        "except StopIteration:\n"
        "    others = iter(loader)\n"
        "    drawn = next(others)\n"
        "loss = x * drawn\n"
        "loss.backward()\n"
        "optimizer.step()"
    ): ("others",),
    "others = iter(loader)\nloss = x * next(others)\nloss.backward()\noptimizer.step()": (),
    # What a block draws may be used in a way that the search does not follow.
    "drawn = next(others)\nprint(drawn)\nloss = x\nloss.backward()\noptimizer.step()": ("others",),
    # Caches: a process that begins with an empty one makes the same entries again.
    (
        "n = len(batch)\n"
        "if n not in masks:\n"
        "    masks[n] = ones(n) / n\n"
        "loss = x * masks[n]\n"
        "loss.backward()\n"
        "optimizer.step()"
    ): (),
    (
        "n = len(batch)\n"
        "if mask is None or mask.size(0) != n:\n"
        "    mask = ones(n)\n"
        "loss = x * mask\n"
        "loss.backward()\n"
        "optimizer.step()"
    ): (),
    (
        "n = len(batch)\n"
        "if n not in masks:\n"
        "    part = eye(n, device=batch.device)\n"
        "    masks[n] = part / n\n"
        "loss = x * masks[n]\n"
        "loss.backward()\n"
        "optimizer.step()"
    ): (),
    (
        "n = len(batch)\n"
        "if n != size:\n"
        "    size = n\n"
        "    part = ones(n)\n"
        "    mask = part / n\n"
        "loss = x * mask\n"
        "loss.backward()\n"
        "optimizer.step()"
    ): (),
    (
        "n = len(batch)\n"
        "if n != size or mask is None or mask.device != batch.device:\n"
        "    size = n\n"
        "    mask = ones(size, device=batch.device)\n"
        "loss = x * mask\n"
        "loss.backward()\n"
        "optimizer.step()"
    ): (),
    # Two caches under one condition, whose keys are not the value that the condition asks for (HiFi-GAN).
    (
        "if top not in bases:\n"
        "    base = filters(bands, top)\n"
        "    bases[str(top) + str(batch.device)] = base.to(batch.device)\n"
        "    windows[str(batch.device)] = hann(width).to(batch.device)\n"
        "loss = x * bases[str(top) + str(batch.device)] * windows[str(batch.device)]\n"
        "loss.backward()\n"
        "optimizer.step()"
    ): (),
    (
        "key = f'{top}_{batch.device}'\n"
        "if key not in bases:\n"
        "    bases[key] = filters(bands, top)\n"
        "    windows[key] = hann(width)\n"
        "loss = x * bases[key] * windows[key]\n"
        "loss.backward()\n"
        "optimizer.step()"
    ): (),
    # The second container has an entry that follows from another value than its key, or from a change.
    (
        "n, m = shape(batch)\n"
        "if n not in bases:\n"
        "    bases[n] = filters(n)\n"
        "    windows[m] = hann(n)\n"
        "loss = x * bases[n] * windows[m]\n"
        "loss.backward()\n"
        "optimizer.step()"
    ): ("bases", "windows"),
    (
        "n = len(batch)\n"
        "if n not in bases:\n"
        "    bases[n] = filters(n)\n"
        "    made = made + 1\n"
        "    windows[n] = hann(n)\n"
        "loss = x * bases[n] * windows[n] * made\n"
        "loss.backward()\n"
        "optimizer.step()"
    ): ("bases", "made", "windows"),
    # No caches: the values depend on earlier ones, or on the largest size so far, or the size is another one.
    (
        "n = len(batch)\n"
        "if n != size:\n"
        "    size = n\n"
        "    changes = changes + 1\n"
        "loss = x * changes\n"
        "loss.backward()\n"
        "optimizer.step()"
    ): ("size", "changes"),
    (
        "n = len(batch)\n"
        "if n != size:\n"
        "    mask = ones(size)\n"
        "    size = n\n"
        "loss = x * mask\n"
        "loss.backward()\n"
        "optimizer.step()"
    ): ("size", "mask"),
    (
        "n = len(batch)\n"
        "if n != size:\n"
        "    size = 5\n"
        "    mask = ones(n)\n"
        "loss = x * mask\n"
        "loss.backward()\n"
        "optimizer.step()"
    ): ("size", "mask"),
    (
        "n = len(batch)\n"
        "loss = x * mask\n"
        "if n != size:\n"
        "    size = n\n"
        "    mask = ones(n)\n"
        "loss.backward()\n"
        "optimizer.step()"
    ): ("mask", "size"),
    (
        "n = len(batch)\n"
        "if n > size:\n"
        "    size = n\n"
        "    mask = ones(n) / n\n"
        "loss = x * mask[:n]\n"
        "loss.backward()\n"
        "optimizer.step()"
    ): ("size", "mask"),
    # No caches: the entry depends on the data, or the first time of a key counts.
    (
        "n = len(batch)\n"
        "if n not in goals:\n"
        "    goals[n] = net(batch)\n"
        "loss = x * goals[n]\n"
        "loss.backward()\n"
        "optimizer.step()"
    ): ("goals",),
    (
        "n = len(batch)\n"
        "if n not in seen:\n"
        "    weight = 2.0\n"
        "    seen[n] = True\n"
        "else:\n"
        "    weight = 1.0\n"
        "loss = x * weight\n"
        "loss.backward()\n"
        "optimizer.step()"
    ): ("seen",),
    (
        "n = len(batch)\n"
        "weight = 2.0 if n not in seen else 1.0\n"
        "if n not in seen:\n"
        "    seen[n] = n\n"
        "loss = x * weight\n"
        "loss.backward()\n"
        "optimizer.step()"
    ): ("seen",),
    (
        "if best is None or loss < best:\n    best = loss\nloss = x * best\nloss.backward()\noptimizer.step()"
    ): ("best",),
    (
        "n = len(batch)\n"
        "if n not in masks:\n"
        "    masks[n] = ones(n) * scale\n"
        "loss = x * masks[n]\n"
        "loss.backward()\n"
        "optimizer.step()\n"
        "scale *= 0.9"
    ): ("masks",),
    # A function of the standard library changes its argument, and an attribute of an item changes the container.
    "loss = x * heap[0]\nloss.backward()\noptimizer.step()\nheapq.heappush(heap, number)": ("heap",),
    "loss = x * sum(m.v for m in meters)\nloss.backward()\noptimizer.step()\nmeters[k].v += 1": ("meters",),
    "loss = x * a.pool.size\nloss.backward()\noptimizer.step()\na.pool.items[0] = x": (),
    "if step.number - last >= 3:\n    optimizer.step()\n    last = step.number": ("last",),
    "for g in optimizer.param_groups:\n    g['lr'] = rate(it)\noptimizer.step()\nit += 1": ("it",),
    "for g in optimizer.param_groups:\n    g['momentum'] = warm(it)\noptimizer.step()\nit += 1": ("it",),
    "adjust_learning_rate(optimizer, it)\noptimizer.step()\nit += 1": ("it",),
    "lr_scheduler.step(it)\noptimizer.step()\nit += 1": ("it",),
    "if it == 9:\n    optimizer.param_groups[0]['lr'] *= 0.1\noptimizer.step()\nit += 1": ("it",),
    "weight = min(1, it / 9)\nloss = weight * model(batch)\nloss.backward()\noptimizer.step()\nit += 1": (
        "it",
    ),
    "scaler.scale(model(batch, it)).backward()\nscaler.step(optimizer)\nit += 1": ("it",),
    "accelerator.backward(model(batch) / it)\noptimizer.step()\nit += 1": ("it",),
    "it = step.number\nmodel(batch, it).backward()\noptimizer.step()": (),
    "loss = model(batch)\nloss.backward()\noptimizer.step()\nmean = 0.9 * mean + 0.1 * loss.item()": (),
    "scheduler.step()\noptimizer.step()\nseen += len(batch)": (),
    "optimizer.step()\nit += 1\nif it > 9:\n    scheduler.step()": ("it",),
    "for g in groups:\n    g['lr'] = 0.1 * past['step']\noptimizer.step()\npast['step'] += 1": (
        'past["step"]',
    ),
    "past['shown'] = 1\nmodel(batch, past['n']).backward()\noptimizer.step()\npast['n'] += 1": ('past["n"]',),
    "past['n'] = step.number\nmodel(batch, past['n']).backward()\noptimizer.step()\npast['n'] += 1": (),
    "model(batch, past['n']).backward()\noptimizer.step()\npast = {'n': step.number}": ('past["n"]',),
    "model(batch, past.n).backward()\noptimizer.step()\npast = made(batch)": ("past.n",),
    "past = made(batch)\nmodel(batch, past.n).backward()\noptimizer.step()": (),
    "model(batch, past.mean()).backward()\noptimizer.step()\npast = batch.detach()": ("past",),
    "past = batch.detach()\nmodel(batch, past.mean()).backward()\noptimizer.step()": (),
    "optimizer.step()\nlosses.append(loss.item())\nif min(losses) < 0.1:\n    break": ("losses",),
    "losses = []\nlosses.append(batch)\nmodel(losses).backward()\noptimizer.step()": (),
    "for g in groups:\n    g['lr'] = g['lr'] * 0.9\noptimizer.step()": (),
    "batch['w'] = batch['w'] / 2\nmodel(batch['w']).backward()\noptimizer.step()": (),
    "weights[0] *= it\noptimizer.step()\nit += 1": ("it",),
    "made().rate *= it\noptimizer.step()\nit += 1": ("it",),
    "optimizer.step()\nif loss < best:\n    best, late = loss, 0\nelse:\n    late += 1\nif late > 3:\n    break": (
        "best",
        "late",
    ),
    "optimizer.step()\nif step.number > 9:\n    break\nseen += 1": (),
    "optimizer.step()\nseen += 1\nif seen > 9:\n    return": ("seen",),
    "optimizer.step()\nseen += 1\nif seen > 9:\n    print(seen)\n    sys.exit(0)": ("seen",),
    "optimizer.step()\nseen += 1\nfor each in parts:\n    if seen > 9:\n        break": (),
    "optimizer.step()\nseen += 1\nif seen > 9:\n    raise ValueError": (),
    "if it < 9:\n    rate = it\nelse:\n    rate = 9\nset_lr(rate)\noptimizer.step()\nit += 1": ("it",),
    "rate = 9\nif it < 9:\n    rate = it\noptimizer.param_groups[0]['lr'] = rate\noptimizer.step()\nit += 1": (
        "it",
    ),
    "loss = sum(losses[k] * ws[k] for k in losses if k in ws)\nloss.backward()\noptimizer.step()": (),
    "loss = sum(ws[it] * p.sum() for p in parts)\nloss.backward()\noptimizer.step()\nit += 1": ("it",),
    "for part in parts(it):\n    model(part).backward()\noptimizer.step()\nit += 1": ("it",),
    "parts = [drawn(it) for _ in range(2)]\nfor n, part in enumerate(parts):\n    model(part).backward()\n"
    "optimizer.step()\nit += 1": ("it",),
    "lot = made(it)\nmodel(lot['w']).backward()\noptimizer.step()\nit += 1": ("it",),
    "if step.number % 3 == 0:\n    w = 1 / step.number\n(w * model(batch)).backward()\noptimizer.step()": (
        "w",
    ),
    "if step.again:\n    pass\nelse:\n    w = 2\n(w * model(batch)).backward()\noptimizer.step()": ("w",),
    "for b in batch:\n    if b:\n        w = 2\n    (w * model(b)).backward()\noptimizer.step()": ("w",),
    "if step.number:\n    if batch:\n        w = 2\n    else:\n        w = 3\n    (w * model(batch)).backward()\n"
    "optimizer.step()": (),
    "if step.number:\n    w = 2\nelse:\n    w = 3\n(w * model(batch)).backward()\noptimizer.step()": (),
    "w = 1\nif step.number:\n    w = 2\n(w * model(batch)).backward()\noptimizer.step()": (),
    "if every:\n    w = step.number\n(w * model(batch)).backward()\noptimizer.step()": (),
    "if step.number % 3:\n    w = 2\nx = model(batch)\nif step.number % 3:\n    x = x * w\nx.backward()\n"
    "optimizer.step()": (),
    "if batch:\n    w = 2\nx = model(batch)\nif step.number % 3 and batch and w:\n    x = x * w\nx.backward()\n"
    "optimizer.step()": (),
    "if step.number % 3 and batch:\n    w = 2\nif batch:\n    x = w * x\nx.backward()\noptimizer.step()": (
        "w",
        "x",
    ),
    "if step.number % 3:\n    if batch:\n        w = 2\nx = batch\nif batch:\n    x = w * x\nx.backward()\n"
    "optimizer.step()": ("w",),
    "if step.number % 3:\n    if batch:\n        w = 2\nx = batch\nif batch and step.number % 3:\n    x = w * x\n"
    "x.backward()\noptimizer.step()": (),
    "if step.number % 3:\n    w = 2\nelse:\n    continue\n(w * model(batch)).backward()\noptimizer.step()": (),
    "if step.number % 3:\n    continue\nw = 2\n(w * model(batch)).backward()\noptimizer.step()": (),
    # An assignment after the update reaches it where the next turn does not write the variable first.
    "x = model(batch)\nx.backward()\noptimizer.step()\nif n % 8 == 0:\n    x = model(test)\nn += 1": (),
    "x.backward()\noptimizer.step()\nx = n * model(batch)\nn += 1": ("n",),
    "(x * 2).backward()\noptimizer.step()\nif n % 8 == 0:\n    x = model(test)\nn += 1": ("x", "n"),
    "x = model(batch)\n(x * w).backward()\noptimizer.step()\nif n % 8 == 0:\n    x = model(test)\n    w = x\nn += 1": (
        "w",
        "n",
    ),
    "if batch:\n    x = model(batch)\n(x * 2).backward()\noptimizer.step()\nif n % 8 == 0:\n    x = 0\nn += 1": (
        "x",
        "n",
    ),
    "x = model(batch)\nfor p in parts:\n    (x * p).backward()\n    if n % 8 == 0:\n        x = 0\n    n += 1\n"
    "optimizer.step()": ("n",),
    "x = 0\nfor p in parts:\n    x = model(p)\n    x.backward()\n    if n % 8 == 0:\n        x = 0\n    n += 1\n"
    "optimizer.step()": (),
    "x = 0\ndef closure():\n    x.backward()\nif n % 8 == 0:\n    x = 1\nn += 1\ntrain(closure)\noptimizer.step()": (
        "n",
    ),
    # A read in a line of a log has no part in the update.
    "print(w)\nw = step.number\n(w * model(batch)).backward()\noptimizer.step()": (),
    "print(w)\nx = w * model(batch)\nw = step.number\nx.backward()\noptimizer.step()": ("w",),
    "if step.number % 3:\n    w = step.number\n    (w * model(batch)).backward()\nprint(w)\noptimizer.step()": (),
    # An entry of a cache has the same value at each time.
    "w = made(batch, cache)\nif w not in cache:\n    cache[w] = 2\n(cache[w] * w).backward()\noptimizer.step()\n"
    "if n % 8 == 0:\n    if test not in cache:\n        cache[test] = 2\nn += 1": ("cache",),
    "(cache['w'] * 2).backward()\noptimizer.step()\nif n % 8 == 0:\n    if 'w' not in cache:\n        cache['w'] = 2\n"
    "n += 1": ('cache["w"]', "n"),
    "optimizer.step()\nfor p in model.parameters():\n    p.sub_(it * p)\nit += 1": ("it",),
    "optimizer.step()\nfor n, p in zip(names, ema.named_buffers()):\n    p.data = it * p.data\nit += 1": (
        "it",
    ),
    # Another state dict in the place of the one that goes into a file (Demucs). Without it, the weights change.
    "optimizer.step()\npackage = {}\npackage['state'] = model.state_dict()\npackage[name] = ema.state_dict()\n"
    "if changed:\n    package['state'] = best\n    changed = False\nif n % 8 == 0:\n    changed = True\nn += 1": (),
    "optimizer.step()\nkept = ema.state_dict()\nif changed:\n    kept['w'] = best\n    changed = False\n"
    "if n % 8 == 0:\n    changed = True\nn += 1": ("changed", "n"),
    "optimizer.step()\npackage['state'] = ema.state_dict()\nif n > 8:\n    package['state'][name] = best\nn += 1": (
        "n",
    ),
    "optimizer.step()\nkept = ema.state_dict()\nfor k in kept:\n    p = kept[k]\n    p.add_(q, alpha=it)\nit += 1": (
        "it",
    ),
    "optimizer.step()\nif it % 9 == 0:\n    for x in test:\n        total.add_(model(x))\nit += 1": (),
    "optimizer.step()\nfor p in model.parameters():\n    norm.add_(it * p)\nit += 1": (),
    "optimizer.step()\nfor name in parts:\n    shown[name] = it * parts[name]\nit += 1": (),
    # A limit of gradients that follows from earlier norms (AutoClip).
    "model(batch).backward()\npast.append(norm(model))\nlimit = percentile(past, 10)\n"
    "torch.nn.utils.clip_grad_norm_(parts, max_norm=limit)\noptimizer.step()": ("past",),
    # An item of an element, and a dict that an expression reads as a whole.
    "rows['x'][at] = batch\nat += 1\nmodel(rows['x']).backward()\noptimizer.step()": ("at", 'rows["x"]'),
    "rows['x'][at] = batch\nmodel({k: rows[k] for k in rows}).backward()\noptimizer.step()": ('rows["x"]',),
    "own.rows['x'][at] = batch\nat += 1\nmodel(batch, own.rows).backward()\noptimizer.step()": (
        "at",
        'own.rows["x"]',
    ),
    "for t in range(9):\n    rows['x'][t] = batch\nmodel(rows['x']).backward()\noptimizer.step()": (),
    "rows['x'][0][1] = batch\nmodel(rows['y']).backward()\noptimizer.step()": (),
    "rows[0][1] += batch\nmodel(rows[0]).backward()\noptimizer.step()": ("rows",),
    "past['n'] = step.number\nmodel(batch, **past).backward()\noptimizer.step()": (),
    "past['n'] += 1\nmodel(batch, **past).backward()\noptimizer.step()": ('past["n"]',),
    # Several updates in one block (PPO): each block makes the order of the parts again, before its inner loops.
    "order = made(batch)\nfor turn in range(2):\n    shuffle(order)\n    model(order).backward()\n"
    "    optimizer.step()": (),
    "for turn in range(2):\n    shuffle(order)\n    model(order).backward()\n    optimizer.step()": (
        "order",
    ),
    "for part in batch:\n    model(part).backward()\n    optimizer.step()\n    seen += 1\n    if seen > 9:\n"
    "        break": ("seen",),
    "w = 1\nwhile w < 9 + it:\n    (w * model(batch)).backward()\n    optimizer.step()\n    w += 1\nit += 1": (
        "it",
    ),
    "if not hasattr(own, 'w'):\n    own.w = 1\n(own.w * model(batch)).backward()\noptimizer.step()\nown.w *= 2": (
        "own.w",
    ),
    "(getattr(own, 'w', 1) * model(batch)).backward()\noptimizer.step()\nown.w = getattr(own, 'w', 1) * 2": (
        "own.w",
    ),
    "(vars(own).get('w', 1) * model(batch)).backward()\noptimizer.step()\nif 'w' not in vars(own):\n    own.w = 1\n"
    "own.w *= 2": ("own.w",),
    "(getattr(own, 'w', 1) * model(batch)).backward()\noptimizer.step()\ntry:\n    own.w *= 2\n"
    "except AttributeError:\n    own.w = 1": ("own.w",),
    "if not hasattr(own, 'w'):\n    own.w = made(9)\n(own.w * model(batch)).backward()\noptimizer.step()": (
        "own.w",
    ),
    "x = own.part\n(x.w * own.part.w).backward()\noptimizer.step()\nif n % 8 == 0:\n    x.w = 2\nn += 1": (
        "n",
    ),
}


STORES = """
for step in s.steps(loader):
    optimizer.step()
    for name in parts:
        shadow[name] = it * shadow[name]
    own.total = own.total + it
    past["step"] = it
    queue[at] = batch
    at = (at + 1) % 8
    it += 1
"""


def test_what_a_loop_stores_in_the_state_of_the_session_counts_as_an_update(tmp_path: Path) -> None:
    (file := tmp_path / "train.py").write_text(STORES)
    places = ((str(file), 3),)
    assert {each.name for each in stores(places)} == {"shadow", "own.total", 'past["step"]', "queue"}
    for state in ("shadow", "own.total", 'past["step"]'):
        placed = placed_variables(places, update=True, state=frozenset({state}))
        assert "it" in {each.name for each in placed}, state
    assert [each.name for each in placed_variables(places, update=True, state=frozenset({"queue"}))] == ["at"]
    assert not placed_variables(places, update=True)


@pytest.mark.parametrize("code", UPDATES)
def test_names_on_which_an_update_depends(tmp_path: Path, code: str) -> None:
    text = HEAD + "".join(f"            {line}\n" for line in code.splitlines())
    (file := tmp_path / "train.py").write_text(text)
    line = next(
        n
        for n, code in enumerate(text.splitlines(), 1)
        if "optimizer.step()" in code or "scaler.step" in code
    )
    assert deciding_variables(((str(file), line),), update=True) == UPDATES[code]


def test_a_method_that_counts_its_calls(tmp_path: Path) -> None:
    method = ("self.seen += 1", "if self.seen % 5:", "    return", "reduce()")
    text = "class Meter:\n    def add(self, value):\n" + "".join(f"        {line}\n" for line in method)
    (helper := tmp_path / "meter.py").write_text(text)
    (script := tmp_path / "train.py").write_text(HEAD + "        meter.add(loss)\n")
    places = ((str(helper), 6), (str(script), 8))
    assert deciding_variables(places) == ("self.seen",)
    assert described(places) == "meter.py:6, from train.py:8"


def test_a_function_that_makes_several_updates_of_a_block(tmp_path: Path) -> None:
    """Its local variables end with its call, and an attribute that it writes first carries nothing."""
    method = (
        "global calls",
        "order = made(batch)",
        "self.parts = made(batch)",
        "for turn in range(2):",
        "    shuffle(order)",
        "    shuffle(self.parts)",
        "    self.seen += 1",
        "    calls += 1",
        "    model(order, self.parts, self.seen, calls).backward()",
        "    optimizer.step()",
    )
    text = "class Agent:\n    def learn(self, batch):\n" + "".join(f"        {line}\n" for line in method)
    (helper := tmp_path / "agent.py").write_text(text)
    (script := tmp_path / "train.py").write_text(HEAD + "            call(agent.learn, batch)\n")
    places = ((str(helper), 12), (str(script), 8))
    assert set(deciding_variables(places, update=True)) == {"calls", "self.seen"}
    (generator := tmp_path / "other.py").write_text(text + "            yield\n")
    assert set(deciding_variables(((str(generator), 12), places[1]), update=True)) == {
        "calls",
        "order",
        "self.parts",
        "self.seen",
    }


def test_values_of_attributes_and_elements() -> None:
    holder = SimpleNamespace(past={"a.b": 3, "inner": {"n": 4}})
    names = ('holder.past["a.b"]', 'holder.past["inner"]["n"]', 'holder.past["none"]', 'holder["past"]')
    assert holder and values_of(names) == dict(zip(names, (3, 4), strict=False))
    assert owners_of(names[1]) == ("holder", "holder.past", 'holder.past["inner"]')


def test_without_source() -> None:
    assert deciding_variables((("<stdin>", 3),)) == () and described((("<stdin>", 3),)) == "<stdin>:3"


LASTING: dict[str, tuple[str, ...]] = {
    "optimizer.step()\ntick += 1\ncount += 1": ("tick",),
    "optimizer.step()\ntick = tick + len(batch)": ("tick",),
    "optimizer.step()\ntick += 1\nif step.last_in_epoch:\n    tick = 0": (),
    "optimizer.step()\nstate.seen += 1\nsteps['all'] += 1": ("state.seen", 'steps["all"]'),
    "optimizer.step()\nstate = made()\nstate.seen += 1": (),
    "optimizer.step()\nif loss < best:\n    best, late = loss, 0\nelse:\n    late += 1": ("best", "late"),
}


@pytest.mark.parametrize("code", LASTING)
def test_variables_that_no_epoch_sets(tmp_path: Path, code: str) -> None:
    text = HEAD + "".join(f"            {line}\n" for line in code.splitlines())
    (file := tmp_path / "train.py").write_text(text)
    assert lasting_variables(((str(file), 7),)) == set(LASTING[code])


COUNTS: dict[str, tuple[str, ...]] = {
    "optimizer.step()\ntick += 1\ncount += 1": ("tick",),
    "optimizer.step()\nif step.committed:\n    tick = tick + len(batch)": ("tick",),
    "optimizer.step()\nstate.seen += 1\nsteps['all'] += 1": ("state.seen", 'steps["all"]'),
    "optimizer.step()\nstate = made()\nstate.seen += 1": (),
    "optimizer.step()\nif loss < best:\n    best, late = loss, 0\nelse:\n    late += 1": (),
    "optimizer.step()\nfor tick in (1, 2):\n    tick += 1": (),
    "optimizer.step()\nleft -= 1\nlong *= 2\nlast = tick + 1": (),
}


@pytest.mark.parametrize("code", COUNTS)
def test_variables_that_a_loop_only_adds_to(tmp_path: Path, code: str) -> None:
    text = HEAD + "".join(f"            {line}\n" for line in code.splitlines())
    (file := tmp_path / "train.py").write_text(text)
    assert counts(((str(file), 7),)) == set(COUNTS[code])


FILLED: dict[str, tuple[str, ...]] = {
    "past.append(loss)\noptimizer.step()": ("past",),
    "for k in parts:\n    total[k] = total[k] * 0.9 + parts[k]\noptimizer.step()": ("total",),
    "rows['x'][at] = batch\nat += 1\noptimizer.step()": ('rows["x"]', "at"),
    "past.append(loss)\noptimizer.step()\nif len(past) > 9:\n    past.popleft()": (),
    "past.append(loss)\noptimizer.step()\nif step.last_in_epoch:\n    past = []": (),
    "total += loss\noptimizer.step()\ntotal.zero_()": (),
    "rows[at] = batch\nrows[:] = 0\ntable[at] = batch\ndel table[0]\npast['n'] = 1": (),
}


@pytest.mark.parametrize("code", FILLED)
def test_containers_that_a_loop_only_fills(tmp_path: Path, code: str) -> None:
    text = HEAD + "".join(f"            {line}\n" for line in code.splitlines())
    (file := tmp_path / "train.py").write_text(text)
    assert filled(((str(file), 7),)) == set(FILLED[code])


def test_a_container_that_is_empty_where_a_process_continues_has_begun_again(tmp_path: Path) -> None:
    text = HEAD + "            past.append(loss)\n            optimizer.step()\n"
    (file := tmp_path / "train.py").write_text(text)
    place = str(file), 7
    before, after = VariableHistory(), VariableHistory()
    for length in (1, 2, 3):
        before.values = {"past": repr([0.5] * length)}
        before.committed(ended=False)
    after.stand_at(before.kept())
    after.values = {"past": "[0.7]"}
    assert not after.begun_again({"past": (place, (place,))})
    after.enters({"past": "an array (2,) of zeros"})  # a rollout may fill all of it
    assert not after.begun_again({"past": (place, (place,))})
    after.enters({"past": "[]"})
    assert after.begun_again({"past": (place, (place,))}) == {"past": "[0.7]"}
    after.enters({"past": repr([0.5] * 3)})
    assert not after.begun_again({"past": (place, (place,))})


def test_a_variable_with_the_value_of_the_start_of_the_job_has_begun_again(tmp_path: Path) -> None:
    """Code before the block has changed it, so it has neither its first value nor the newest one."""
    text = HEAD + "            place = move(place)\n            optimizer.step()\n"
    (file := tmp_path / "train.py").write_text(text)
    names = {name: ((str(file), 8), ((str(file), 8),)) for name in ("place", "rate")}
    before = VariableHistory()
    before.starts({"place": 1.0, "rate": 5.0, "unused": 0})
    for value in (1.5, 2.0, 2.5):
        before.values = {"place": value, "rate": 4.0}
        before.committed(ended=False)

    def again(kept: list[object], *, start: float, puts_back: bool = False, partly: str = "") -> set[str]:
        after = VariableHistory({partly})
        after.stand_at(kept)
        after.enters({"place": start, "rate": 5.0}, puts_back=puts_back)
        after.values = {"place": 1.7, "rate": 4.0}
        return set(after.begun_again(names))

    assert again(before.kept(), start=1.0) == {"place"}
    assert not again(before.kept(), start=2.5)
    assert not again(before.kept(), start=1.0, puts_back=True)
    assert not again(before.kept(), start=1.0, partly="place")
    assert not again(before.kept()[:3], start=1.0), "the state of an earlier version"


SET: dict[str, bool] = {
    "ema.updates = step.number\noptimizer.step()\nema.updates += 1": True,
    "optimizer.step()\nema.updates += 1": False,
    "if step.number > 3:\n    ema.updates = step.number\noptimizer.step()\nema.updates += 1": False,
    "optimizer.step()\nema.updates += 1\nema.updates = step.number": False,
    "ema = made(model)\noptimizer.step()\nema.updates += 1": True,
}


@pytest.mark.parametrize("code", SET)
def test_an_attribute_that_each_step_sets_before_using_it(tmp_path: Path, code: str) -> None:
    text = HEAD + "".join(f"            {line}\n" for line in code.splitlines())
    (file := tmp_path / "train.py").write_text(text)
    assert ("ema.updates" in set_by_each_step(((str(file), 7),))) == SET[code]


FILES: dict[str, tuple[str, ...]] = {
    "optimizer.step()\nif acc > best:\n    best = acc\n    torch.save(model, 'best.pt')": ("best",),
    "optimizer.step()\nbetter = acc > best\nbest = max(acc, best)\nif better:\n    shutil.copyfile(a, b)": (
        "best",
    ),
    "optimizer.step()\nif step.number % 10 == 0:\n    torch.save(model, 'last.pt')": (),
    "optimizer.step()\nseen += 1\nif seen % 10 == 0:\n    save_checkpoint(model)": ("seen",),
    "optimizer.step()\nseen += 1\nif seen % 10 == 0:\n    print(seen)": (),
    "optimizer.step()\nprint(seen)\nseen = step.number\nif seen % 10 == 0:\n    save_checkpoint(model)": (),
    "optimizer.step()\npart = step.number % 2\nif not part:\n    count = step.number\n"
    "if every and not part and count % 10 == 0:\n    save(model)": (),
}


@pytest.mark.parametrize("code", FILES)
def test_variables_that_decide_whether_a_file_is_saved(tmp_path: Path, code: str) -> None:
    text = HEAD + "".join(f"            {line}\n" for line in code.splitlines())
    (file := tmp_path / "train.py").write_text(text)
    place = str(file), 7
    found = [(each.name, each.place) for each in file_variables((place,))]
    assert found == [(name, place) for name in FILES[code]]


RENEWED: dict[str, set[str]] = {
    "past = {name: 0.9 * past[name] + w[name] for name in w}": {"past"},
    "past = [0.9 * old + new for old, new in zip(past, w)]": {"past"},
    "new = {}\nfor name in w:\n    new[name] = past[name] + w[name]\npast = new": {"past"},
    "past = averaged(past, w)": {"past"},
    "past = [[r * old + new for old, new in zip(kept, w)] for r, kept in zip(rates, past)]": {"past"},
    "for r in rates:\n    past[r] = {name: r * past[r][name] + w[name] for name in w}": {"past"},
    "for r, kept in past.items():\n    past[r] = [r * old + new for old, new in zip(kept, w)]": {"past"},
    "past = {name: w[name].clone() for name in w}": set(),
    "for r in rates:\n    past[r] = [each.clone() for each in w]": set(),
    "past = [each.clone() for each in w]": set(),
}


@pytest.mark.parametrize("line", RENEWED)
def test_a_container_that_each_step_replaces_by_one_that_follows_from_it(tmp_path: Path, line: str) -> None:
    past, new = {"x": object()}, {"x": object()}
    text = HEAD + "".join(f"        {each}\n" for each in ("optimizer.step()", *line.splitlines()))
    (file := tmp_path / "train.py").write_text(text)
    number = next(n for n, code in enumerate(text.splitlines(), 1) if "optimizer.step()" in code)
    assert renewed_containers(((str(file), number),)) == RENEWED[line] and past and new


def test_a_message_begins_with_the_variables_that_have_changed() -> None:
    """Regression: a message has room for four. Constants of SpeechBrain's features came before the learning rate."""
    history = VariableHistory()
    for rate in (0.1, 0.1, 0.05):
        history.values = {"features.first_call": True, "features.scale": 2.0, "annealing.rate": rate}
        history.committed(ended=False)
    assert list(history.changed_first()) == ["annealing.rate", "features.first_call", "features.scale"]


SUMMED: dict[str, tuple[str, ...]] = {
    "scheduler.step(total / len(loader))": ("total",),
    "mean = total / len(loader)\nif mean > last:\n    for group in groups:\n        group['lr'] *= 0.5": (
        "total",
    ),
    "if total < 1:\n    break": ("total",),
    "scheduler.step(evaluate(model))": (),
    "scheduler.step(epoch)\nprint(total)": (),
    "scheduler.step(loss)": (),
    "if total < best:\n    torch.save(model, 'best.pt')": (),
}
EPOCHS = """
def train(s, loader):
    for epoch in s.epochs(3):
        total = 0
        for step in s.steps(loader):
            with step as batch:
                loss = criterion(batch)
                loss.backward()
                optimizer.step()
            total += loss.item()
"""


@pytest.mark.parametrize("code", SUMMED)
@pytest.mark.parametrize("bar", [False, True])
def test_sums_over_an_epoch_on_which_the_next_epoch_depends(tmp_path: Path, code: str, bar: bool) -> None:
    text = EPOCHS + "".join(f"        {line}\n" for line in code.splitlines())
    if bar:
        text = text.replace("        total = 0\n", "        total, bar = 0, tqdm(s.steps(loader))\n")
        text = text.replace("in s.steps(loader):", "in bar:")
    (file := tmp_path / "train.py").write_text(text)
    assert deciding_variables(((str(file), 9),), update=True) == SUMMED[code]
