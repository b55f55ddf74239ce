"""One module per command: ``holdfast run`` is ``run``, ``holdfast ckpt`` is ``ckpt``, and so on."""
