"""MindSpore's own fault tolerance as its documents show it: OptTFTWrapper, TFTRegister, msrun; on CPU.

JOB_FOLDER is the folder of the results. JOB_DIE=RANK@STEP kills a rank once. The job resumes from the newest dying
checkpoint.
"""

import os
import signal
import time
from pathlib import Path

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
from mindspore import nn, train
from mindspore.communication import get_group_size, get_rank, init

FOLDER = Path(os.environ["JOB_FOLDER"])
BATCHES, EPOCHS = 10, 2

ms.set_device("CPU")
ms.set_context(mode=ms.GRAPH_MODE)
ms.set_auto_parallel_context(parallel_mode=ms.ParallelMode.DATA_PARALLEL, gradients_mean=True)
init()
rank, world = get_rank(), get_group_size()
ms.set_seed(1)


class Pace(train.Callback):  # type: ignore[misc]
    """A callback that slows the steps down and injects the fault."""

    def on_train_step_begin(self, run_context: train.RunContext) -> None:
        params = run_context.original_args()
        step = params.cur_epoch_num * BATCHES - BATCHES + (params.cur_step_num - 1) % BATCHES
        lost, _, when = os.environ.get("JOB_DIE", "-1@0").partition("@")
        mark = FOLDER / "died"
        if rank == int(lost) and step >= int(when) and not mark.exists():
            mark.write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_step_end(self, run_context: train.RunContext) -> None:
        print("step", run_context.original_args().cur_step_num, time.time(), flush=True)
        time.sleep(0.03)


rng = np.random.default_rng(0)
X = rng.standard_normal((BATCHES * 4 * world, 8)).astype(np.float32)
mine = [(X[i], X[i, :1]) for i in range(rank, len(X), world)]
dataset = ds.GeneratorDataset(mine, ["x", "y"], shuffle=False).batch(4)
net = nn.SequentialCell(nn.Dense(8, 16), nn.ReLU(), nn.Dense(16, 1))
optimizer = nn.Momentum(net.trainable_params(), 0.05, 0.9)
model = train.Model(net, nn.MSELoss(), nn.OptTFTWrapper(optimizer))
callback = train.TFTRegister(0, "127.0.0.1", int(os.environ["JOB_PORT"]), str(FOLDER / "ttp"))

first = 0
saved = sorted(FOLDER.glob("ttp/ttp_saved_checkpoints-step_*/rank_*/*.ckpt"), key=lambda p: p.stat().st_mtime)
if saved:
    values = ms.load_checkpoint(str(saved[-1]))
    ms.load_param_into_net(model.train_network, values)
    done = int(values["epoch_num"].asnumpy() - 1) * BATCHES + int(
        (values["step_num"].asnumpy() - 1) % BATCHES + 1
    )
    print("resumes at", done, saved[-1], flush=True)
    dataset.set_init_step(done)
    first = done // BATCHES
model.train(EPOCHS, dataset, callbacks=[callback, Pace()], dataset_sink_mode=False, initial_epoch=first)
weights = np.concatenate([p.asnumpy().reshape(-1) for p in net.get_parameters()])
(FOLDER / f"final-{rank}").write_bytes(weights.tobytes())
