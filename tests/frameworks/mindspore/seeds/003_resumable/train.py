"""Seed 003, MindSpore chapter: the document's additions to the ResNet's train.py, and what they need around them.

Lines that differ from the document: the device is a CPU; the configuration is written here in the place of a yaml file;
`create_dataset` and `resnet50` are those of seed 004; `holdfast.mindspore.train` in the place of `model.train`;
`ms.set_seed(1)`; an argument too many of a log line is left out. The last line writes the weights for the test.
"""

import glob
import logging
import os
from types import SimpleNamespace

import mindspore as ms
from mindspore import nn
from mindspore.train import CheckpointConfig, LossMonitor, Model, ModelCheckpoint
from resnet import resnet50
from resnet50_distributed_training import create_dataset
from utils import init_weight

import holdfast.mindspore

ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
ms.set_seed(1)
logging.basicConfig(level=logging.INFO)
config = SimpleNamespace(
    data_path=os.environ["DATA_PATH"], pre_trained="./output/ckpt", save_ckpt_dir="./output/ckpt", net_name="resnet50",
    filter_weight=False, save_checkpoint=True, save_checkpoint_epochs=1, keep_checkpoint_max=10, epoch_size=4,
    start_epoch=0, rank_id=int(os.environ["RANK_ID"]), logger=logging.getLogger("resnet"),
)  # fmt: skip


# find the newest *.ckpt file in the directory pre_trained
def _find_latest_ckpt():
    ckpt_files = glob.glob(config.pre_trained + "*/*.ckpt")
    if ckpt_files:
        ckpt_files.sort(key=os.path.getmtime, reverse=True)
    return ckpt_files


# try to load a ckpt file, INIT_WEIGHT_MAX_ATTEMPTS times
def _try_to_init_weight(net, config):
    if os.path.isfile(config.pre_trained):
        latest_ckpt = [config.pre_trained]
    else:
        latest_ckpt = _find_latest_ckpt()

    if not latest_ckpt:
        config.logger.warning("There is not ckpt file: %s", config.pre_trained)
        return

    init_weight_attempts = 0
    INIT_WEIGHT_MAX_ATTEMPTS = 5
    while latest_ckpt and init_weight_attempts < INIT_WEIGHT_MAX_ATTEMPTS:
        try:
            config.pre_trained = latest_ckpt[0]
            init_weight(net, config)
            break
        except Exception:
            config.logger.warning(
                "Pre trained ckpt %s format is incorrect, try to load the last most recent ckpt",
                config.pre_trained,
            )
            if latest_ckpt[1:]:
                latest_ckpt = latest_ckpt[1:]
                init_weight_attempts += 1
                continue
            else:
                config.logger.error("no more ckpt to load")
                raise ValueError(
                    "ckpt format is incorrect, no more ckpt to load, load ckpt failed."
                ) from None


def train_net():
    """train net"""
    dataset = create_dataset(config.data_path)
    step_size = dataset.get_dataset_size()
    net = resnet50(32, 10)
    _try_to_init_weight(net, config)
    loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
    opt = nn.Momentum(net.trainable_params(), 0.01, 0.9)
    model = Model(net, loss_fn=loss, optimizer=opt)
    cb = [LossMonitor()]
    if config.save_checkpoint:
        ckpt_append_info = [{"epoch_num": 0, "step_num": 0}]
        config_ck = CheckpointConfig(
            save_checkpoint_steps=config.save_checkpoint_epochs * step_size,
            keep_checkpoint_max=config.keep_checkpoint_max,
            append_info=ckpt_append_info,
        )
        ckpt_cb = ModelCheckpoint(
            prefix=config.net_name,
            directory=config.save_ckpt_dir + "_" + str(config.rank_id),
            config=config_ck,
        )
        cb += [ckpt_cb]
    holdfast.mindspore.train(model, config.epoch_size, dataset, callbacks=cb, checkpoint="checkpoints")
    ms.save_checkpoint(net, f"final-{config.rank_id}.ckpt")


if __name__ == "__main__":
    train_net()
