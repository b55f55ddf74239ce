"""Train a linear model: ``holdfast run --nproc-per-node 2 examples/new_framework/train.py``."""

import hashlib
import sys
import time

import numpy as np
import tiny
import tiny_holdfast

STEP_S = float(sys.argv[1]) if len(sys.argv) > 1 else 0.0  # a step of a real model takes time

draw = np.random.default_rng(1)
x = draw.normal(size=(256, 8))
table = tiny.Table(x, x @ np.arange(8.0) + 3.0, rows_per_batch=8)
model = tiny.Model(inputs=8)
optimizer = tiny.Momentum(model, rate=0.05)

with tiny_holdfast.session(optimizer) as session:
    for step in session.steps(table, epochs=3):
        with step as (inputs, targets):
            optimizer.step(model.gradients(inputs, targets))
        time.sleep(STEP_S)
        if step.committed:  # a step that a fault has aborted runs again
            print("step", session.step, flush=True)

weights = b"".join(array.tobytes() for _, array in sorted(model.weights.items()))
print("weights", hashlib.sha256(weights).hexdigest(), flush=True)
