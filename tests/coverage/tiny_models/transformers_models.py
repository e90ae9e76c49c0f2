"""Every class that the auto classes of transformers list for a task that trains."""

from __future__ import annotations

import dataclasses

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

from .job import LAYERS, MOST_PARAMETERS, Job
from .randomness import calm
from .transformers_batches import batch
from .transformers_configs import SETTINGS, Setting, fields_of, shrink

__all__ = ["SETTINGS", "TASKS", "jobs", "make"]

# Tasks with the mappings `MODEL_FOR_…_MAPPING_NAMES` of `modeling_auto`. A class is trained for the first task that lists it.
TASKS = {
    "causal LM": "CAUSAL_LM",
    "masked LM": "MASKED_LM",
    "sequence classification": "SEQUENCE_CLASSIFICATION",
    "seq2seq": "SEQ_TO_SEQ_CAUSAL_LM",
    "image classification": "IMAGE_CLASSIFICATION",
    "audio classification": "AUDIO_CLASSIFICATION",
    "audio frames": "AUDIO_FRAME_CLASSIFICATION",
    "audio x-vector": "AUDIO_XVECTOR",
    "CTC": "CTC",
    "speech seq2seq": "SPEECH_SEQ_2_SEQ",
    "token classification": "TOKEN_CLASSIFICATION",
    "question answering": "QUESTION_ANSWERING",
    "multiple choice": "MULTIPLE_CHOICE",
    "next sentence": "NEXT_SENTENCE_PREDICTION",
    "image-text-to-text": "IMAGE_TEXT_TO_TEXT",
    "document question answering": "DOCUMENT_QUESTION_ANSWERING",
    "visual question answering": "VISUAL_QUESTION_ANSWERING",
    "object detection": "OBJECT_DETECTION",
    "zero-shot object detection": "ZERO_SHOT_OBJECT_DETECTION",
    "semantic segmentation": "SEMANTIC_SEGMENTATION",
    "instance segmentation": "INSTANCE_SEGMENTATION",
    "universal segmentation": "UNIVERSAL_SEGMENTATION",
    "depth estimation": "DEPTH_ESTIMATION",
    "normal estimation": "NORMAL_ESTIMATION",
    "pose estimation": "POSE_ESTIMATION",
    "image matting": "IMAGE_MATTING",
    "image to image": "IMAGE_TO_IMAGE",
    "causal image modeling": "CAUSAL_IMAGE_MODELING",
    "masked image modeling": "MASKED_IMAGE_MODELING",
    "video classification": "VIDEO_CLASSIFICATION",
    "image-text contrast": "ZERO_SHOT_IMAGE_CLASSIFICATION",
    "time series prediction": "TIME_SERIES_PREDICTION",
    "time series classification": "TIME_SERIES_CLASSIFICATION",
    "time series regression": "TIME_SERIES_REGRESSION",
    "table recognition": "TABLE_RECOGNITION",
    "text recognition": "TEXT_RECOGNITION",
    "pretraining": "PRETRAINING",
}


def jobs() -> list[Job]:
    """Every class once, for the first task that lists it."""
    found: dict[str, Job] = {}
    for task, mapping in TASKS.items():
        listed = getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES", {})  # some are not in every version
        for config, names in listed.items():
            for name in [names] if isinstance(names, str) else names:
                found.setdefault(name, Job("transformers", name, task, config))
    return list(found.values())


def make(job: Job, setting: Setting, layers: int = LAYERS) -> tuple[nn.Module, dict]:
    """The model with random weights, in training mode, and its batch.

    Raises `ValueError` if it has more than `MOST_PARAMETERS` parameters, or requires an input that no rule makes.
    """
    model = build(job, dataclasses.replace(setting, layers=layers))
    return model, batch(model, job, setting)


def build(job: Job, setting: Setting) -> nn.Module:
    transformers.logging.set_verbosity_error()
    cls = getattr(transformers, job.name)
    config_class = cls.config_class or CONFIG_MAPPING[job.source]
    decoder = job.task == "causal LM" and "is_decoder" in fields_of(config_class)
    config = shrink(config_class, setting, **({"is_decoder": True} if decoder else {}))
    for name, value in (("pad_token_id", 0), ("decoder_start_token_id", 0)):
        if getattr(config, name, None) is None:
            setattr(config, name, value)
    with torch.device("meta"):
        count = sum(p.numel() for p in cls(config).parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"it has {count / 1e6:.0f} M parameters after shrinking")
    torch.manual_seed(0)
    return calm(cls(config).train())
