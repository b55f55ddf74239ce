"""Rank tables of Ascend's tools.

``table`` reads and checks them. ``hccl_rules`` has the rules of HCCL. ``rewriting`` changes a table when a spare node
takes the ranks of a lost node.
"""
