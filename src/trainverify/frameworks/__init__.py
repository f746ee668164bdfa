"""Training frameworks as they are: their own trainers make the step that `trainverify.torch` captures."""
