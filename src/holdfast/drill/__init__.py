"""The drill: a real training with injected faults, compared with the same training undisturbed."""
