"""Plan a run before it is paid for: predict its memory and time, run it dry, sweep over layouts. See plan.py."""
