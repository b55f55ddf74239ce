"""Checks and helpers of one step: proof of the block, left-over gradients, gradients with inf or nan, accumulation."""
