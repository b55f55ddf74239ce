"""Seed 003, MindSpore chapter: the document's addition to src/utils.py. Lines that differ: none."""

import os

import mindspore as ms


def filter_checkpoint_parameter_by_list(param_dict, filter_list):
    for name in filter_list:
        param_dict.pop(name, None)


def init_weight(net, cfg):
    """init_weight"""
    if cfg.pre_trained:
        if not os.path.isfile(cfg.pre_trained):
            cfg.logger.warning("There is not ckpt file: %s", cfg.pre_trained)
        else:
            param_dict = ms.load_checkpoint(cfg.pre_trained)
            if param_dict.get("epoch_num") is None:
                raise ValueError("Can not find epoch_num in ckptfile")
            if cfg.filter_weight:
                filter_list = [x.name for x in net.end_point.get_parameters()]
                filter_checkpoint_parameter_by_list(param_dict, filter_list)
            ms.load_param_into_net(net, param_dict)
            cfg.start_epoch = int(param_dict.get("epoch_num").asnumpy().item())
            cfg.logger.info("Pre trained ckpt mode: %s loading", cfg.pre_trained)
