"""One rank of a job, as pure machines.

``step`` is the table of the step protocol, ``position`` that of the script around it, ``vote`` what all ranks sum
before an update, and ``layout_agreement`` what a rank has published of its layout.
"""
