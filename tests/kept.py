"""The captures that this process keeps: no global of models.py, as each capture of its models compares those."""

from auto3d.capture.model import CapturedModel

captures: list[CapturedModel] = []
