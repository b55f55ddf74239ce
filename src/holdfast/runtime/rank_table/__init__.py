"""Rank tables of Ascend's tools: read and checked (``table``), the rules of HCCL, and the table rewritten
when a spare node takes a place."""
