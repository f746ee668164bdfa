"""What front ends for frameworks share: writing a program op by op, literals, names."""
