#!/bin/bash
# Seed 001: the document's start. Lines that differ: 2 workers in the place of 8, the port.
export MS_ENABLE_GRACEFUL_EXIT=1
msrun --worker_num=2 --local_worker_num=2 --master_addr=127.0.0.1 --master_port=${MASTER_PORT} --join=True --log_dir=./comm_subgraph_logs graceful_exit.py
