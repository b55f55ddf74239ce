"""Layouts as data, and pure functions of them: ``box``, ``shardings``, ``layout`` (the catalogue), ``save_plan``
(which rank writes what), ``coverage``, ``replica_digests``."""
