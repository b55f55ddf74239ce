"""Many checkpoints: ``checkpoint_root`` (find, list, prune), ``lineage``, ``retention`` (when to save and what to
keep), ``repair``, ``checkpoint_tools``."""
