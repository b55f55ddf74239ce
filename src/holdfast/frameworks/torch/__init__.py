"""The adapter of PyTorch.

torch is loaded before any module of this package: its import makes the worker ready
(``runtime/node/framework_registry.py``), which imports modules of this package, and none of them may be half loaded
then.
"""

import torch  # noqa: F401
