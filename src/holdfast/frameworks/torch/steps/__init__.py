"""Checks and helpers of one step: the proof of the block, gradients that are not finite or left over, accumulation."""
