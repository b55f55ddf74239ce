"""Functions of TorchScript that compute the same bits at each call, whatever the process has called before.

Theory. TorchScript records the first call of a function (its *profile*), and optimizes the function for the tensors of
this call. The optimized function has other gradients, in the last bits. So the first call differs from the later ones.
If the first call is one of an evaluation, no call is optimized for gradients: the process then computes other bits in
all of its steps. A replacement that begins with an evaluation would do so, and no other rank. Without the profile each
call runs as it is written.
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
