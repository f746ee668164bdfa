"""Configurations of the user's own: torchtitan's debug models with few layers, and a Llama of unequal small sizes."""

from torchtitan.models import llama3
from torchtitan.models.llama3 import config_registry

VOCABULARY, WIDTH, HEADS, KV_HEADS, HIDDEN = 24, 16, 4, 2, 20


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


def small():
    """Two layers of width 16, rows of 6 tokens, the loss in chunks of 2 or 3 of them."""
    config = config_registry.llama3_debugmodel()
    model = config.model_spec.model
    rope = model.layers[0].attention.rope
    rope.dim = WIDTH // HEADS
    model.dim = model.tok_embeddings.embedding_dim = model.norm.normalized_shape = model.lm_head.in_features = WIDTH
    model.vocab_size = model.tok_embeddings.num_embeddings = model.lm_head.out_features = VOCABULARY
    config.loss.loss_fn.global_vocab_size = VOCABULARY
    config.loss.num_chunks = 2
    model.layers = llama3._build_llama3_layers(
        n_layers=2, dim=WIDTH, n_heads=HEADS, n_kv_heads=KV_HEADS, hidden_dim=HIDDEN, rope=rope, attn_backend="flex"
    )
    config.training.seq_len = 6
    config.training.local_batch_size = 2
    return config


def long_rows():
    """The same with rows that context parallelism can cut: whole blocks of FlexAttention's for every rank."""
    config = small()
    config.training.seq_len = 512
    return config
