"""What happens to a batch on its way out of a buffer, and to data on its way in."""

from .base import CallableTransform, Compose, InvertTransform, Transform, as_transform
from .keyed import KeyedTransform
from .multi_step import MultiStep, MultiStepTransform
from .returns import DensifyReward, ReturnToGo
from .selection import CatTensors, ExcludeTransform, RenameTransform, SelectTransform
from .values import DecodeText, Normalize, Resize, ToTensorImage
from .windows import FrameStack, NextStateReconstructor, RandomCropTensorDict

__all__ = [
    "CallableTransform",
    "CatTensors",
    "Compose",
    "DecodeText",
    "DensifyReward",
    "ExcludeTransform",
    "FrameStack",
    "InvertTransform",
    "KeyedTransform",
    "MultiStep",
    "MultiStepTransform",
    "NextStateReconstructor",
    "Normalize",
    "RandomCropTensorDict",
    "RenameTransform",
    "Resize",
    "ReturnToGo",
    "SelectTransform",
    "ToTensorImage",
    "Transform",
    "as_transform",
]
