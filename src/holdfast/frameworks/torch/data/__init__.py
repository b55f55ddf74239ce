"""Where the job is in its data: loaders, samplers, datasets, and digests of what was drawn."""
