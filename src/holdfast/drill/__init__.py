"""The drill: a real training with injected faults, and its comparison with the same training without faults."""
