"""Seed 002: the document's script that trains on from the weights of a rank that holds the same slices.

Lines that differ from the document: as in parallel_save_ckpt_train.py; `model.build` is left out, because it compiles
for the sink mode that a CPU does not have. The last line writes the weights for the test.
"""

import argparse
import os

import mindspore as ms
from mindspore import nn
from mindspore.train import LossMonitor, Model
from model import Net, create_dataset

import holdfast.mindspore

ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
ms.set_seed(1)
parser = argparse.ArgumentParser()
parser.add_argument("--ckpt_file", default="")
args_opt = parser.parse_args()


def recover_train():
    # model create
    dataset = create_dataset(32)
    net = Net()
    model = Model(net, nn.CrossEntropyLoss(), nn.Momentum(net.trainable_params(), 0.01, 0.9))
    callback = [LossMonitor(dataset.get_dataset_size())]
    # checkpoint load
    if args_opt.ckpt_file:
        param_dict = ms.load_checkpoint(args_opt.ckpt_file)
        ms.load_param_into_net(net, param_dict)
    holdfast.mindspore.train(model, 2, dataset, callbacks=callback, checkpoint="recovered")
    ms.save_checkpoint(net, f"final-{os.environ['RANK']}.ckpt")


recover_train()
