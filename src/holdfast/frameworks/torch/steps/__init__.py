"""Checks and helpers of one step: the proof of a block, gradients that are not finite or left over, accumulation."""
