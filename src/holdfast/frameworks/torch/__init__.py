"""The PyTorch adapter: the code that connects Holdfast with PyTorch.

torch is imported here, before any module of this package. Importing torch in a worker also installs Holdfast's process
groups (``runtime/node/framework_registry.py``), and the installation imports modules of this package. If one of these
modules were the first to import torch, the installation would find that module half imported.
"""

import torch  # noqa: F401
