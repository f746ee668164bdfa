"""What the campaigns of random training steps share: truth and verdict of a program, workers, the command and its table."""
