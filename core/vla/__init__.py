"""Data of vision-language-action models: metadata, tokens of actions, images, and the layout of a step.

TorchRL's `OpenVLAImagePreprocessor` is not part of it: to prepare an image as OpenVLA does needs the JPEG codec that
its models were trained with.
"""
