"""What happens to a batch on its way out of a buffer, and to data on its way in."""

from .base import CallableTransform, Compose, InvertTransform, Transform, as_transform
from .densify_reward import DensifyReward
from .images import Resize, ToTensorImage
from .keyed import KeyedTransform
from .multi_step import MultiStep
from .multi_step_transform import MultiStepTransform
from .next_state import NextStateReconstructor
from .normalize import Normalize
from .returns import ReturnToGo
from .selection import CatTensors, ExcludeTransform, RenameTransform, SelectTransform
from .text import DecodeText
from .windows import FrameStack, RandomCropTensorDict

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
