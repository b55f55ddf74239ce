"""The position of the job in its data: loaders, samplers, datasets, and digests of drawn batches."""
