#!/bin/bash
# Seed 004: the document's run_cluster.sh. Lines that differ: 2 devices of this host in the place of 8; without the
# document's first lines of help.
execute_path=$(pwd)
export EXECUTE_PATH=${execute_path}
script_self=$(readlink -f "$0")
self_path=$(dirname "${script_self}")
export DATA_PATH=$1
export RANK_TABLE_FILE=$2
export RANK_SIZE=$3
RANK_START=$4
DEVICE_START=0
for((i=0;i<=1;i++));
do
export RANK_ID=$[i+RANK_START]
export DEVICE_ID=$[i+DEVICE_START]
rm -rf ${execute_path}/device_$RANK_ID
mkdir ${execute_path}/device_$RANK_ID
cd ${execute_path}/device_$RANK_ID || exit
pytest -s ${self_path}/resnet50_distributed_training.py >train$RANK_ID.log 2>&1 &
done
