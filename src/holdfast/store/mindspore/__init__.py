"""Files of MindSpore, read and written without MindSpore: strategy files, sliced checkpoints, ``group_info.pb``."""
