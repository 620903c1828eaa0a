"""Who gets which rows, so that work is even, few rows move, and tokens are shared out."""
