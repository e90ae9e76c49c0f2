"""The models of torchaudio. They share neither arguments nor inputs, so each has an entry of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torchaudio.models as models
from torch import nn

from .arguments import built
from .job import LAYERS, ROWS, Job

__all__ = ["SETTINGS", "jobs", "make"]

WIDTH, HEADS, BINS, FRAMES, SAMPLES, SYMBOLS = 32, 4, 16, 24, 4000, 20


@dataclass(frozen=True)
class Setting:
    name: str


SETTINGS = (Setting("tiny"),)

# Arguments of wav2vec 2.0. The convolutions before its transformer have two layers.
CONVOLUTIONS = {
    "extractor_mode": "layer_norm",
    "extractor_conv_layer_config": [(WIDTH, 10, 5), (WIDTH, 3, 2)],
    "extractor_conv_bias": False,
}
ENCODER = {
    "encoder_embed_dim": WIDTH,
    "encoder_projection_dropout": 0.0,
    "encoder_num_heads": HEADS,
    "encoder_attention_dropout": 0.0,
    "encoder_ff_interm_features": 2 * WIDTH,
    "encoder_ff_interm_dropout": 0.0,
    "encoder_dropout": 0.0,
    "encoder_layer_drop": 0.0,
}
POSITIONS = {"encoder_pos_conv_kernel": 8, "encoder_pos_conv_groups": 4, "encoder_layer_norm_first": True}


def speech_encoder(make: Callable[..., nn.Module], layers: int, **more: object) -> nn.Module:
    return make(**CONVOLUTIONS, **ENCODER, **POSITIONS, encoder_num_layers=layers, **more)


def wave(*shape: int) -> torch.Tensor:
    return torch.randn(ROWS, *shape or (SAMPLES,))


def lengths(count: int) -> torch.Tensor:
    """The length of each row; one row is shorter."""
    made = torch.full((ROWS,), count, dtype=torch.int32)
    made[1] = count - 4
    return made


def symbols(count: int = 8) -> torch.Tensor:
    return torch.randint(1, SYMBOLS, (ROWS, count), dtype=torch.int32)


# By name: a function from the number of layers to the model, and a function that makes its inputs.
MODELS: dict[str, tuple[Callable[[int], nn.Module], Callable[[], dict]]] = {
    "Wav2Letter": (
        lambda n: models.Wav2Letter(num_classes=SYMBOLS, input_type="mfcc", num_features=BINS),
        lambda: {"x": wave(BINS, FRAMES)},
    ),
    "DeepSpeech": (
        lambda n: models.DeepSpeech(BINS, n_hidden=WIDTH, n_class=SYMBOLS, dropout=0.0),
        lambda: {"x": wave(1, FRAMES, BINS)},
    ),
    "ConvTasNet": (lambda n: models.ConvTasNet(2, 16, WIDTH, 3, WIDTH, 2 * WIDTH, n, 2), lambda: {"input": wave(1, SAMPLES)}),
    "Conformer": (
        lambda n: models.Conformer(WIDTH, HEADS, 2 * WIDTH, n, 7),
        lambda: {"input": wave(FRAMES, WIDTH), "lengths": lengths(FRAMES)},
    ),
    "Emformer": (
        lambda n: models.Emformer(WIDTH, HEADS, 2 * WIDTH, n, segment_length=4, right_context_length=1),
        lambda: {"input": wave(FRAMES + 1, WIDTH), "lengths": lengths(FRAMES)},
    ),
    "RNNT": (
        lambda n: models.emformer_rnnt_model(
            input_dim=BINS,
            encoding_dim=WIDTH,
            num_symbols=SYMBOLS,
            segment_length=8,
            right_context_length=4,
            time_reduction_input_dim=8,
            time_reduction_stride=4,
            transformer_num_heads=HEADS,
            transformer_ffn_dim=2 * WIDTH,
            transformer_num_layers=n,
            transformer_dropout=0.0,
            transformer_activation="gelu",
            transformer_left_context_length=4,
            transformer_max_memory_size=0,
            transformer_weight_init_scale_strategy="depthwise",
            transformer_tanh_on_mem=True,
            symbol_embedding_dim=WIDTH,
            num_lstm_layers=2,
            lstm_layer_norm=True,
            lstm_layer_norm_epsilon=1e-3,
            lstm_dropout=0.0,
        ),
        lambda: {
            "sources": wave(FRAMES + 4, BINS),
            "source_lengths": lengths(FRAMES + 4),
            "targets": symbols(),
            "target_lengths": lengths(8),
        },
    ),
    "Wav2Vec2Model": (lambda n: speech_encoder(models.wav2vec2_model, n, aux_num_out=SYMBOLS), lambda: {"waveforms": wave()}),
    "WavLM": (
        lambda n: speech_encoder(models.wavlm_model, n, aux_num_out=SYMBOLS, encoder_num_buckets=32, encoder_max_distance=80),
        lambda: {"waveforms": wave()},
    ),
    "WaveRNN": (
        lambda n: models.WaveRNN(
            [2, 2, 2], SYMBOLS, 8, n_res_block=n, n_rnn=WIDTH, n_fc=WIDTH, n_freq=BINS, n_hidden=WIDTH, n_output=WIDTH
        ),
        lambda: {"waveform": wave(1, 8 * (FRAMES - 4)), "specgram": wave(1, BINS, FRAMES)},
    ),
    "Tacotron2": (
        lambda n: models.Tacotron2(
            n_mels=BINS,
            n_symbol=SYMBOLS,
            encoder_embedding_dim=WIDTH,
            encoder_n_convolution=n,
            symbol_embedding_dim=WIDTH,
            decoder_rnn_dim=WIDTH,
            attention_rnn_dim=WIDTH,
            attention_hidden_dim=WIDTH,
            attention_location_n_filter=8,
            prenet_dim=WIDTH,
            postnet_embedding_dim=WIDTH,
        ),
        lambda: {
            "tokens": symbols(),
            "token_lengths": torch.full((ROWS,), 8),
            "mel_specgram": wave(BINS, 8),
            "mel_specgram_lengths": torch.full((ROWS,), 8),
        },
    ),
    "HDemucs": (
        lambda n: models.HDemucs(["voice", "rest"], channels=8, nfft=1024, depth=n),
        lambda: {"input": wave(2, 4 * SAMPLES)},
    ),
    "SquimObjective": (
        lambda n: models.squim_objective_model(
            feat_dim=32, win_len=16, d_model=WIDTH, nhead=HEADS, hidden_dim=WIDTH, num_blocks=2, rnn_type="LSTM", chunk_size=11
        ),
        lambda: {"x": wave()},
    ),
}


def jobs() -> list[Job]:
    return [Job("torchaudio", name, "sound") for name in MODELS]


def make(job: Job, setting: Setting, layers: int = LAYERS) -> tuple[nn.Module, dict]:
    build, inputs = MODELS[job.name]
    model = built(lambda: build(layers))
    torch.manual_seed(1)
    return model, inputs()
