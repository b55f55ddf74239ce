"""The step protocol of one rank: ``step`` is its table, ``vote`` what all ranks sum before an update, and
``layout_agreement`` what a rank has published of its layout."""
