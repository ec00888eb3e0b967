"""Blocks of other hosts: devices, discovery and directory of peers."""
