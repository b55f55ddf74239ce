"""Seed 002: the document's script that saves the weights of each rank.

Lines that differ from the document: the device is a CPU, which has data parallel only: all ranks hold the same slices;
`holdfast.mindspore.train` in the place of `model.train`, and `export_checkpoint`, which writes the `group_info.pb` that
MindSpore's compiler of slices writes with GROUP_INFO_FILE; 2 epochs in the place of 4; `ms.set_seed(1)`.
"""

import os

import mindspore as ms
from mindspore import nn
from mindspore.train import CheckpointConfig, LossMonitor, Model, ModelCheckpoint
from model import Net, create_dataset

import holdfast.mindspore

ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
ms.set_seed(1)


def train():
    # model create
    dataset = create_dataset(32)
    net = Net()
    model = Model(net, nn.CrossEntropyLoss(), nn.Momentum(net.trainable_params(), 0.01, 0.9))
    callback_size = dataset.get_dataset_size()
    # checkpoint save
    ckpt_config = CheckpointConfig(
        save_checkpoint_steps=callback_size, keep_checkpoint_max=4, integrated_save=False
    )
    directory = f"ckpt_dir{os.environ['RANK']}"
    ckpoint_cb = ModelCheckpoint(prefix="test", directory=directory, config=ckpt_config)
    callback = [ckpoint_cb, LossMonitor(callback_size)]
    holdfast.mindspore.train(model, 2, dataset, callbacks=callback, checkpoint="checkpoints")


train()
