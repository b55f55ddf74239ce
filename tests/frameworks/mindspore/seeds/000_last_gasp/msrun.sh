#!/bin/bash
# Seed 000: the document's start. Lines that differ: 2 workers in the place of 4, the port.
EXEC_PATH=$(pwd)
export MS_ENABLE_TFT='{TTP:1}'
export MINDIO_FOR_MINDSPORE=1
export DATA_PATH=${EXEC_PATH}/MNIST_Data/train/
msrun --worker_num=2 --local_worker_num=2 --master_port=${MASTER_PORT} --join=False --log_dir=msrun_log --cluster_time_out=300 mindio_ttp_case.py
