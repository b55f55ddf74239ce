"""The files of a checkpoint: the safetensors container, the JSON manifests, Python values as JSON."""
