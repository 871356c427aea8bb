"""`python -m grpo_fast`, the same as the command `grpo-fast`."""

from grpo_fast.cli import main

if __name__ == "__main__":
    main()
