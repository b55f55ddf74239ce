"""Seed 003, Pangu chapter: the document's additions to train.py, and what they need around them.

Lines that differ from the document: the device is a CPU, which has data parallel only, without pipeline stages; the
network is a Transformer of one layer on generated text; the strategy is kept in the working directory;
`holdfast.mindspore.train` in the place of `model.train`; `model.build` is left out, because it compiles for the sink
mode that a CPU does not have; the first message prints `ckpt_all_files`, because the document's name is not set there
yet; `ms.set_seed(1)`. The test sets no GROUP_INFO_FILE: on a CPU MindSpore then refuses to compile. The last line
writes the weights for the test.
"""

import argparse
import datetime
import glob
import os

import mindspore
import mindspore as ms
import mindspore.communication.management as D
import mindspore.dataset as ds
import numpy as np
from mindspore import load_checkpoint, load_param_into_net, nn
from mindspore.train import CheckpointConfig, LossMonitor, Model, ModelCheckpoint
from src.utils import add_retrain_params, add_training_params

import holdfast.mindspore

LENGTH, TEXTS, BATCH, EPOCHS = 16, 320, 8, 3


class PanguAlpha(nn.Cell):
    """Tokens, int32 (batch, length) -> logits of the next ones (batch * length, vocabulary)."""

    def __init__(self, vocab_size):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, 32, embedding_table="normal")
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.head = nn.Dense(32, vocab_size)
        self.vocab_size = vocab_size

    def construct(self, x):
        return self.head(self.layer(self.embedding(x))).reshape(-1, self.vocab_size)


class Loss(nn.Cell):
    """Mean over all tokens."""

    def __init__(self):
        super().__init__()
        self.loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")

    def construct(self, logits, labels):
        return self.loss(logits, labels.reshape(-1))


def create_dataset(args_opt):
    rng = np.random.default_rng(0)
    text = rng.integers(0, args_opt.vocab_size, (TEXTS, LENGTH + 1)).astype(np.int32)
    columns = (text[:, :-1].copy(), text[:, 1:].copy())
    data = ds.NumpySlicesDataset(
        columns, [args_opt.data_column_name, "labels"], num_shards=D.get_group_size(), shard_id=D.get_rank()
    )
    return data.batch(BATCH)


def set_parallel_context(args_opt):
    """Set parallel context"""
    if not os.path.exists(args_opt.strategy_load_ckpt_path):
        args_opt.strategy_load_ckpt_path = ""

    strategy_ckpt_save_file_path = "./strategy/strategy.ckpt"
    if args_opt.strategy_load_ckpt_path == strategy_ckpt_save_file_path:
        strategy_ckpt_save_file_path = "./strategy/strategy_new.ckpt"

    mindspore.set_auto_parallel_context(
        parallel_mode="data_parallel",
        gradients_mean=False,
        device_num=D.get_group_size(),
        strategy_ckpt_save_file=strategy_ckpt_save_file_path,
    )


def add_checkpoint_callback_policy(args_param, callback, rank_id):
    r"""
    Add checkpoint policy to callback.
    """
    if args_param.save_checkpoint:
        # checkpoint store epoch_num and step_num info
        ckpt_append_info = [
            {"epoch_num": args_param.has_trained_epoches, "step_num": args_param.has_trained_steps}
        ]
        ckpt_config = CheckpointConfig(
            save_checkpoint_steps=args_param.save_checkpoint_steps,
            keep_checkpoint_max=args_param.keep_checkpoint_max,
            integrated_save=False,
            append_info=ckpt_append_info,
        )

        ckpoint_cb = ModelCheckpoint(
            prefix=args_param.ckpt_name_prefix + str(rank_id),
            directory=os.path.join(args_param.save_checkpoint_path, f"rank_{rank_id}"),
            config=ckpt_config,
        )

        callback.append(ckpoint_cb)


def restore_checkpoint(args_param, network):
    r"""
    Load checkpoint process.
    """
    print("======start single checkpoint", flush=True)
    ckpt_name = args_param.ckpt_name_prefix
    ckpt_pattern = os.path.join(args_param.save_checkpoint_path, f"rank_{D.get_rank()}", f"{ckpt_name}*.ckpt")
    ckpt_all_files = glob.glob(ckpt_pattern)
    if not ckpt_all_files:
        print(
            f"There is no ckpt file in {args_param.save_checkpoint_path}, "
            f"current ckpt_files found is {ckpt_all_files} "
            f"with pattern {ckpt_pattern}, so skip the loading."
        )
        return
    ckpt_exp_pattern = os.path.join(
        args_param.save_checkpoint_path,
        f"rank_{D.get_rank()}",
        f"{ckpt_name}*_breakpoint.ckpt",
    )
    ckpt_exp_files = glob.glob(ckpt_exp_pattern)
    ckpt_files = []
    for file in ckpt_all_files:
        if file not in ckpt_exp_files:
            ckpt_files.append(file)  # noqa: PERF401

    if not ckpt_files:
        print(
            f"There is no ckpt file in {args_param.save_checkpoint_path}, "
            f"current ckpt_files found is {ckpt_files} "
            f"with pattern {ckpt_pattern}, so skip the loading."
        )
        return
    ckpt_files.sort(key=os.path.getmtime, reverse=True)
    time_stamp = datetime.datetime.now()
    print(
        f"time stamp {time_stamp.strftime('%Y.%m.%d-%H:%M:%S')} pre trained ckpt model {ckpt_files} loading",
        flush=True,
    )
    # load the newest checkpoint
    print(f"Start to load from {ckpt_files[0]}")
    param_dict = load_checkpoint(ckpt_files[0])
    if param_dict.get("epoch_num") and param_dict.get("step_num"):
        args_param.has_trained_epoches = int(param_dict["epoch_num"].data.asnumpy())
        args_param.has_trained_steps = int(param_dict["step_num"].data.asnumpy())
    load_param_into_net(network, param_dict)


def main():
    parser = argparse.ArgumentParser()
    add_training_params(parser)
    add_retrain_params(parser)
    args_opt = parser.parse_args()
    args_opt.has_trained_epoches = args_opt.has_trained_steps = 0
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    ms.set_seed(1)
    D.init()
    rank = D.get_rank()
    set_parallel_context(args_opt)
    # env variable prepare
    group_info_file = os.getenv("GROUP_INFO_FILE")
    if group_info_file:
        with open(os.path.expanduser("group_info_env"), "a") as outfile:
            outfile.write(f"export GROUP_INFO_FILE_REFLECT={group_info_file}\n")
    dataset = create_dataset(args_opt)
    network = PanguAlpha(args_opt.vocab_size)
    restore_checkpoint(args_opt, network)
    callback = [LossMonitor()]
    add_checkpoint_callback_policy(args_opt, callback, rank)
    model = Model(network, Loss(), nn.AdamWeightDecay(network.trainable_params(), 1e-3))
    holdfast.mindspore.train(model, EPOCHS, dataset, callbacks=callback, checkpoint="checkpoints")
    ms.save_checkpoint(network, f"final-{rank}.ckpt")


if __name__ == "__main__":
    main()
