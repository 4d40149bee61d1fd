"""Checking the laws: in this process, in a fork of it, or in a separate one."""
