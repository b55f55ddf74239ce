"""The PyTorch adapter: the code that connects Holdfast with PyTorch.

torch is imported here, before any module of this package. Importing torch in a worker also installs Holdfast's process
groups (``runtime/node/framework_registry.py``), and that imports modules of this package. If one of these modules
imported torch first, it would still be half imported when the installation needs it.
"""

import torch  # noqa: F401
