"""The package for TensorFlow 2: adapter, state, data position, worker setup."""
