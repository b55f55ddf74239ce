"""The commands of ``holdfast``, one module each: ``holdfast run`` is in ``run``, ``holdfast ckpt`` in ``ckpt``, ..."""
