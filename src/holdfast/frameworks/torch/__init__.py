"""The adapter of PyTorch.

torch is imported here before any module of this package. The import of torch makes the worker ready
(``runtime/node/framework_registry.py``), and that imports modules of this package, none of which may be half imported
at that time.
"""

import torch  # noqa: F401
