#!/bin/bash
# Seed 003, PyTorch chapter: the end of the document's train_start.sh. Lines that differ: `holdfast run` in the place of
# torchrun, the sizes, and no port, which `holdfast run` chooses.
export RESUME_MODE_ENABLE=1
export HCCL_ASYNC_ERROR_HANDLING=1
GPUS_PER_NODE=2
NNODES=1
NODE_RANK=0
DISTRIBUTED_ARGS="--nproc_per_node $GPUS_PER_NODE --nnodes $NNODES --node_rank $NODE_RANK --max_restarts 5 --monitor_interval 10 "
holdfast run --run-id "$1" $DISTRIBUTED_ARGS main.py --resume=true
