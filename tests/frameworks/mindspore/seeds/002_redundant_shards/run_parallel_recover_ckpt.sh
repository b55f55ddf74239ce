#!/bin/bash
# Seed 002: the document's start. Lines that differ: `holdfast run` starts 2 ranks in the place of the document's loop,
# which gives each rank its own file; here both read that of rank 0.
export DATASET_PATH=$1
holdfast run --framework mindspore --nproc-per-node 2 parallel_recover_train.py --ckpt_file "$2"
