"""Checking the laws: in this process, or in a separate one."""
