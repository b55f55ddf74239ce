#!/bin/bash
# Seed 002: the document's start. Lines that differ: `holdfast run` starts 2 ranks in the place of the document's loop.
export DATASET_PATH=$1
export GROUP_INFO_FILE=./group_info.pb
holdfast run --framework mindspore --nproc-per-node 2 parallel_save_ckpt_train.py
