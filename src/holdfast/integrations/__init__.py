"""The integrations of Hugging Face's ``Trainer``, Lightning, Megatron-core and Ray."""
