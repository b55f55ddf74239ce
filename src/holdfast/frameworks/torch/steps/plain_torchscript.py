"""Functions of TorchScript that compute the same bits at each call, whatever the process has called before.

Theory. TorchScript records the first call of a function (its *profile*), and optimizes the function for the tensors
of this call. The gradients of the optimized function differ in the last bits. So the first call has other gradients
than the later calls. If the first call belongs to an evaluation, no call is optimized for gradients, and the process
computes other bits in all of its steps. A replacement may begin with an evaluation, and would then compute other bits
than all other ranks. Without the profile each call runs as it is written.
"""

from __future__ import annotations

from holdfast.frameworks.torch import private_api


class PlainTorchScript:
    """TorchScript without the optimizations that depend on earlier calls, from now until :meth:`remove`."""

    def __init__(self) -> None:
        self._before = private_api.specialize_torchscript(False)

    def remove(self) -> None:
        """Restore the setting from before."""
        private_api.specialize_torchscript(self._before)
