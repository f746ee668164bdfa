"""Experts with few places."""

from __future__ import annotations

from dataclasses import replace

from zoo.parallel.experts import CONFIG

FEW = replace(CONFIG, capacity=2)  # places for 6 tokens, each of which goes to 3 of 12 experts
