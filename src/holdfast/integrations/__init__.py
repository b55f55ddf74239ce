"""Sessions inside the training loops of other libraries: Hugging Face's ``Trainer``, Lightning, Megatron-core and
Ray.
"""
