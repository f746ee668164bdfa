"""A small GPT for pipelines."""

from __future__ import annotations

from trainverify.zoo import gpt

GPT2 = gpt.Config(4, 768, 12, vocabulary=50304)
