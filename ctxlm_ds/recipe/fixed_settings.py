"""Which settings a run cannot change when it goes on. Imports nothing: a login node asks as well."""

from __future__ import annotations

FIXED_SETTINGS = (
    "model", "objective", "data.blend", "data.temperature", "data.split", "data.seq_length", "data.sample_format",
    "data.short_seq_prob", "data.num_duplicates", "data.packing", "data.max_sequences_per_row",
    "data.reset_at_documents", "training.seed", "optimizer.name",
)  # fmt: skip
"""What fixes the model and the order and content of the rows: a change would not continue the run, it would be
another."""
