"""Emulated devices, whose operations only wait."""
