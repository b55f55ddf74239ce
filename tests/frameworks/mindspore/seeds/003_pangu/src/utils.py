"""Seed 003, Pangu chapter: the document's arguments of src/utils.py.

Lines that differ from the document: the paths and the vocabulary.
"""

import ast


def add_training_params(opt):
    """
    Add parameters about training.
    """
    opt.add_argument("--vocab_size",
                     type=int,
                     default=64,  # set by the data set
                     help="vocabulary size, default is 40000.")  # fmt: skip
    opt.add_argument("--data_column_name",
                     type=str,
                     default="input_ids",
                     help="Column name of datasets")  # fmt: skip
    opt.add_argument("--strategy_load_ckpt_path",
                     type=str,
                     default="./strategy/strategy.ckpt",
                     help="The training prallel strategy for the model.")  # fmt: skip


def add_retrain_params(opt):
    """
    Add parameters about retrain.
    """
    opt.add_argument("--pre_trained",
                     type=str,
                     default="./8p",
                     help="Pretrained checkpoint path.")  # fmt: skip
    opt.add_argument("--save_checkpoint_path",
                     type=str,
                     default="./8p",
                     help="Save checkpoint path.")  # fmt: skip
    opt.add_argument("--keep_checkpoint_max",
                     type=int,
                     default=1,
                     help="Max checkpoint save number.")  # fmt: skip
    opt.add_argument("--save_checkpoint_steps",
                     type=int,
                     default=20,
                     help="Save checkpoint step number.")  # fmt: skip
    opt.add_argument("--save_checkpoint",
                     type=ast.literal_eval,
                     default=True,
                     help="Whether save checkpoint in local disk.")  # fmt: skip
    opt.add_argument("--ckpt_name_prefix",
                     type=str,
                     default="pangu",
                     help="Saving checkpoint name prefix.")  # fmt: skip
