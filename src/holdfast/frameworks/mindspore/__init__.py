"""The package for MindSpore: adapter, state, data position, gradients in the compiled graph, checkpoint files."""
