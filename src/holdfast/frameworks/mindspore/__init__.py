"""MindSpore: adapter, state, data position, gradients inside the compiled graph, checkpoint files."""
