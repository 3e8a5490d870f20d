"""Programs of other projects' trainers over shardstore, each run by torchrun in the environment that
scripts/trainers_env makes: see tests/interop/test_trainers.py. None of them saves or loads by
itself: the trainer does, as it always does, after one line of ours."""
