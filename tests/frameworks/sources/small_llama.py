"""torchtitan's debug model with two of its layers, as a configuration of the user's own."""

from torchtitan.models.llama3 import config_registry


def two_layers():
    config = config_registry.llama3_debugmodel()
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    config.training.seq_len = 64
    config.training.local_batch_size = 4
    return config


def unscaled():
    """One layer, with rotations as of Llama 3.0."""
    config = two_layers()
    config.model_spec.model.layers = config.model_spec.model.layers[:1]
    config.model_spec.model.layers[0].attention.rope.scaling = "none"
    return config
